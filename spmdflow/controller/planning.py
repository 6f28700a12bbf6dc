"""Plans a call: which columns it reads, which rows each rank gets, and the commands to the ranks.

Script thread only; sends nothing (caller.py does). Everything that makes a call impossible is
noticed here, before anything is sent: these are the only errors that a script may catch, as a later
one ends the run.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import numpy as np

from spmdflow.controller.assignment import (
    Assignment,
    Target,
    assign,
    assign_again,
    assign_mini_batches,
    generation_shares,
)
from spmdflow.controller.batch import Batch
from spmdflow.controller.extending import check_extended
from spmdflow.controller.result import RowResult, SourceRows
from spmdflow.data.row_id import Ids, positions_in_groups
from spmdflow.errors import ColumnError, MessageError, ProtocolError
from spmdflow.failure.user_code import is_own
from spmdflow.message import encode
from spmdflow.runtime.call import Call, RequiredRows
from spmdflow.runtime.executor import COMPUTE
from spmdflow.transfer.protocol import Protocol
from spmdflow.worker_api.register import MethodSpec, map_spec

TOKENS = ("prompts", "responses", "pretrain_ids")
"""Columns of tokens: a row costs those of its columns that a call reads. Of a data file's columns
only the prompts have lengths that the controller knows."""


def script_line() -> str:
    """Return the innermost running line of the user's code, as "file:line: text".

    Looks only at this thread. Empty if no function of the user is running.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    number = frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


@dataclass(frozen=True)
class CallContext:
    """What every call takes from the place in the run where it is made."""

    number: int
    """Of the call."""
    step: int
    phase: str
    """train or eval."""
    line: str
    """The script's line."""
    limit_seconds: float | None
    seed: int
    """Of the run; mini-batches derive from it."""
    total_steps: int
    """Steps that the script takes."""

    def call(
        self,
        label: str,
        commands: Mapping[int, Mapping[str, Any]],
        *,
        lane: str = COMPUTE,
        **facts: Any,
    ) -> Call:
        """A call with these commands; facts: further fields of `Call`."""
        return Call(
            self.number,
            lane,
            label,
            commands,
            self.limit_seconds,
            step=self.step,
            phase=self.phase,
            line=self.line,
            **facts,
        )


@dataclass(frozen=True)
class Method:
    """A registered method of a worker group, looked up."""

    name: str
    spec: MethodSpec
    rules: Protocol
    """Its transfer protocol."""


@dataclass(frozen=True)
class Input:
    """Columns of a batch that one result holds under the same row ids."""

    result: RowResult | SourceRows
    columns: dict[str, str]
    """Stored names by their names in the batch."""
    ids: Ids
    """(B,): the result's id of each row of the batch."""
    file_rows: np.ndarray | None
    """(B,): row numbers in the data file; None: rows that a call has made."""

    @classmethod
    def of(cls, result: RowResult | SourceRows, columns: Mapping[str, str], ids: Ids) -> Input:
        """Columns of a result. columns: stored names by the names that the call sees."""
        file_rows = result.file_rows(ids) if isinstance(result, SourceRows) else None
        return cls(result, dict(columns), ids, file_rows)

    def part(self, at: np.ndarray | slice = slice(None)) -> dict[str, Any]:
        """Return the rows at the positions `at`, by default all, as the data of a command.

        Entries: "result" (its number), "columns" (stored names) and "ids". Also "seen", pairs of
        (name in the batch, stored name), if these differ, and for a data file "source" and "rows"
        (row numbers).
        """
        stored = list(dict.fromkeys(self.columns.values()))
        part: dict[str, Any] = {
            "result": self.result.number,
            "columns": stored,
            "ids": self.ids[at],
        }
        if stored != list(self.columns):
            part["seen"] = list(self.columns.items())
        if self.file_rows is not None:
            part["source"] = self.result.label
            part["rows"] = self.file_rows[at]
        return part


