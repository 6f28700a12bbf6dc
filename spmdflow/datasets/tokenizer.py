"""The seam to transformers' tokenizers. Imported late and only here.

A trap: some tokenizers have eos = bos (one id opens and ends a story). Find the end of a response
by its position, never by masking every id that equals eos: that hits the leading token as well.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from spmdflow.errors import ConfigError, DataError

# Any stands for a transformers tokenizer: its base class is untyped and imported late.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@lru_cache
def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local folder, one object per folder; ConfigError if there is none."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in _FILES):
        got = "a folder without one" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"data.tokenizer_path: got {path!r}, {got}; expected a folder with tokenizer.json; "
            f"correct it, or save the model's tokenizer there (save_pretrained)"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, LookupError) as err:
        raise ConfigError(
            f"data.tokenizer_path: got {path!r}, whose tokenizer cannot be read "
            f"({type(err).__name__}: {str(err).splitlines()[0]}); expected tokenizer.json and "
            f"tokenizer_config.json; copy them again"
        ) from err


def eos_token_id(tokenizer: Any) -> int:
    """Id that ends a response; ConfigError if the tokenizer names none. May equal bos."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"data.tokenizer_path: got {tokenizer.name_or_path!r}, which names no end-of-sequence "
            f"token; expected eos_token in its tokenizer_config.json; add it"
        )
    return int(tokenizer.eos_token_id)


def pad_token_id(tokenizer: Any) -> int:
    """Id to fill with; the end-of-sequence id if the tokenizer has none. Never to be masked by."""
    pad = tokenizer.pad_token_id
    return eos_token_id(tokenizer) if pad is None else int(pad)


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids as the tokenizer makes them, its leading tokens included, trailing ones not."""
    if not texts:
        return []
    rows = tokenizer(texts, verbose=False).input_ids  # over-long ones are counted, not warned of
    added = _num_trailing(tokenizer)
    return [row[: len(row) - added] for row in rows]


def template_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered chats: the template has written the special tokens already."""
    return tokenizer(texts, add_special_tokens=False, verbose=False).input_ids if texts else []


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], *, answered: bool = False) -> str:
    """The messages in the chat template, up to where the answer begins; answered: as they are.

    DataError if the template refuses them; the caller adds file and line.
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answered
        )
    except (TemplateError, TypeError, LookupError, ValueError) as err:
        raise DataError(f"the chat template refuses the messages ({err})") from err


def check_chat_template(tokenizer: Any) -> None:
    """ConfigError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.chat_template: got true, but the tokenizer {tokenizer.name_or_path!r} has no "
            f"chat template; expected one in its folder; set data.chat_template=false, or use "
            f"the tokenizer of a chat model"
        )


def _num_trailing(tokenizer: Any) -> int:
    """How many tokens (an end-of-sequence) the tokenizer puts after every text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - len(bare) - start
    return 0
