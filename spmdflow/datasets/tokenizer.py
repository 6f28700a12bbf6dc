"""Tokenizers of transformers, imported late and only here: ids, and the text of responses.

Some tokenizers have eos = bos (one id begins and ends a story). Find the end of a response by its
position, never by masking every id that equals eos: that would mask the leading token as well.

How tokens decode depends on those before them: many tokenizers drop a leading space. So the text of
a response is that of prompt and response together, less that of the prompt. Special tokens (end of
sequence, marks of a chat) have no text. A character whose bytes are spread over several tokens is
shown once it is complete; one that is cut by the end of the response is shown as U+FFFD. If the
prompt ends inside a character, the whole character belongs to the response.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from spmdflow.data.ragged import rows_of
from spmdflow.errors import ConfigError

# Tokenizers of transformers are typed Any: their base class is untyped and imported late.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@lru_cache
def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a local folder; the same object for the same path (cached).

    ConfigError if the folder has no tokenizer, or one that transformers cannot read without the
    folder's own code. Downloads nothing.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in _FILES):
        got = "a folder without one" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"data.tokenizer_path: got {path!r}, {got}; expected a folder with tokenizer.json; "
            f"correct it, or save the model's tokenizer there (save_pretrained)"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, LookupError) as err:
        raise ConfigError(
            f"data.tokenizer_path: got {path!r}, whose tokenizer cannot be read "
            f"({type(err).__name__}: {str(err).splitlines()[0]}); expected tokenizer.json and "
            f"tokenizer_config.json; copy them again"
        ) from err


def eos_token_id(tokenizer: Any) -> int:
    """Id that ends a response; it may equal bos. ConfigError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"data.tokenizer_path: got {tokenizer.name_or_path!r}, which names no end-of-sequence "
            f"token; expected eos_token in its tokenizer_config.json; add it"
        )
    return int(tokenizer.eos_token_id)


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text, as for a prompt that generation continues.

    Special tokens that the tokenizer adds before a text are included, those after it are not.
    """
    if not texts:
        return []
    rows = tokenizer(texts, verbose=False).input_ids  # over-long ones are counted, not warned of
    added = _num_trailing(tokenizer)
    return [row[: len(row) - added] for row in rows]


def longest_token(tokenizer: Any) -> int | None:
    """Return the most characters of a text that one token can stand for; None if unlimited.

    It is the longest vocabulary entry, times 4 if the normalizer composes characters (NFC). Only
    byte-level BPE and BPE with byte fallback have a limit: otherwise an unknown word is one token
    whatever its length. There is none if the tokenizer drops characters, such as white space. White
    space that a special token swallows (lstrip, rstrip) is not counted.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    if backend.model.unk_token is not None and not backend.model.byte_fallback:
        return None
    steps = [*_steps_of(backend.normalizer), *_steps_of(backend.pre_tokenizer)]
    if any(not _keeps_characters(step) for step in steps):
        return None
    longest = max(map(len, tokenizer.get_vocab()))
    composes = any(step["type"] == "NFC" for step in steps)
    if composes:
        return longest * _COMPOSED
    return longest


_COMPOSED = 4
"""Most characters that Unicode's NFC makes one of (a letter and three marks)."""


