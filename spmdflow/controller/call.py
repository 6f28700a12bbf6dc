"""A call, planned once: what it reads, which rows each rank gets, and the commands.

Script thread only; sends nothing (caller.py does). Everything that makes a call impossible is
found here, before anything is sent: these are the only errors that a script may catch, as a later
one ends the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmdflow.controller.assignment import (
    Assignment,
    Target,
    assign,
    assign_again,
    assign_mini_batches,
    by_share,
)
from spmdflow.controller.batch import Batch
from spmdflow.controller.extending import check_extended
from spmdflow.controller.result import RowResult, SourceRows, input_of
from spmdflow.data.row_id import Ids, places_in_groups
from spmdflow.errors import ColumnError, MessageError, ProtocolError
from spmdflow.message import encode
from spmdflow.transfer.protocol import protocol
from spmdflow.worker_api.register import MethodSpec, map_spec, method_spec

TOKENS = ("prompts", "responses", "pretrain_ids")
"""Columns of tokens: a row costs those of its columns that a call reads. Of a data file's columns
only the prompts have lengths that the controller knows."""


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
    """One call of a method or a map function."""

    label: str
    spec: MethodSpec
    answering: tuple[int, ...]
    commands: Mapping[int, dict[str, Any]]
    """By rank."""
    needs: Sequence[tuple[RowResult, list[str], dict[int, Ids]]] = ()
    """Results that are read, the columns, and the rows that each rank must have, ascending."""
    held: dict[int, Ids] = field(default_factory=dict)
    """The rows that each rank holds afterwards."""
    sources: frozenset[int] = frozenset()
    """As of the result."""

    def result(self, number: int, on_free: Callable[[int], None]) -> RowResult:
        """The result that the call makes."""
        answer = {}
        for rank in self.answering:
            answer[rank] = self.held[rank]
        by_column = dict.fromkeys(self.spec.writes, self.held)
        ranks = tuple(sorted(self.commands))
        return RowResult(
            number, self.label, ranks, answer, by_column, on_free, sources=self.sources
        )


def plan_method(
    target: Target,
    method: str,
    given: Batch | list[Any] | None,
    arguments: Mapping[str, Any],
    *,
    seed: int,
    step: int,
    draw: Callable[..., np.ndarray],
    instead: Mapping[str, str],
) -> CallPlan:
    """A call of a worker method on rows, on a list (the i-th item for the i-th rank), or nothing.

    draw(ids, greedy=...) -> (B,): responses drawn for each row before. instead: column -> its
    replacement; the method gets the replacement too, and may lack the column. Waits for lengths if
    rows are split by tokens. ColumnError, ProtocolError, MessageError, or what the method's check
    raises.
    """
    label = f"{target.name}.{method}"
    spec = method_spec(target.worker_class, method)
    if instead:
        needed = tuple(name for name in spec.reads if name not in instead)
        spec = replace(spec, reads=needed, optional=(*spec.optional, *instead, *instead.values()))
    before = [None] if given is None else [None, given]
    _check_arguments(label, getattr(target.worker_class, method), before, arguments)
    if spec.check is not None:
        spec.check(label, target.settings, arguments)
    head = {
        "operation": "call",
        "group": target.name,
        "method": method,
        "step": step,
        "arguments": dict(arguments),
    }
    if not isinstance(given, Batch):
        ranks = protocol(spec.transfer_mode).collect(target.layout).ranks
        told = {}
        for rank in target.layout.ranks:
            told[rank] = dict(head)
        if given is not None:
            told = {}
            for rank, i in _items(label, spec, target, given):
                told[rank] = head | {"item": i}
        return CallPlan(label, spec, ranks, told)
    inputs = _inputs_of(given, columns_read(spec, given, label))
    if spec.extends:
        check_extended(label, spec, given)
    assignment = _assign_rows(target, spec, given, inputs, seed=seed, step=step)
    if spec.early:
        head["early"] = spec.early
    numbers = {}
    if spec.draws:
        numbers["generation"] = draw(given.ids, greedy=bool(arguments.get("greedy")))
    return _plan_rows(label, spec, head, given.ids, inputs, assignment, numbers)


def _items(
    label: str, spec: MethodSpec, target: Target, items: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Ranks and their items; ProtocolError for a method that takes rows, or another length."""
    if spec.reads or spec.writes:
        expected = f"a Batch with the columns {list(spec.reads)}"
        do = "take rows from flow.prompts, or from the call that made them"
        raise ProtocolError.of(label, f"a list of {len(items)}", expected, do)
    given = protocol(spec.transfer_mode).distribute(target.layout, len(items))
    if any(len(positions) != 1 for positions in given.values()):
        got = f"a list of {len(items)} under {spec.transfer_mode}"
        do = "register it with transfer_mode='ALL_TO_ALL'"
        raise ProtocolError.of(label, got, "a mode that gives each rank one item", do)
    return ((rank, items[at[0]]) for rank, at in given.items())