def plan_method(
    target: Target,
    method: Method,
    data: Batch | Sequence[Any] | None,
    arguments: Mapping[str, Any],
    context: CallContext,
    *,
    draw: Callable[..., np.ndarray],
    instead: Mapping[str, str],
) -> Call:
    """Plan a call of a worker method on rows, on a list (an item for each rank), or on nothing.

    draw(ids, greedy=...) -> (B,): responses drawn for each row before; also counts this call.
    instead: column -> its replacement; the method gets the replacement too, and may lack the
    column. Waits for lengths if rows are split by tokens. ColumnError if the batch does not fit,
    ProtocolError or MessageError if the arguments or the list do not, or what the method's check
    raises.
    """
    label = f"{target.name}.{method.name}"
    spec = method.spec
    if instead:
        needed = tuple(name for name in spec.reads if name not in instead)
        spec = replace(spec, reads=needed, optional=(*spec.optional, *instead, *instead.values()))
    before = [None] if data is None else [None, data]
    _check_arguments(label, getattr(target.worker_class, method.name), before, arguments)
    if spec.check is not None:
        spec.check(label, target.settings, arguments)
    head = {
        "operation": "call",
        "group": target.name,
        "method": method.name,
        "step": context.step,
        "arguments": dict(arguments),
    }
    if not isinstance(data, Batch):
        return _plan_without_rows(label, target, method, data, head, context)
    inputs = _inputs_of(data, columns_read(spec, data, label))
    if spec.extends:
        check_extended(label, spec, data)
    assignment = _assign_rows(target, method.rules, spec, data, inputs, context)
    if spec.early:
        head["early"] = spec.early
    if spec.minibatches:
        head["total_steps"] = context.total_steps
    numbers = {}
    if spec.draws:
        numbers["generation"] = draw(data.ids, greedy=bool(arguments.get("greedy")))
    if spec.parents:
        numbers["parents"] = data.parents
    return _plan_rows(label, spec.writes, head, data, inputs, assignment, context, numbers)


def _plan_without_rows(
    label: str,
    target: Target,
    method: Method,
    items: Sequence[Any] | None,
    head: Mapping[str, Any],
    context: CallContext,
) -> Call:
    """Plan a call on a list, one item for each rank, or on nothing (items=None).

    head: the entries that all commands share. Raises the errors of `_items`.
    """
    commands = {}
    if items is None:
        for rank in target.layout.ranks:
            commands[rank] = dict(head)
    else:
        for rank, item in _items(label, method, target, items):
            commands[rank] = {**head, "item": item}
    if method.spec.minibatches:
        for command in commands.values():
            command["total_steps"] = context.total_steps
    return context.call(
        label,
        commands,
        reply_ranks=method.rules.collect(target.layout).ranks,
    )


