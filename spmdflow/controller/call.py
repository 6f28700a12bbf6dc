"""A call on rows, planned once: what it reads, which rows each rank gets, and the commands.

Script thread only; sends nothing (caller.py does). Everything that makes a call impossible is
found here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from spmdflow.controller.assignment import (
    Assignment,
    CutSettings,
    MicroLimit,
    assign,
    assign_mini_batches,
    by_share,
)
from spmdflow.controller.batch import Batch
from spmdflow.controller.check import check_arguments, check_extends, columns_read
from spmdflow.controller.result import RowResult, SourceRows, ascending, input_of
from spmdflow.data.row_id import Ids, places_in_groups
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import protocol
from spmdflow.transfer.register import MethodSpec, map_spec, method_spec


@dataclass(frozen=True)
class Target:
    """What the caller knows of a worker group."""

    name: str
    worker_class: type
    layout: Layout
    limit: MicroLimit
    cut: CutSettings | None
    settings: Any = None
    """The settings that the model was spawned with."""


@dataclass(frozen=True)
class Input:
    """Columns of a batch that one result holds under the same row ids."""

    result: RowResult | SourceRows
    columns: dict[str, str]
    """Stored names by their names in the batch."""
    ids: Ids
    """(B,): the result's id of each row of the batch."""


@dataclass(frozen=True)
class CallPlan:
    """One call of a method or a map function on the rows of a batch."""

    label: str
    spec: MethodSpec
    head: Mapping[str, Any]
    """What every rank is told alike."""
    ids: Ids
    inputs: tuple[Input, ...]
    assignment: Assignment
    per_row: Mapping[str, np.ndarray]
    """Further numbers of each row (B,), by name."""
    groups: np.ndarray | None = None
    """(B,): the group of each row, for map functions that ask for it."""

    def with_numbers(self, **per_row: np.ndarray) -> CallPlan:
        """With further numbers of each row."""
        return replace(self, per_row={**self.per_row, **per_row})

    def held(self) -> dict[int, Ids]:
        """The rows that each rank holds afterwards."""
        return by_share(self.assignment.holds, lambda positions: self.ids[positions])

    def needs(self, given: Input) -> dict[int, Ids]:
        """The rows of an input that each rank must have, ascending."""
        return by_share(self.assignment.given, lambda positions: ascending(given.ids[positions]))

    def commands(self, held: Mapping[int, Ids]) -> dict[int, dict[str, Any]]:
        """The command of each rank."""
        minis = self.assignment.mini_batches or {}
        return {
            rank: {
                **self.head,
                **given,
                "holds": held.get(rank) if self.spec.writes else None,
                "mini": minis.get(rank, ()),
            }
            for rank, given in by_share(self.assignment.given, self._rows_at).items()
        }

    def result(
        self, number: int, held: dict[int, Ids], on_free: Callable[[int], None]
    ) -> RowResult:
        """The result that the call makes."""
        answer = {rank: held[rank] for rank in self.assignment.answering}
        names = self.spec.writes
        by_column = dict.fromkeys(names, held)
        ranks = tuple(sorted(self.assignment.given))
        return RowResult(number, self.label, ranks, tuple(names), answer, by_column, on_free)

    def _rows_at(self, positions: np.ndarray) -> dict[str, Any]:
        """What a rank is told of its rows."""
        told = {
            "ids": self.ids[positions],
            "inputs": [
                input_of(given.result, given.columns, given.ids[positions]) for given in self.inputs
            ],
            "micro": self.assignment.num_micro_batches,
            **{name: numbers[positions] for name, numbers in self.per_row.items()},
        }
        if self.groups is not None:
            places, largest = places_in_groups(self.groups)
            told["groups"], told["places"] = self.groups[positions], places[positions]
            told["num_groups"] = int(self.groups.max(initial=-1)) + 1
            told["largest_group"] = largest
        return told


def plan_method(
    target: Target, method: str, batch: Batch, head: Mapping[str, Any], *, seed: int
) -> CallPlan:
    """A call of a worker method; head has its arguments, which are checked, and the step.

    Waits for lengths if the call is cut by tokens. ColumnError, ProtocolError, MessageError.
    """
    label = f"{target.name}.{method}"
    spec = method_spec(target.worker_class, method)
    names = columns_read(spec, batch, label)
    check_extends(spec, batch, label)
    inputs = _inputs_of(batch, names)
    assignment = _assign_rows(target, spec, batch, inputs, seed=seed, step=head["step"])
    return CallPlan(label, spec, head, batch.ids, inputs, assignment, {})


