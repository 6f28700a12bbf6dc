"""`RowUse`: the rows that a call was given, with what is needed to count their tokens afterwards.

The lengths of rows are known once the call that made them has replied. A `RowUse` keeps that call's
replies and row ids, but not its result, so it keeps no rows alive on the ranks. Integers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from spmdflow.controller.batch import Batch
from spmdflow.controller.result import Ref, RowResult, SourceRows, facts_of
from spmdflow.data.ragged import VALID
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError
from spmdflow.runtime.call import Call, Pending

PROMPTS = "prompts"
RESPONSES = "responses"


@dataclass(frozen=True)
class ColumnUse:
    """A column that a call has made: where the lengths of some of its rows are found."""

    label: str
    """Of the call that made it."""
    pending: Pending
    answer: Mapping[int, Ids]
    """Rows by answering rank."""
    lineage: frozenset[int]
    """Numbers of the result and of those that it was made from."""
    stored: str
    """Name of the column in the result."""
    ids: Ids
    """(B,): the result's ids of the rows."""

    @classmethod
    def of(cls, result: RowResult, stored: str, ids: Ids) -> ColumnUse:
        """Of these rows of a result whose call was sent."""
        assert result.pending is not None, result.label
        pending = result.pending
        return cls(result.label, pending, result.answer, result.lineage, stored, ids)

    def lengths(self) -> np.ndarray:
        """Return (B,) int64: items of each row; waits for the call."""
        facts = facts_of(self.pending.result(), self.answer, label=self.label)
        return facts[self.stored].lengths_of(self.ids)


class UseKind(Enum):
    """What a call does with rows."""

    GENERATE = "generate"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True)
class RowUse:
    """The rows of one call of a worker group."""

    number: int
    """Of the call."""
    label: str
    kind: UseKind
    ids: Ids
    """(B,): row ids."""
    prompts: np.ndarray | ColumnUse | None
    """Tokens of each prompt (B,), or where they are found; None: not known."""
    responses: np.ndarray | ColumnUse | None
    """The same of the responses, after the call; None: the rows have none."""
    marks: Mapping[str, Ref]
    """The columns of `VALID` that rows of an update have."""

    @property
    def model(self) -> str:
        """Name of the worker group."""
        return self.label.partition(".")[0]

    @property
    def lineage(self) -> frozenset[int]:
        """Numbers of the results that the responses were made from, their own included."""
        if isinstance(self.responses, ColumnUse):
            return self.responses.lineage
        return frozenset()


class RowUses:
    """The rows of the calls of the running step."""

    def __init__(self) -> None:
        self.calls: list[RowUse] = []
        """In the order of the script."""
        self.ages: list[tuple[Ids, int]] = []
        """Rows of a queue, and how many weight versions ago their generation began."""

    def add(self, call: Call, batch: Batch, result: RowResult | None) -> None:
        """Remember a call on a batch that was sent, unless its tokens do not count."""
        use = row_use_of(call, batch, result)
        if use is not None:
            self.calls.append(use)

    def clear(self) -> None:
        """Forget all of them: the step is over."""
        self.calls.clear()
        self.ages.clear()


def row_use_of(call: Call, batch: Batch, result: RowResult | None) -> RowUse | None:
    """Return what to remember of a call on a batch; None if its tokens do not count.

    Only calls of worker groups in the phase train count: updates, and methods that write columns.
    result: what the call makes; None if it writes no columns.
    """
    if call.operation != "call" or call.phase != "train":
        return None
    if RESPONSES in call.writes:
        kind = UseKind.GENERATE
    elif call.writes:
        kind = UseKind.FORWARD
    elif any(len(command.get("mini", ())) for command in call.commands.values()):
        kind = UseKind.TRAIN
    else:
        return None
    columns: dict[str, np.ndarray | ColumnUse | None] = {}
    for name in (PROMPTS, RESPONSES):
        if result is not None and name in call.writes:
            columns[name] = ColumnUse.of(result, name, batch.ids)
        elif name in batch.refs:
            columns[name] = _use_of(name, batch.refs[name])
    marks = {}
    for name in VALID:
        if kind is UseKind.TRAIN and name in batch.refs:
            marks[name] = batch.refs[name]
    return RowUse(
        call.number,
        call.label,
        kind,
        batch.ids,
        columns.get(PROMPTS),
        columns.get(RESPONSES),
        marks,
    )


def _use_of(name: str, ref: Ref) -> np.ndarray | ColumnUse | None:
    """Return the lengths of a column of a data file, or where they are found; None: not known."""
    if ref.is_postponed:
        return None
    known = ref.resolve()
    if isinstance(known.result, SourceRows):
        try:
            return known.result.lengths_of(name, known.ids)
        except ColumnError:  # the controller does not know the lengths of all columns
            return None
    if known.result.pending is None:
        return None
    return ColumnUse.of(known.result, known.stored, known.ids)