def _items(
    label: str, method: Method, target: Target, items: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Return (rank, its item) of each rank that the method's protocol gives one item of the list.

    ProtocolError if the method reads or writes columns, or if a rank does not get exactly one item.
    RowError if the list is not as long as the protocol demands.
    """
    spec = method.spec
    if spec.reads or spec.writes:
        expected = f"a Batch with the columns {list(spec.reads)}"
        do = "take rows from flow.prompts, or from the call that made them"
        raise ProtocolError.of(label, f"a list of {len(items)}", expected, do)
    by_rank = method.rules.distribute(target.layout, len(items))
    if any(len(positions) != 1 for positions in by_rank.values()):
        got = f"a list of {len(items)} under {spec.transfer_mode}"
        do = "register it with transfer_mode='ALL_TO_ALL'"
        raise ProtocolError.of(label, got, "a mode that gives each rank one item", do)
    return ((rank, items[at[0]]) for rank, at in by_rank.items())


def plan_map(
    batch: Batch,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    context: CallContext,
    *,
    busy: AbstractSet[int] = frozenset(),
) -> Call:
    """Plan a map function on the ranks that have most of the columns that it reads.

    Each of these ranks gets the rows that it answers for. If the function works on groups, it also
    gets the group of each row and its position in the group.
    busy: ranks where it would have to wait; taken only if no others have rows of the batch.
    ProtocolError for an unmarked function, wrong arguments, or a batch without a column that a call
    has made; ColumnError if the batch lacks a column.
    """
    marks = map_spec(function)
    label = f"map.{function.__name__}"
    spec = columns_of_map(batch, function, arguments)
    inputs = _inputs_of(batch, columns_read(spec, batch, label))
    positions = _positions_held(_home(batch, inputs, label, busy))
    head = {
        "operation": "map",
        "function": f"{function.__module__}:{function.__qualname__}",
        "step": context.step,
        "arguments": dict(arguments),
        "ranks": list(positions),
    }
    assignment = Assignment(positions, positions, tuple(positions))
    numbers = {}
    if marks.groups:
        numbers["groups"] = batch.group_numbers()
        numbers["places"], head["largest_group"] = positions_in_groups(numbers["groups"])
        head["num_groups"] = int(numbers["groups"].max(initial=-1)) + 1
    return _plan_rows(label, marks.writes, head, batch, inputs, assignment, context, numbers)


def columns_of_map(
    batch: Batch, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> MethodSpec:
    """Return which columns a map function reads and writes with these arguments.

    ProtocolError for an unmarked function or wrong arguments.
    """
    marks = map_spec(function)
    label = f"map.{function.__name__}"
    _check_arguments(label, function, [batch], arguments, marks.rank_arguments)
    reads = marks.reads_with(arguments)
    optional = tuple(name for name in marks.optional if name not in reads)
    return MethodSpec("rows", reads, optional, marks.writes, False, False)


def _plan_rows(
    label: str,
    writes: Sequence[str],
    head: Mapping[str, Any],
    batch: Batch,
    inputs: Sequence[Input],
    assignment: Assignment,
    context: CallContext,
    numbers: Mapping[str, np.ndarray],
) -> Call:
    """Return a call on rows: the command of each rank, and the rows that it must have before.

    head: the entries that all commands share. numbers: further arrays (B,) for the commands, by
    name, cut like the rows. Ranks that get the same rows share the arrays of one command.
    """
    rows_after = _ids_by_rank(batch.ids, assignment.holds)
    mini_batches = assignment.mini_batches or {}
    parts: dict[int, dict[str, Any]] = {}
    commands = {}
    for rank, at in assignment.received.items():
        if id(at) not in parts:
            part = {
                "ids": batch.ids[at],
                "inputs": [each.part(at) for each in inputs],
                "micro": assignment.num_micro_batches,
            }
            for name, values in numbers.items():
                part[name] = values[at]
            parts[id(at)] = part
        commands[rank] = {
            **head,
            **parts[id(at)],
            "holds": rows_after.get(rank) if writes else None,
            "mini": mini_batches.get(rank, ()),
        }
    required = []
    lineage: frozenset[int] = frozenset()
    for each in inputs:
        if not isinstance(each.result, RowResult):
            continue  # every rank reads the data file itself
        lineage |= each.result.lineage
        ids_by_share: dict[int, Ids] = {}
        for at in assignment.received.values():
            if id(at) not in ids_by_share:
                ids_by_share[id(at)] = _ascending(each.ids, at)
        rows = {rank: ids_by_share[id(at)] for rank, at in assignment.received.items()}
        columns = tuple(dict.fromkeys(each.columns.values()))
        required.append(RequiredRows(each.result.number, columns, rows))
    return context.call(
        label,
        commands,
        reply_ranks=assignment.answering,
        required_rows=tuple(required),
        rows_after=rows_after,
        writes=tuple(writes),
        lineage=lineage,
        row_ids=batch.ids,
        parents=batch.parents,
    )


def _ids_by_rank(ids: Ids, positions: Mapping[int, np.ndarray]) -> dict[int, Ids]:
    """Return the ids at each rank's positions; ranks that share their positions share the ids."""
    by_share: dict[int, Ids] = {}
    result = {}
    for rank, at in positions.items():
        if id(at) not in by_share:
            by_share[id(at)] = ids[at]
        result[rank] = by_share[id(at)]
    return result


def _ascending(ids: Ids, at: np.ndarray) -> Ids:
    """Return the distinct ids at these positions, in ascending order."""
    chosen = ids[at]
    if (chosen[1:] > chosen[:-1]).all():
        return chosen
    return np.unique(chosen)


def _inputs_of(batch: Batch, names: Iterable[str]) -> tuple[Input, ...]:
    """Group columns of a batch by the result that made them and their row ids in it."""
    inputs: dict[tuple[int, bytes], Input] = {}
    for name in names:
        ref = batch.refs[name].resolve()
        key = (ref.result.number, ref.ids.tobytes())
        if key not in inputs:
            inputs[key] = Input.of(ref.result, {}, ref.ids)
        inputs[key].columns[name] = ref.stored
    return tuple(inputs.values())


def _assign_rows(
    target: Target,
    rules: Protocol,
    spec: MethodSpec,
    batch: Batch,
    inputs: Sequence[Input],
    context: CallContext,
) -> Assignment:
    """Assign the rows of a call to ranks; waits for lengths where rows are split by them.

    For an update also cuts mini-batches, and leaves rows on the ranks that have most of its columns
    if possible. ProtocolError for an update whose settings have no `update`.
    """
    if spec.draws or spec.finishes:
        return _assign_generated_rows(target, rules, spec, batch)
    lengths = _token_lengths(batch, target, spec)
    if not spec.minibatches:
        rows = (rules, target.layout, len(batch.ids), target.limit)
        if lengths is None:
            return assign_again(*rows)
        return assign(*rows, lengths)
    if getattr(target.settings, "update", None) is None:
        raise ProtocolError(
            f"{target.name}: its method takes mini-batches, but its config has no `update`; "
            f"add an UpdateConfig"
        )
    widest = _widest(inputs, target.layout.ranks)
    owned = {} if widest is None else _positions_held(widest)
    return assign_mini_batches(
        rules,
        target,
        batch.parents,
        owned,
        lengths=lengths,
        seed=context.seed,
        step=context.step,
        row_shares=batch.shares,
    )


def _assign_generated_rows(
    target: Target, rules: Protocol, spec: MethodSpec, batch: Batch
) -> Assignment:
    """Assign rows whose responses are generated; waits for the lengths of their prompts.

    A method that reads no prompts gets even chunks. The assignment depends on the prompts and on
    the settings alone, so that a later call for the same rows goes to the ranks that have them.
    """
    rows = (rules, target.layout, len(batch.ids), target.limit)
    rollout = getattr(target.settings, "rollout", None)
    num_shares = rules.num_shares(target.layout)
    if rollout is None or num_shares == 1 or "prompts" not in spec.reads:
        return assign_again(*rows)
    shares = generation_shares(
        batch.lengths("prompts"), batch.parents, num_shares, target.limit, rollout.max_new_tokens
    )
    if shares is None:
        return assign_again(*rows)
    return assign(*rows, shares=shares)


def _token_lengths(batch: Batch, target: Target, spec: MethodSpec) -> np.ndarray | None:
    """Return (B,): the tokens of each row, if rows are split by tokens, and None otherwise.

    Sums the lengths of those columns of TOKENS that the call reads and the batch has; waits for
    them. None if there is no such column, or if there is neither a limit on tokens nor an update
    that balances them.
    """
    update = getattr(target.settings, "update", None)
    balanced = spec.minibatches and update is not None and update.balance_tokens
    known = []
    for name in TOKENS:
        if name in (*spec.reads, *spec.optional):
            known.append(name)
    known = [name for name in known if name in batch.refs]
    if not known or (target.limit.max_tokens is None and not balanced):
        return None
    return np.sum([batch.lengths(name) for name in known], axis=0)


def _widest(inputs: Sequence[Input], ranks: Sequence[int]) -> Input | None:
    """Return the input with most columns among those that were made on exactly these ranks.

    On a tie the earliest result. None if there is none.
    """
    of_ranks = []
    for each in inputs:
        if isinstance(each.result, RowResult) and set(each.result.ranks) == set(ranks):
            of_ranks.append(each)
    return max(of_ranks, key=lambda each: (len(each.columns), -each.result.number), default=None)


def _home(
    batch: Batch, inputs: Sequence[Input], label: str, busy: AbstractSet[int] = frozenset()
) -> Input:
    """Return the input whose ranks run a map function: the widest of the pool with most columns.

    Candidates are, in this order, the inputs, then all columns of the batch, both without results
    that span several pools, as these have no common process group; then the same with such results.
    Data files never count, and neither do calls that were not made yet. Ranks that are busy are
    avoided unless all candidates are busy. ProtocolError if no column of the batch was made by a
    call.
    """
    there = [name for name, ref in batch.refs.items() if not ref.is_postponed]
    levels = (inputs, _inputs_of(batch, there))
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
    """Return the widest input of the pool that made most columns; on a tie the lowest ranks.

    A pool is the set of ranks of a result. At least one input must be made by a call.
    """
    counts: dict[tuple[int, ...], int] = {}
    for each in inputs:
        if isinstance(each.result, RowResult):
            ranks = each.result.ranks
            counts[ranks] = counts.get(ranks, 0) + len(each.columns)
    pool = max(counts, key=lambda ranks: (counts[ranks], [-rank for rank in ranks]))
    widest = _widest(inputs, pool)
    assert widest is not None
    return widest


def _positions_held(source: Input) -> dict[int, np.ndarray]:
    """Return, for each rank of the input's result, the positions in the batch that it answers for.

    Each row is at exactly one rank. A rank may have none.
    """
    assert isinstance(source.result, RowResult)
    owner = source.result.owners(source.ids)
    result = {}
    for rank in source.result.ranks:
        result[rank] = np.flatnonzero(owner == rank)
    return result


# What makes a call impossible


def columns_read(spec: MethodSpec, batch: Batch, label: str) -> list[str]:
    """Return the columns that travel to the call: `reads`, then those of `optional` that exist.

    A postponed column of `optional` does not exist. ColumnError if the batch lacks a column of
    `reads`.
    """
    missing = []
    for name in spec.reads:
        if name not in batch.refs:
            missing.append(name)
    if missing:
        raise ColumnError(
            f"{label}: the batch has {sorted(batch.refs)}, expected {missing} too; "
            f"{batch.how_to_get(missing[0])}"
        )
    result = list(spec.reads)
    for name in spec.optional:
        if name in batch.refs and not batch.refs[name].is_postponed:
            result.append(name)
    return result


_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float)}
"""Annotation (a string where modules postpone their evaluation) -> accepted classes."""