def plan_map(
    batch: Batch,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    step: int,
    busy: AbstractSet[int] = frozenset(),
) -> CallPlan:
    """A map function on the ranks that hold most of the columns that it reads.

    busy: ranks where it would have to wait; taken only if no others have rows of the batch.
    """
    marks = map_spec(function)
    label = f"map.{function.__name__}"
    _check_arguments(label, function, [batch], arguments, marks.given)
    reads = marks.reads_with(arguments)
    optional = tuple(name for name in marks.optional if name not in reads)
    spec = MethodSpec("rows", reads, optional, marks.writes, False, False)
    inputs = _inputs_of(batch, columns_read(spec, batch, label))
    given = _positions_held(_home(batch, inputs, label, busy))
    head = {
        "operation": "map",
        "function": f"{function.__module__}:{function.__qualname__}",
        "step": step,
        "arguments": dict(arguments),
        "ranks": list(given),
    }
    assignment = Assignment(given, given, tuple(given))
    numbers = {}
    if marks.groups:
        numbers["groups"] = batch.group_numbers()
        numbers["places"], head["largest_group"] = places_in_groups(numbers["groups"])
        head["num_groups"] = int(numbers["groups"].max(initial=-1)) + 1
    return _plan_rows(label, spec, head, batch.ids, inputs, assignment, numbers)


def _plan_rows(
    label: str,
    spec: MethodSpec,
    head: Mapping[str, Any],
    ids: Ids,
    inputs: Sequence[Input],
    assignment: Assignment,
    numbers: Mapping[str, np.ndarray],
) -> CallPlan:
    """A call on rows; numbers: further arrays (B,) for its commands, by name."""
    given = assignment.given
    held = by_share(assignment.holds, lambda at: ids[at])
    minis = assignment.mini_batches or {}

    def rows_at(at: np.ndarray) -> dict[str, Any]:
        parts = []
        for each in inputs:
            parts.append(input_of(each.result, each.columns, each.ids[at]))
        told = {"ids": ids[at], "inputs": parts, "micro": assignment.num_micro_batches}
        return told | {name: values[at] for name, values in numbers.items()}

    commands = {
        rank: {
            **head,
            **told,
            "holds": held.get(rank) if spec.writes else None,
            "mini": minis.get(rank, ()),
        }
        for rank, told in by_share(given, rows_at).items()
    }
    needs = []
    for each in inputs:
        if isinstance(each.result, RowResult):
            needs.append(
                (
                    each.result,
                    list(dict.fromkeys(each.columns.values())),
                    by_share(given, partial(_ascending, each.ids)),
                )
            )
    sources = frozenset().union(*(result.lineage for result, _, _ in needs))
    return CallPlan(label, spec, assignment.answering, commands, needs, held, sources)


def _ascending(ids: Ids, at: np.ndarray) -> Ids:
    """The ids at positions, in order, each once."""
    chosen = ids[at]
    if (chosen[1:] > chosen[:-1]).all():
        return chosen
    return np.unique(chosen)


def _inputs_of(batch: Batch, names: Sequence[str]) -> tuple[Input, ...]:
    """Columns grouped by the result and the row ids that they share."""
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
    """Rows by rank; waits for lengths if rows are split by tokens."""
    rules = protocol(spec.transfer_mode)
    lengths = _token_lengths(batch, target, spec)
    if not spec.minibatches:
        rows = (rules, target.layout, len(batch), target.limit)
        if lengths is None:
            return assign_again(*rows)
        return assign(*rows, lengths)
    if getattr(target.settings, "update", None) is None:
        raise ProtocolError(
            f"{target.name}: its method takes mini-batches, but its config has no `update`; "
            f"add an UpdateConfig"
        )
    widest = _widest(inputs, target.layout.ranks)
    held = {} if widest is None else _positions_held(widest)
    return assign_mini_batches(
        rules, target, batch.parents, held, lengths=lengths, seed=seed, step=step
    )


def _token_lengths(batch: Batch, target: Target, spec: MethodSpec) -> np.ndarray | None:
    """(B,) tokens of each row that the call reads, if rows are split by them; waits for them."""
    update = getattr(target.settings, "update", None)
    balanced = spec.minibatches and update is not None and update.balance_tokens
    known = []
    for name in TOKENS:
        if name in (*spec.reads, *spec.optional):
            known.append(name)
    known = [name for name in known if name in batch.columns]
    if spec.draws or not known or (target.limit.max_tokens is None and not balanced):
        return None
    return np.sum([batch.lengths(name) for name in known], axis=0)


