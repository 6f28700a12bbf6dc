"""`ShownRow`: a row's tokens, cut into parts that are trained on or only read.

The parts come from the columns that a run trains on: token ids and their mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from spmdflow.datasets.tokenizer import special_ids, token_texts


@dataclass(frozen=True)
class Token:
    """One token as it is shown."""

    text: str
    is_special: bool = False


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sequence that are all trained on, or all only read."""

    label: str
    is_trained: bool
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class ShownRow:
    """A row of a data file or of a run."""

    title: str
    """Where the row comes from."""
    num_tokens: int
    """Tokens of all its sequences, as the limit of a data section counts them."""
    parts: tuple[Part, ...]
    notes: tuple[tuple[str, str], ...] = ()
    """(label, text), shown below the tokens."""
    text_before: tuple[tuple[str, str], ...] = ()
    """(label, text) of what stands before the tokens, where only its text is known."""


def tokens_of(tokenizer: Any, ids: Sequence[int]) -> list[Token]:
    """Return the tokens of a sequence with their texts. Any: a transformers tokenizer."""
    special = special_ids(tokenizer)
    tokens = []
    for number, text in zip(ids, token_texts(tokenizer, ids), strict=True):
        tokens.append(Token(text, number in special))
    return tokens


def cut_parts(
    tokens: Sequence[Token], mask: Sequence[bool], *, read: str, trained: str
) -> list[Part]:
    """Cut a sequence where its mask changes; return the parts in order.

    mask: True for each token that is trained on. read, trained: labels of the parts.
    """
    parts = []
    pairs = zip(tokens, mask, strict=True)
    for is_trained, group in groupby(pairs, key=lambda pair: bool(pair[1])):
        label = trained if is_trained else read
        parts.append(Part(label, is_trained, tuple(token for token, _ in group)))
    return parts


def pair_parts(
    tokens: Sequence[Token], mask: Sequence[bool], *, chosen_tokens: int, is_trained: bool
) -> list[Part]:
    """Return the parts of a pair: its prompt once, then the better and the worse answer.

    tokens, mask: both sequences, the better one first, each with the prompt. chosen_tokens: tokens
    of the first one. is_trained: whether the loss predicts the answers' tokens.
    """
    prompt = tuple(tokens[: list(mask).index(True)])
    better = tuple(tokens[len(prompt) : chosen_tokens])
    worse = tuple(tokens[chosen_tokens + len(prompt) :])
    return [
        Part("prompt", False, prompt),
        Part("chosen", is_trained, better),
        Part("rejected", is_trained, worse),
    ]