def _check_arguments(
    label: str,
    function: Callable[..., Any],
    before: Sequence[Any],
    arguments: Mapping[str, Any],
    later: tuple[str, ...] = (),
) -> None:
    """Raise an error unless the arguments of a call fit the function and can be sent.

    ProtocolError if they do not bind to its signature, or if a value for a parameter annotated as
    bool, int or float has another type. MessageError if one is no plain data.
    before: the positional arguments in front of them. later: names of parameters that the ranks
    pass.
    """
    signature = _signature(function, later)
    try:
        signature.bind(*before, **arguments)
    except TypeError as err:
        raise ProtocolError(
            f"{label}: {err}; got {sorted(arguments)}, expected "
            f"{label.rpartition('.')[2]}{signature}; pass the batch first and the rest by name"
        ) from err
    if not arguments:
        return
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


def too_many(label: str, function: Callable[..., Any], positional: Sequence[Any]) -> ProtocolError:
    """Return the ProtocolError of a call with more than the batch by position.

    It shows how to write the call, with the further arguments by name.
    """
    names = list(_signature(function).parameters)[2:]
    named = []
    for name, value in zip(names, positional[1:]):
        named.append(f"{name}={value!r}")
    got = f"{len(positional)} arguments by position"
    do = f"write {label.rpartition('.')[2]}({', '.join(['batch', *named])})"
    return ProtocolError.of(label, got, "the batch alone", do)


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any], later: tuple[str, ...] = ()) -> inspect.Signature:
    return inspect.signature(partial(function, **dict.fromkeys(later)))