def _steps_of(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer of the library `tokenizers`, as saved.

    None has no steps; a part that is no sequence is one step.
    """
    if part is None:
        return []
    saved = json.loads(part.__getstate__())
    steps = saved.get("normalizers") or saved.get("pretokenizers") or [saved]
    return list(steps)


def _keeps_characters(step: dict[str, Any]) -> bool:
    """Return whether a step drops no characters, so that all of them end up in tokens.

    A replacement must be at least as long as the text that it replaces. Unknown kinds count as
    dropping.
    """
    kind = step["type"]
    if kind == "Replace":
        return "String" in step["pattern"] and len(step["content"]) >= len(
            step["pattern"]["String"]
        )
    if kind == "Split":
        return step["behavior"] != "Removed"
    return kind in ("NFC", "Prepend", "ByteLevel", "Digits", "Metaspace")


def reencode(tokenizer: Any, other: Any, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Decode rows of ids with `tokenizer` and encode the texts with `other`; return its ids.

    `other` adds its special tokens. A row that would have no ids becomes its end-of-sequence token.
    """
    if not rows:
        return []
    rows_of_ids = other(_decode(tokenizer, rows), verbose=False).input_ids
    return [ids or [eos_token_id(other)] for ids in rows_of_ids]


def template_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered chats, in which the template already wrote the special tokens."""
    if not texts:
        return []
    if len(texts) > 1 or not _encodes_plainly(tokenizer):
        return tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    # requests of episodes: 19 to 20 instead of 41 to 51 microseconds on one Xeon core
    return [tokenizer.backend_tokenizer.encode(texts[0], add_special_tokens=False).ids]


def _encodes_plainly(tokenizer: Any) -> bool:
    """Return whether the tokenizer's backend alone gives the ids of a call with one text.

    Not if an earlier call has left it cutting or padding texts, or taking special tokens for text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.split_special_tokens or backend.encode_special_tokens:
        return False
    return backend.truncation is None and backend.padding is None


def _num_trailing(tokenizer: Any) -> int:
    """Return how many tokens (such as an end-of-sequence) the tokenizer adds after a text.

    Measured on the text "a", whose ids are looked for in those with special tokens; 0 if not found.
    """
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - len(bare) - start
    return 0


_CONTEXT = 16
"""Last tokens of a prompt that are decoded; earlier ones do not change a response's text."""
_CUT = "\ufffd"
"""A character that is not complete."""


def response_texts(
    tokenizer: Any, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[str]:
    """Return the text of each response as it follows its prompt, decoded in one batch.

    Only the last 16 tokens of a prompt are decoded with it; the whole prompt where these do not
    suffice. If the prompt's text is no prefix of the whole text even then, the response is decoded
    alone.
    """
    texts = _texts_after(tokenizer, [prompt[-_CONTEXT:] for prompt in prompts], responses)
    unknown = []
    for index, text in enumerate(texts):
        if text is None:
            unknown.append(index)
    if not unknown:
        return [text or "" for text in texts]
    behind = [prompts[index] for index in unknown]
    after = [responses[index] for index in unknown]
    alone = _decode(tokenizer, after)
    for index, text, own in zip(
        unknown, _texts_after(tokenizer, behind, after), alone, strict=True
    ):
        texts[index] = own if text is None else text
    return [text or "" for text in texts]


def text_with_special(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of a row of ids, in which special tokens have their texts."""
    return _decode(tokenizer, [ids], keeps_special=True)[0]


def token_lengths(
    tokenizer: Any, rows: Sequence[Sequence[int]], texts: Sequence[str]
) -> list[list[int]]:
    """Return for each token of each row how many characters of the row's text it shows.

    Each row's numbers sum to the length of its text. A special token shows 0 characters, and so
    does a part of a character that a later token completes.
    rows: token ids. texts: their decoded texts.
    """
    ids = list(dict.fromkeys(each for row in rows for each in row))
    decoded = tokenizer.batch_decode([[each] for each in ids], clean_up_tokenization_spaces=False)
    pieces = dict(zip(ids, decoded, strict=True))
    result = []
    for row, text in zip(rows, texts):
        result.append(_shown_lengths(map(pieces.__getitem__, row), text))
    return result


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the ones before it; special tokens are spelled out.

    A token that does not complete its last character ends with U+FFFD. A token without any text is
    its entry in the vocabulary.
    """
    before = []
    whole = []
    for end in range(len(ids)):
        start = max(0, end - _CONTEXT)
        before.append(ids[start:end])
        whole.append(ids[start : end + 1])
    heads = _decode(tokenizer, before, keeps_special=True)
    texts = _decode(tokenizer, whole, keeps_special=True)
    alone = _decode(tokenizer, [[each] for each in ids], keeps_special=True)
    result = []
    for token, head, text, own in zip(ids, heads, texts, alone, strict=True):
        added = own if not head else _remove_prefix(head, text)
        if added is None:
            added = own
        if not added and text.endswith(_CUT):
            added = _CUT
        result.append(added or str(tokenizer.convert_ids_to_tokens(token)))
    return result


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that the tokenizer calls special."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(number for number, token in added if token.special)


def _shown_lengths(pieces: Iterable[str], text: str) -> list[int]:
    """Return for each piece (a token decoded alone) how many characters of `text` it shows.

    A piece is looked for near the end of what earlier ones show. It counts from there to its own
    end; 0 if it is empty or not found. The last piece also gets the rest of the text.
    """
    lengths = []
    at = 0
    hidden = 0
    for piece in pieces:
        # decoded alone, a piece may lack its leading space, and pieces that show nothing leave
        # characters before it
        start = text.find(piece, at, at + len(piece) + 2 + hidden) if piece else -1
        lengths.append(0 if start < 0 else start + len(piece) - at)
        at = at + lengths[-1]
        hidden = hidden + 1 if start < 0 else 0
    if lengths:
        lengths[-1] += len(text) - at
    return lengths


def decode_responses(batch: TensorDict, tokenizer: Any) -> list[str]:
    """The text of each response of a batch with the columns prompts and responses."""
    ids = ([row.tolist() for row in rows_of(batch[name])] for name in ("prompts", "responses"))
    return response_texts(tokenizer, *ids)


class StopStrings:
    """Finds where a response ends because its text contains a stop string."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        """strings: the stop strings, at least one. Any: a transformers tokenizer."""
        self._tokenizer = tokenizer
        self._strings = strings
        self._special = frozenset(tokenizer.all_special_ids)
        self._window = max(len(text.encode()) for text in strings) + 1
        """Most tokens that a string can span: each holds at least one byte of it."""

    def first_ends(self, rows: Sequence[tuple[list[int], list[int], int]]) -> list[int | None]:
        """Return for each row the response's length up to the token that completed a stop string.

        None where no string is complete. All texts are first decoded in one batch, and only those
        with a string in them are searched token by token.
        rows: (prompt, response, number of response tokens that were checked before).
        """
        windows = []
        for prompt, response, known in rows:
            shown = []
            for x in (*prompt[-_CONTEXT:], *response):
                if x not in self._special:
                    shown.append(x)
            windows.append(shown[-(len(response) - known + self._window + 2 * _CONTEXT) :])
        texts = self._tokenizer.batch_decode(windows, clean_up_tokenization_spaces=False)
        result = []
        for (prompt, response, known), text in zip(rows, texts, strict=True):
            result.append(
                next(
                    (
                        n
                        for n in range(known + 1, len(response) + 1)
                        if self.ends(prompt, response[:n])
                    ),
                    None,
                )
                if any(string in text for string in self._strings)
                else None
            )
        return result

    def ends(self, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Return whether the last token of a response completed a stop string.

        The end of the response is decoded, as many tokens as a string can span, and searched. So
        the tokens before the last must not have completed one: call this after each token. A
        special token has no text and completes none. The response must not be empty.
        """
        if response[-1] in self._special:
            return False
        start = len(response)
        shown = 0
        while start and shown < self._window:
            start -= 1
            shown += response[start] not in self._special
        context = [*prompt[-_CONTEXT:], *response[max(0, start - _CONTEXT) : start]]
        (text,) = response_texts(self._tokenizer, [context], [response[start:]])
        return any(string in text for string in self._strings)


def _texts_after(
    tokenizer: Any, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> list[str | None]:
    """Return for each row the text that the tokens `after` add to the tokens `before`.

    It is the decoded whole without the decoded `before`; None if the whole does not start with
    that. Equal rows of `before`, which several samples share, are decoded once.
    """
    heads = list(dict.fromkeys(map(tuple, before)))
    both = []
    for head, ids in zip(before, after, strict=True):
        both.append([*head, *ids])
    shown = dict(zip(heads, _decode(tokenizer, heads), strict=True))
    pairs = zip(map(shown.__getitem__, map(tuple, before)), _decode(tokenizer, both), strict=True)
    return [_remove_prefix(head, full_text) for head, full_text in pairs]


def _remove_prefix(head: str, text: str) -> str | None:
    """Return `text` without `head` in front; None if it does not start with it, or head is empty.

    Incomplete characters (U+FFFD) at the end of head may be missing in text.
    """
    for shown in (head, head.rstrip(_CUT)):
        if shown and text.startswith(shown):
            return text[len(shown) :]
    return None


def _decode(
    tokenizer: Any, ids: Sequence[Sequence[int]], *, keeps_special: bool = False
) -> list[str]:
    """Return the texts of rows of ids in one batch, without special tokens if not `keeps_special`.

    Any: a transformers tokenizer.
    """
    rows = list(map(list, ids))
    skips = not keeps_special
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        texts: list[str] = backend.decode_batch(rows, skip_special_tokens=skips)
        return texts
    return list(
        tokenizer.batch_decode(rows, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
    )