def plan_map(
    batch: Batch, function: Callable[..., Any], arguments: Mapping[str, Any], *, step: int
) -> CallPlan:
    """A map function on the ranks that hold most of the columns that it reads."""
    marks = map_spec(function)
    label = f"map.{function.__name__}"
    given_later = dict.fromkeys(("reduce", "report", *(["groups"] if marks.groups else [])))
    check_arguments(label, partial(function, **given_later), [batch], arguments)
    reads = marks.reads_with(arguments)
    optional = tuple(name for name in marks.optional if name not in reads)
    spec = MethodSpec("rows", reads, optional, marks.writes, False, False)
    inputs = _inputs_of(batch, columns_read(spec, batch, label))
    given = _positions_held(_home(batch, inputs, label))
    head = {
        "operation": "map",
        "function": f"{function.__module__}:{function.__qualname__}",
        "step": step,
        "arguments": dict(arguments),
        "ranks": list(given),
    }
    assignment = Assignment(given, given, tuple(given))
    groups = batch.group_numbers() if marks.groups else None
    return CallPlan(label, spec, head, batch.ids, inputs, assignment, {}, groups)


def _inputs_of(batch: Batch, names: Sequence[str]) -> tuple[Input, ...]:
    """Columns by the result and the row ids that they share."""
    inputs: dict[tuple[int, bytes], Input] = {}
    for name in names:
        ref = batch.column(name)
        key = (ref.result.number, ref.ids.tobytes())
        inputs.setdefault(key, Input(ref.result, {}, ref.ids)).columns[name] = ref.stored
    return tuple(inputs.values())


def _assign_rows(
    target: Target,
    spec: MethodSpec,
    batch: Batch,
    inputs: Sequence[Input],
    *,
    seed: int,
    step: int,
) -> Assignment:
    """Rows by rank; waits for lengths if the call is cut by tokens."""
    rules = protocol(spec.transfer_mode)
    lengths = _token_lengths(batch, target, spec)
    if not spec.minibatches:
        return assign(rules, target.layout, len(batch), limit=target.limit, lengths=lengths)
    if target.cut is None:
        raise ProtocolError(
            f"{target.name}: its method takes mini-batches, but its config has no `update`; "
            f"add an UpdateConfig"
        )
    widest = _widest(inputs, target.layout.ranks)
    return assign_mini_batches(
        rules,
        target.layout,
        batch.parents,
        {} if widest is None else _positions_held(widest),
        cut=target.cut,
        limit=target.limit,
        lengths=lengths,
        seed=seed,
        step=step,
    )


def _token_lengths(batch: Batch, target: Target, spec: MethodSpec) -> np.ndarray | None:
    """Prompt + response tokens, if this call is cut by tokens (waits for the lengths)."""
    balanced = spec.minibatches and target.cut is not None and target.cut.balance_tokens
    if target.limit.max_tokens is None and not balanced:
        return None
    known = [name for name in ("prompts", "responses") if name in batch.columns]
    if "responses" not in known:
        if balanced:
            raise ColumnError(
                f"{target.name}: the batch has {sorted(batch.columns)}, expected responses "
                f"too, as update.balance_tokens is set; turn that off or generate first"
            )
        return None
    return np.sum([batch.lengths(name) for name in known], axis=0)


def _widest(inputs: Sequence[Input], ranks: Sequence[int]) -> Input | None:
    """The input with most columns whose result was made on exactly these ranks."""
    made = [
        each
        for each in inputs
        if isinstance(each.result, RowResult) and set(each.result.ranks) == set(ranks)
    ]
    order = [(len(each.columns), -each.result.number) for each in made]
    return made[order.index(max(order))] if made else None


def _home(batch: Batch, inputs: Sequence[Input], label: str) -> Input:
    """The widest input of the pool that made most of the columns.

    If they are all of a data file: of the pool that made most of the batch's other columns.
    """
    if not any(isinstance(each.result, RowResult) for each in inputs):
        inputs = _inputs_of(batch, batch.columns)
    counts: dict[tuple[int, ...], int] = {}
    for each in inputs:
        if isinstance(each.result, RowResult):
            ranks = each.result.ranks
            counts[ranks] = counts.get(ranks, 0) + len(each.columns)
    if not counts:
        raise ProtocolError(
            f"{label}: got a batch of {list(batch.columns)}, none of which a call has made, "
            f"expected at least one column made by a worker; call a worker method on the batch "
            f"first"
        )
    pool = max(counts, key=lambda ranks: (counts[ranks], [-rank for rank in ranks]))
    widest = _widest(inputs, pool)
    assert widest is not None
    return widest


def _positions_held(given: Input) -> dict[int, np.ndarray]:
    """Positions in the batch by rank: each row at the rank that answers for it in the result."""
    assert isinstance(given.result, RowResult)
    holder = {int(i): rank for rank, own in given.result.answer.items() for i in own}
    owner = np.array([holder[int(i)] for i in given.ids], dtype=np.int64)
    return {rank: np.flatnonzero(owner == rank) for rank in given.result.ranks}
