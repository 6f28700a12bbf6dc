"""Proof that the controller moves every row to where it is read, on the record of a dry run.

Pure, integers only. It shares no code with the controller: rows are followed from rank to rank by
what each command says. A row on a rank is the number rank * 2^40 + row id. These are kept in sorted
arrays, so that a thousand ranks take a few array operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from spmdflow.plan.check import shorten_numbers
from spmdflow.plan.record import Problem, Trace, name_of
from spmdflow.runtime.call import Call, names_in
from spmdflow.runtime.executor import TRANSFER
from spmdflow.worker_api.register import find_map_function, map_spec, method_spec

_SHIFT = 40
_NONE = np.zeros(0, dtype=np.int64)
_SHOWN = 5
_MOST_SOURCES = 64


def check_rows(trace: Trace) -> list[Problem]:
    """Problems with rows; an empty list proves that there are none.

    Every row that a call reads must be there: computed on the rank, or brought by exactly one edge.
    What is sent must be received, the source must have it, and the call that it is for must read
    it. Nothing is read after it was freed, or sent before it was computed.
    """
    locations = _RowLocations(trace)
    for call in trace.calls:
        locations.follow(call)
    return [Problem("rows", text) for text in locations.errors[: 4 * _SHOWN]]


class _RowLocations:
    """Which rank has which rows, call by call."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._present: dict[tuple[int, str], np.ndarray] = {}
        """By result and column."""
        self._label: dict[int, str] = {}
        self._freed: dict[int, set[int]] = {}
        self.errors: list[str] = []

    def follow(self, call: Call) -> None:
        """Apply one call, and note what is wrong with it in `errors`."""
        if call.lane == TRANSFER:
            self._follow_transfer(call)
            return
        for rank, plain in call.commands.items():
            for result in plain.get("free", ()):
                self._freed.setdefault(result, set()).add(rank)
        self._check_reads(call)
        self._label[call.number] = call.label
        holds = {}
        for rank, p in call.commands.items():
            holds[rank] = p.get("holds", p.get("ids"))
        computed = _keys((rank, ids) for rank, ids in holds.items() if ids is not None)
        for name in _writes_of(self._trace, call):
            self._present[call.number, name] = computed

    def _check_reads(self, call: Call) -> None:
        wanted: dict[tuple[int, tuple[str, ...]], list[tuple[int, np.ndarray]]] = {}
        for rank, plain in call.commands.items():
            for part in _parts(plain):
                if "source" in part:
                    continue
                result = part["result"]
                columns = tuple(part["columns"])
                wanted.setdefault((result, columns), []).append((rank, part["ids"]))
                if rank in self._freed.get(result, ()):
                    self.errors.append(
                        f"{name_of(call)} on rank {rank} reads rows of call {result}, which it "
                        f"was told to free; expected rows that are kept; report this plan"
                    )
        for (result, columns), rows in wanted.items():
            keys = _keys(rows)
            for name in columns:
                present = self._present.get((result, name), _NONE)
                lacking = keys[~_among(keys, present)]
                if len(lacking):
                    rank = int(lacking[0] >> _SHIFT)
                    ids = _ids(lacking[lacking >> _SHIFT == rank])
                    self.errors.append(
                        f"edge {_either(_holders_of_all(ids, present))} -> {rank}: got no rows "
                        f"{shorten_numbers(ids)} of column {name!r} of "
                        f"{self._label.get(result, f'call {result}')}, expected them before "
                        f"{name_of(call)}; a transfer was dropped, or brings other rows"
                    )

    def _follow_transfer(self, call: Call) -> None:
        self._check_pairs(call)
        by_columns: dict[tuple[str, ...], list[tuple[int, int, np.ndarray]]] = {}
        for rank, plain in call.commands.items():
            for source, columns, ids, *_ in plain["receives"]:
                by_columns.setdefault(tuple(columns), []).append((source, rank, ids))
        for columns, edges in by_columns.items():
            self._deliver(call, columns, edges)

    def _deliver(
        self,
        call: Call,
        columns: tuple[str, ...],
        edges: Sequence[tuple[int, int, np.ndarray]],
    ) -> None:
        result = call.command["result"]
        consumer = self._trace.consumers[call.key]
        reader = consumer.label if consumer else "any call"
        unread = f"where {reader} does not read it, expected only rows that are read"
        sent, arriving, ids = (
            np.concatenate(parts)
            for parts in (
                [(source << _SHIFT) + ids for source, _, ids in edges],
                [(rank << _SHIFT) + ids for _, rank, ids in edges],
                [ids for _, _, ids in edges],
            )
        )
        ascending = np.argsort(arriving, kind="stable")
        sent = sent[ascending]
        arriving = arriving[ascending]
        ids = ids[ascending]
        twice = np.concatenate([[False], arriving[1:] == arriving[:-1]])
        strange = ~_among(arriving, _rows_needed(consumer, result, columns))
        wrong = [
            (columns, twice, "twice, expected each row once"),
            (columns, strange, unread),
        ]
        absent = "which the source does not have, expected a source that has it"
        there = "which is there already, expected only rows that are missing"
        for name in columns:
            present = self._present.get((result, name), _NONE)
            wrong.append(((name,), ~_among(sent, present), absent))
            wrong.append(((name,), _among(arriving, present), there))
            self._present[result, name] = np.union1d(present, arriving)
        for names, rows, what in wrong:
            first: dict[tuple[int, int], int] = {}
            for index in np.flatnonzero(rows).tolist():
                ends = int(sent[index]) >> _SHIFT, int(arriving[index]) >> _SHIFT
                first.setdefault(ends, index)
            for (source, rank), index in islice(first.items(), _SHOWN):
                self.errors.append(
                    f"edge {source} -> {rank} of {name_of(call)}: got row {ids[index]} of "
                    f"{', '.join(names)} {what}; derive the transfer again"
                )

    def _check_pairs(self, call: Call) -> None:
        sends: Counter[tuple[int, int, tuple[str, ...], bytes]] = Counter()
        receives = Counter(sends)
        for rank, plain in call.commands.items():
            for to, columns, ids in plain["sends"]:
                sends[rank, to, tuple(columns), ids.tobytes()] += 1
            for source, columns, ids, *_ in plain["receives"]:
                receives[source, rank, tuple(columns), ids.tobytes()] += source != rank
        for alone, what, other in (
            (sends - receives, "sent", "received"),
            (receives - sends, "awaited", "sent"),
        ):
            for source, rank, columns, _ in sorted(alone)[:1]:
                self.errors.append(
                    f"edge {source} -> {rank} of {name_of(call)}: got rows of "
                    f"{', '.join(columns)} {what} that are not {other} as often, expected both "
                    f"ends alike; tell both ranks"
                )