def _widest(inputs: Sequence[Input], ranks: Sequence[int]) -> Input | None:
    """The input with most columns whose result was made on exactly these ranks."""
    made = []
    for each in inputs:
        if isinstance(each.result, RowResult) and set(each.result.ranks) == set(ranks):
            made.append(each)
    return max(made, key=lambda each: (len(each.columns), -each.result.number), default=None)


def _home(
    batch: Batch, inputs: Sequence[Input], label: str, busy: AbstractSet[int] = frozenset()
) -> Input:
    """The widest input of the pool that made most of the columns.

    If they are all of a data file, of busy ranks, or of several pools that were concatenated: of
    the pool that made most of the batch's other columns. Ranks of several pools have no group.
    """
    levels = (inputs, _inputs_of(batch, batch.columns))
    of_one_pool = []
    for each in levels:
        of_one_pool.append([x for x in each if not getattr(x.result, "spans_pools", False)])
    for candidates in (*of_one_pool, *levels):
        free = []
        for x in candidates:
            if busy.isdisjoint(getattr(x.result, "ranks", ())):
                free.append(x)
        if any(isinstance(each.result, RowResult) for each in free):
            return _widest_of_most(free)
    for candidates in (*of_one_pool, *levels):  # all of them are of busy ranks
        if any(isinstance(each.result, RowResult) for each in candidates):
            return _widest_of_most(candidates)
    got = f"a batch of {list(batch.columns)}, none of which a call has made"
    do = "call a worker method on the batch first"
    raise ProtocolError.of(label, got, "at least one column made by a worker", do)


def _widest_of_most(inputs: Sequence[Input]) -> Input:
    """The widest input of the pool that made most of the columns."""
    counts: dict[tuple[int, ...], int] = {}
    for each in inputs:
        if isinstance(each.result, RowResult):
            ranks = each.result.ranks
            counts[ranks] = counts.get(ranks, 0) + len(each.columns)
    pool = max(counts, key=lambda ranks: (counts[ranks], [-rank for rank in ranks]))
    widest = _widest(inputs, pool)
    assert widest is not None
    return widest


def _positions_held(given: Input) -> dict[int, np.ndarray]:
    """Positions in the batch by rank: each row at the rank that answers for it in the result."""
    assert isinstance(given.result, RowResult)
    owner = given.result.owners(given.ids)
    result = {}
    for rank in given.result.ranks:
        result[rank] = np.flatnonzero(owner == rank)
    return result


# What makes a call impossible


def columns_read(spec: MethodSpec, batch: Batch, label: str) -> list[str]:
    """Columns that travel to the call; ColumnError if the batch lacks one."""
    missing = []
    for name in spec.reads:
        if name not in batch.columns:
            missing.append(name)
    if missing:
        raise ColumnError(
            f"{label}: the batch has {sorted(batch.columns)}, expected {missing} too; "
            f"{batch.how_to_get(missing[0])}"
        )
    return [*spec.reads, *(name for name in spec.optional if name in batch.columns)]


_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float)}
"""Annotation (a string where modules postpone their evaluation) -> accepted classes."""


def _check_arguments(
    label: str,
    function: Callable[..., Any],
    before: Sequence[Any],
    arguments: Mapping[str, Any],
    later: tuple[str, ...] = (),
) -> None:
    """ProtocolError for arguments that do not fit the function, MessageError for unsendable ones.

    before: the positional arguments in front of them. later: names that the ranks give.
    """
    signature = _signature(function, later)
    try:
        signature.bind(*before, **arguments)
    except TypeError as err:
        raise ProtocolError(
            f"{label}: {err}; got {sorted(arguments)}, expected "
            f"{label.rpartition('.')[2]}{signature}; pass the batch first and the rest by name"
        ) from err
    try:
        encode(dict(arguments))
    except MessageError as err:
        raise MessageError(f"{label}: {err}") from err
    for name, value in arguments.items():
        if name in signature.parameters:
            annotation = signature.parameters[name].annotation
        else:
            annotation = ""
        if isinstance(annotation, str):
            kind = annotation
        else:
            kind = getattr(annotation, "__name__", "")
        if kind in _PLAIN and not isinstance(value, _PLAIN[kind]):
            got = f"{name}={value!r} ({type(value).__name__})"
            raise ProtocolError.of(label, got, f"a {kind}", "correct the value")


def too_many(label: str, function: Callable[..., Any], given: Sequence[Any]) -> ProtocolError:
    """The error of a call with more than the batch by position."""
    names = list(_signature(function).parameters)[2:]
    named = []
    for name, value in zip(names, given[1:]):
        named.append(f"{name}={value!r}")
    got = f"{len(given)} arguments by position"
    do = f"write {label.rpartition('.')[2]}({', '.join(['batch', *named])})"
    return ProtocolError.of(label, got, "the batch alone", do)


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any], later: tuple[str, ...] = ()) -> inspect.Signature:
    return inspect.signature(partial(function, **dict.fromkeys(later)))
