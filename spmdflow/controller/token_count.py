"""Tokens of a step: trained, failed, generated but not trained, stale; and what calls computed.

`count_tokens` is a pure function of the rows that the calls of a step were given (`RowUse`). Rows
are told apart by their ids and by the results that they were made from. Lengths only, no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdflow.controller.row_use import ColumnUse, RowUse, UseKind
from spmdflow.data.row_id import Ids

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class CountedRows:
    """Rows of one call with their lengths."""

    number: int
    """Of the call."""
    label: str
    kind: UseKind
    lineage: frozenset[int]
    """Numbers of the results that the responses were made from, their own included."""
    ids: Ids
    prompts: np.ndarray | None
    """(B,) tokens; None: not known."""
    responses: np.ndarray | None
    """(B,) tokens; None: the rows have no responses."""
    valid: np.ndarray | None = None
    """(B,) bool: False for rows that an update skips; None: it skips none."""

    @classmethod
    def of(cls, use: RowUse, valid: np.ndarray | None) -> CountedRows:
        """Read the lengths of a use; waits for the calls that made them."""
        lengths: list[np.ndarray | None] = []
        for column in (use.prompts, use.responses):
            if isinstance(column, ColumnUse):
                lengths.append(column.lengths())
            else:
                lengths.append(column)
        prompts, responses = lengths
        return cls(use.number, use.label, use.kind, use.lineage, use.ids, prompts, responses, valid)

    def select(self, chosen: np.ndarray) -> CountedRows:
        """The rows where `chosen` (B,) is True."""
        parts: dict[str, np.ndarray | None] = {}
        for name in ("prompts", "responses", "valid"):
            values = getattr(self, name)
            parts[name] = None if values is None else values[chosen]
        return CountedRows(
            self.number, self.label, self.kind, self.lineage, self.ids[chosen], **parts
        )

    def totals(self) -> dict[str, int | None]:
        """Return the number of rows and their prompt and response tokens; None: not known."""
        totals: dict[str, int | None] = {"rows": len(self.ids), "prompt_tokens": None}
        if self.prompts is not None:
            totals["prompt_tokens"] = int(self.prompts.sum())
        totals["response_tokens"] = 0
        if self.responses is not None:
            totals["response_tokens"] = int(self.responses.sum())
        return totals

    def lengths(self) -> np.ndarray | None:
        """(B,) tokens of each row, prompt and response together; None: not known."""
        if self.prompts is None:
            return None
        if self.responses is None:
            return self.prompts
        return self.prompts + self.responses


def count_tokens(
    uses: Sequence[CountedRows],
    ages: Sequence[tuple[Ids, int]],
    *,
    windows: Mapping[str, int | None],
    epochs: Callable[[str], int],
) -> dict[str, Any]:
    """Return the counts of one step, as data for JSON.

    trained: rows that an update got and did not leave out as failed; each counts once, in however
    many updates and epochs it was. failed: the rows that updates skipped. dropped: rows that were
    generated in this step and that no update of it got. stale: trained rows whose generation began
    with older weights than the step's; null without a queue. prompt_lengths and response_lengths:
    [tokens, rows] of the trained rows, ascending. passes: what models computed (`_pass_of`).

    uses: in the order of the calls. ages: rows, and how many versions ago they were begun. windows:
    models with weights, and the tokens that a token of theirs attends to (None: all before it).
    epochs: passes over the rows of an update of a model.
    """
    updates = [use for use in uses if use.kind is UseKind.TRAIN]
    generations = [use for use in uses if use.kind is UseKind.GENERATE]
    given = _distinct_rows(updates)
    trained = given
    failed = given.select(np.zeros(len(given.ids), dtype=bool))
    if given.valid is not None:
        trained = given.select(given.valid)
        failed = given.select(~given.valid)
    final = _final_rows(generations)
    dropped = []
    for rows in final:
        dropped.append(rows.select(~_is_trained(rows, updates)))
    stale = None
    if ages:
        old = [ids for ids, age in ages if age > 0]
        stale = trained.select(np.isin(trained.ids, np.concatenate([_NO_ROWS, *old]))).totals()
    passes = []
    for rows in (*final, *(use for use in uses if use.kind is not UseKind.GENERATE)):
        model = rows.label.partition(".")[0]
        if model in windows and len(rows.ids):
            passes.append(_pass_of(rows, windows[model], epochs=epochs(model)))
    return {
        "trained": trained.totals(),
        "failed": failed.totals(),
        "dropped": _add_totals(rows.totals() for rows in dropped),
        "stale": stale,
        "prompt_lengths": _histogram(trained.prompts),
        "response_lengths": _histogram(trained.responses),
        "passes": passes,
    }


def _distinct_rows(updates: Sequence[CountedRows]) -> CountedRows:
    """Return the rows of all updates, each once, with the lengths that the first one saw.

    A row is valid if no update left it out. Prompts are None if one update does not know their
    lengths, responses if no update has any.
    """
    if not updates:
        return CountedRows(0, "", UseKind.TRAIN, frozenset(), _NO_ROWS, _NO_ROWS, _NO_ROWS)
    every = np.concatenate([use.ids for use in updates])
    ids, first = np.unique(every, return_index=True)
    prompts = []
    responses = []
    for use in updates:
        if use.prompts is not None:
            prompts.append(use.prompts)
        none = np.zeros(len(use.ids), dtype=np.int64)
        responses.append(none if use.responses is None else use.responses)
    columns: dict[str, np.ndarray | None] = {"prompts": None, "responses": None}
    if len(prompts) == len(updates):
        columns["prompts"] = np.concatenate(prompts)[first]
    if any(use.responses is not None for use in updates):
        columns["responses"] = np.concatenate(responses)[first]
    failed = [_NO_ROWS]
    for use in updates:
        if use.valid is not None:
            failed.append(use.ids[~use.valid])
    valid = ~np.isin(ids, np.concatenate(failed))
    return CountedRows(0, "", UseKind.TRAIN, frozenset(), ids, **columns, valid=valid)


def _final_rows(generations: Sequence[CountedRows]) -> list[CountedRows]:
    """Return the rows of each generation that no later one of the step continued."""
    result = []
    for position, rows in enumerate(generations):
        continued = [_NO_ROWS]
        for later in generations[position + 1 :]:
            if rows.number in later.lineage:
                continued.append(later.ids)
        result.append(rows.select(~np.isin(rows.ids, np.concatenate(continued))))
    return result


def _is_trained(rows: CountedRows, updates: Sequence[CountedRows]) -> np.ndarray:
    """Return (B,) bool: whether an update got the responses that this generation made."""
    learnt = [_NO_ROWS]
    for update in updates:
        if rows.number in update.lineage:
            learnt.append(update.ids)
    return np.isin(rows.ids, np.concatenate(learnt))


def _pass_of(rows: CountedRows, window: int | None, *, epochs: int) -> dict[str, Any]:
    """Return what a model computed in a call: tokens, tokens with an output, attended pairs.

    A generation's or response's output layer is needed for its response tokens, in rows without
    responses for all tokens. A row of n tokens attends n^2 / 2 times to a token, with a window W at
    most W n - W^2 / 2 times. Null where lengths are not known.
    """
    lengths = rows.lengths()
    fact: dict[str, Any] = {"call": rows.label, "kind": rows.kind.value, "rows": len(rows.ids)}
    fact["epochs"] = epochs if rows.kind is UseKind.TRAIN else 1
    if lengths is None:
        return fact | {"tokens": None, "head_tokens": None, "attended": None}
    seen = lengths
    if window is not None:
        seen = np.minimum(lengths, window)
    fact["tokens"] = int(lengths.sum())
    fact["head_tokens"] = int((lengths if rows.responses is None else rows.responses).sum())
    fact["attended"] = float((seen * lengths - seen**2 / 2).sum())
    return fact


def _add_totals(parts: Iterable[Mapping[str, int | None]]) -> dict[str, int | None]:
    """Return the sums of `CountedRows.totals`; None where one part has None."""
    sums: dict[str, int | None] = {"rows": 0, "prompt_tokens": 0, "response_tokens": 0}
    for part in parts:
        for name, count in part.items():
            so_far = sums[name]
            if so_far is None or count is None:
                sums[name] = None
            else:
                sums[name] = so_far + count
    return sums


def _histogram(lengths: np.ndarray | None) -> list[list[int]] | None:
    """Return [length, number of rows] of each length, ascending; None: not known, or none."""
    if lengths is None:
        return None
    values, counts = np.unique(lengths, return_counts=True)
    return np.stack([values, counts], axis=1).tolist()
