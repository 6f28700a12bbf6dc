"""Samples of a step: a few scored rows with their groups, advantages and tokens.

`Sample` (tracking.progress) defines the content of a line in samples.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.controller.batch import Batch
from spmdflow.data.ragged import rows_of
from spmdflow.data.row_id import Ids, positions_in_groups
from spmdflow.datasets.tokenizer import load_tokenizer, token_lengths
from spmdflow.tracking.progress import Sample, shorten_text

_TEXTS = ("prompt_text", "response_text", "scores")
_ROWS = ("score_terms", "costs", "num_turns", "tool_calls")
_OWN = "rollout_log_probs"
_OLD = "old_log_probs"
_TOKENS = ("responses", "response_mask", _OWN, _OLD, "advantages")
_GROUP_ROWS = 4
"""Rows of one prompt that are chosen before any row of the next prompt."""
_MOST_WRITTEN = 16
_MOST_PRINTED = 4
_MOST_TOKENS = 16_384
"""Largest number of rows to write and to print; tokens after which no further row is written."""
_MOST_ROW_TOKENS = 8_192
_MOST_CHARACTERS = 32_768
"""A longer response loses the tokens in its middle, a longer prompt the characters there."""
_GAP = " ... "


def is_shown(batch: Batch) -> bool:
    """Whether the batch has the columns that a sample needs."""
    return set(_TEXTS) <= set(batch.columns)


def samples_of(batch: Batch, phase: str, tokenizer_path: str) -> list[Sample]:
    """Fetch up to 16 rows of a batch as samples, in the order of the batch; waits for the values.

    Rows are chosen by `choose_positions`, 4 of a prompt per round. Of the chosen rows only the
    first ones are returned that have at most 16,384 response tokens together, but at least 4.
    Responses of more than 8,192 tokens and prompts of more than 32,768 characters are cut in the
    middle, where " ... " counts as one token.
    phase: train or eval, for the samples' facts.
    """
    positions = choose_positions(batch.parents, per_group=_GROUP_ROWS, most=_MOST_WRITTEN)
    if "responses" in batch.columns:
        ends = np.cumsum(batch.lengths("responses")[positions])
        positions = positions[: max(_MOST_PRINTED, int((ends <= _MOST_TOKENS).sum()))]
    chosen = batch.select(positions)
    groups = batch.group_numbers()[positions].tolist()
    names = []
    for name in (*_TEXTS, *_ROWS, *_TOKENS):
        if name in batch.columns:
            names.append(name)
    if {_OWN, _OLD} <= {*names} and batch.column(_OWN).equals(batch.column(_OLD)):
        names.remove(_OLD)
    fetched = chosen.fetch_for("samples", *names)
    columns: dict[str, list[Any]] = {
        name: rows_of(value) if name in _TOKENS and isinstance(value, Tensor) else list(value)
        for name, value in fetched.items()
    }
    if "responses" in columns:
        ids = [row.tolist() for row in columns["responses"]]
        texts = columns["response_text"]
        columns["lengths"] = token_lengths(load_tokenizer(tokenizer_path), ids, texts)
    rows = (dict(zip(columns, values)) for values in zip(*columns.values(), strict=True))
    samples = []
    for group, row in zip(groups, rows, strict=True):
        facts = {"phase": phase, "group": group} | dict(_facts_of_row(row))
        shown = _without_middle(row)
        if shown is not row:
            facts["tokens"] = len(row["responses"])
        samples.append(
            Sample(
                shorten_text(str(row["prompt_text"]), _MOST_CHARACTERS),
                str(shown["response_text"]),
                float(row["scores"]),
                json.loads(row.get("score_terms", "{}")),
                facts | dict(_facts_of_tokens(shown)),
            )
        )
    return samples


def _without_middle(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose response has at most 8,192 tokens besides a gap, which is a token of 0s.

    row: the values of one row by column, with the lengths of its tokens' texts if it has tokens. A
    shorter row is returned as it is.
    """
    if len(row.get("responses", ())) <= _MOST_ROW_TOKENS:
        return row
    half = _MOST_ROW_TOKENS // 2
    text = row["response_text"]
    lengths = row["lengths"]
    end = len(text) - sum(lengths[-half:])
    shown = dict(row)
    shown["response_text"] = text[: sum(lengths[:half])] + _GAP + text[end:]
    shown["lengths"] = [*lengths[:half], len(_GAP), *lengths[-half:]]
    for name in _TOKENS:
        if name in row:
            values = row[name]
            shown[name] = torch.cat([values[:half], values.new_zeros(1), values[-half:]])
    return shown


def first_of_groups(samples: Sequence[Sample]) -> list[Sample]:
    """Return up to 4 samples to print, in order: the first of each prompt, then second ones."""
    groups = np.array([sample.facts["group"] for sample in samples])
    first = []
    for position in choose_positions(groups, per_group=1, most=_MOST_PRINTED):
        first.append(samples[position])
    return first


def choose_positions(parents: Ids, *, per_group: int, most: int) -> list[int]:
    """Return at most `most` ascending positions: per_group rows of each prompt, then further ones.

    In each round takes per_group rows of every prompt, prompts in the order of their first rows,
    until there are `most`. parents (B,): the prompt of each row.
    """
    groups = np.unique(parents, return_inverse=True)[1]
    turn, _ = positions_in_groups(groups)
    first = np.full(len(groups), len(groups))
    np.minimum.at(first, groups, np.arange(len(groups)))
    order = np.lexsort((first[groups], turn // per_group))
    return sorted(order[:most].tolist())


def _facts_of_row(row: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of what a sample has besides texts, score and tokens, as data for JSON.

    row: the values of one row by column; facts of missing columns are omitted. advantage: the mean
    over the tokens in response_mask, 0.0 if there are none. See `Sample` for the others.
    """
    if "advantages" in row:
        trained = row["advantages"]
        if "response_mask" in row:
            trained = trained[row["response_mask"].bool()]
        yield "advantage", float(f"{float(trained.mean()):.4g}") if len(trained) else 0.0
    if "costs" in row and isfinite(row["costs"]):
        yield "cost", float(row["costs"])
    if "num_turns" in row:
        yield "turns", int(row["num_turns"])
    if any(calls := json.loads(row.get("tool_calls", "[]"))):
        yield "calls", calls


def _facts_of_tokens(row: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield (name, values) of what a sample has for each token; those of missing columns are not.

    row: as for `_facts_of_row`. gap: old minus rollout log-probs, 0 at tokens outside of
    response_mask. mask: a digit for each token, omitted if all are 1.
    """
    mask = row["response_mask"].bool() if "response_mask" in row else None
    if "lengths" in row:
        yield "lengths", row["lengths"]
    own = row.get(_OWN, row.get(_OLD))
    if own is not None:
        yield "log_probs", _round_numbers(own, 2)
    if _OWN in row and _OLD in row:
        gap = row[_OLD] - row[_OWN]
        yield "gap", _round_numbers(gap if mask is None else gap.where(mask, 0.0), 3)
    if mask is not None and not mask.all():
        yield "mask", "".join(map(str, mask.int().tolist()))


def _round_numbers(numbers: Tensor, digits: int) -> list[float | None]:
    """Return rounded numbers for JSON: the int 0 for zero, None (null) if not finite."""
    result = []
    for x in numbers.tolist():
        result.append(round(x, digits) or 0 if isfinite(x) else None)
    return result