def _writes_of(trace: Trace, call: Call) -> tuple[str, ...]:
    """Columns that a call writes on its ranks."""
    plain = call.command
    if call.operation == "call" and plain.get("ids") is not None:
        model = trace.models[plain["group"]]
        return method_spec(model.worker_class, plain["method"]).with_settings(model.settings).writes
    if call.operation == "map":
        return map_spec(find_map_function(plain["function"])).writes
    if call.operation == "join":
        return tuple(name for name, _ in names_in(plain["inputs"][0]))
    return ()


def _parts(plain: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if "input" in plain:
        return (plain["input"],)
    return plain.get("inputs", ())


def _rows_needed(consumer: Call | None, result: int, columns: tuple[str, ...]) -> np.ndarray:
    """Rows that the consumer reads of a result's columns, by rank."""
    return _keys(
        (rank, part["ids"])
        for rank, plain in (consumer.commands if consumer else {}).items()
        for part in _parts(plain)
        if part["result"] == result and set(columns) <= set(part["columns"])
    )


def _keys(rows: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """(n,) int64: rank * 2^40 + row id of all rows, sorted, each once."""
    parts = list(rows)
    ranks = np.array([rank for rank, _ in parts], dtype=np.int64)
    ranks = np.repeat(ranks, [len(ids) for _, ids in parts])
    return np.unique((ranks << _SHIFT) + np.concatenate([_NONE, *(ids for _, ids in parts)]))


def _ids(keys: np.ndarray) -> np.ndarray:
    return keys & ((1 << _SHIFT) - 1)


def _among(keys: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    if not len(ascending):
        return np.zeros(len(keys), dtype=bool)
    indices = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return ascending[indices] == keys


def _holders_of_all(ids: np.ndarray, present: np.ndarray) -> list[int]:
    """Ranks that have all of the rows; if there are none, those that have the first one."""
    for rows in (ids, ids[:1]):
        having = present[np.isin(_ids(present), rows)] >> _SHIFT
        ranks, counts = np.unique(having, return_counts=True)
        if (counts == len(rows)).any():
            return ranks[counts == len(rows)].tolist()
    return []


def _either(ranks: Sequence[int]) -> str:
    """Alternatives as text: [0, 4, 6] -> "0, 4 or 6"."""
    *others, last = [str(rank) for rank in ranks] or ["?"]
    if len(others) > _MOST_SOURCES:
        others = [*others[:_MOST_SOURCES], "..."]
    if others:
        return f"{', '.join(others)} or {last}"
    return last
