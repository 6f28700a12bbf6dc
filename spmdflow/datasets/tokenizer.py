"""The seam to transformers' tokenizers, imported late and only here: ids, chats, text of responses.

A trap: some tokenizers have eos = bos (one id opens and ends a story). Find the end of a response
by its position, never by masking every id that equals eos: that hits the leading token as well.

A tokenizer decodes tokens by what stands before them: many drop the space that a text begins with.
So a response's text is the text of prompt and response without that of the prompt, and both join
to the text as it was. Special tokens (the end of a sequence, marks of a chat) have no text. A
character whose bytes are spread over several tokens is shown once it is complete; one that is cut
by the end of the response is shown as U+FFFD. Where the prompt's tokens end inside a character,
the whole character belongs to the response.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def _num_trailing(tokenizer: Any) -> int:
    """How many tokens (an end-of-sequence) the tokenizer puts after every text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - len(bare) - start
    return 0


_CONTEXT = 16
"""Tokens of a prompt that are decoded: what stands further back changes no text."""
_CUT = "\ufffd"
"""A character that is not complete."""


def response_texts(
    tokenizer: Any, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[str]:
    """The text of each response behind its prompt (token ids); all are decoded together."""
    texts = _texts_after(tokenizer, [prompt[-_CONTEXT:] for prompt in prompts], responses)
    left = [place for place, text in enumerate(texts) if text is None]
    behind, after = [prompts[place] for place in left], [responses[place] for place in left]
    alone = _decode(tokenizer, after)
    for place, text, own in zip(left, _texts_after(tokenizer, behind, after), alone, strict=True):
        texts[place] = own if text is None else text
    return [text or "" for text in texts]


class StopStrings:
    """Whether a response ends, as its text now has one of some strings."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        self._special = frozenset(tokenizer.all_special_ids)
        self._window = max(len(text.encode()) for text in strings) + 1
        """Tokens that a string can be spread over: each has a byte of it at least."""

    def first_ends(self, rows: Sequence[tuple[list[int], list[int], int]]) -> list[int | None]:
        """For (prompt, response, tokens that were asked about before): the response's tokens up to
        the one that completed a string, or None. Texts are decoded in one batch first."""
        windows = []
        for prompt, response, known in rows:
            shown = [x for x in (*prompt[-_CONTEXT:], *response) if x not in self._special]
            windows.append(shown[-(len(response) - known + self._window + 2 * _CONTEXT) :])
        texts = self._tokenizer.batch_decode(windows, clean_up_tokenization_spaces=False)
        return [
            next((n for n in range(known + 1, len(said) + 1) if self.ends(prompt, said[:n])), None)
            if any(string in text for string in self._strings)
            else None
            for (prompt, said, known), text in zip(rows, texts, strict=True)
        ]

    def ends(self, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Whether the last token of response completed a string; the tokens before did not.

        To be asked after each token.
        """
        if response[-1] in self._special:
            return False
        start, shown = len(response), 0
        while start and shown < self._window:
            start -= 1
            shown += response[start] not in self._special
        context = [*prompt[-_CONTEXT:], *response[max(0, start - _CONTEXT) : start]]
        (text,) = response_texts(self._tokenizer, [context], [response[start:]])
        return any(string in text for string in self._strings)


def _texts_after(
    tokenizer: Any, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> list[str | None]:
    """The text that the tokens `after` add to those `before`, row by row; None: it cannot be told.

    Samples of a prompt share what is before: it is decoded once.
    """
    heads = list(dict.fromkeys(map(tuple, before)))
    both = [[*head, *ids] for head, ids in zip(before, after, strict=True)]
    shown = dict(zip(heads, _decode(tokenizer, heads), strict=True))
    pairs = zip(map(shown.__getitem__, map(tuple, before)), _decode(tokenizer, both), strict=True)
    return [_without_head(head, whole) for head, whole in pairs]


def _without_head(head: str, whole: str) -> str | None:
    for shown in (head, head.rstrip(_CUT)):
        if shown and whole.startswith(shown):
            return whole[len(shown) :]
    return None


def _decode(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    """Texts without special tokens; a tokenizer of the library `tokenizers` takes all at once."""
    rows = list(map(list, ids))
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        texts: list[str] = backend.decode_batch(rows, skip_special_tokens=True)
        return texts
    return list(
        tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
