"""Proofs on the record of a dry run: rows and members. Pure functions, integers only.

Each returns what is wrong, at most a few findings of a kind; nothing: proved. They share no step
with the controller: rows are followed from rank to rank by what each command says.

Rows on ranks are numbers rank * 2^40 + row id, in sorted arrays, so that a thousand ranks take a
few array operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdflow.plan.record import TRANSFER, Finding, Trace, TracedOrder, consumer_of
from spmdflow.runtime.message import find
from spmdflow.runtime.order import names_in
from spmdflow.transfer.register import method_spec, row_maths_spec

_SHIFT = 40
_NONE = np.zeros(0, dtype=np.int64)
_SHOWN = 5
_MOST_SOURCES = 64
Key = tuple[int, str]
"""Frame and column."""


def check_rows(trace: Trace) -> list[Finding]:
    """Every row that a call reads is there: made on the rank, or brought by exactly one edge.

    Also: what is sent is received, the source has it, the call that it is for reads it, and
    nothing is read after it was freed.
    """
    account = _Rows(trace)
    for order in trace.orders:
        account.take(order)
    return account.found[: 4 * _SHOWN]


class _Rows:
    """Which rank has which rows, order by order."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._held: dict[Key, np.ndarray] = {}
        self._label: dict[int, str] = {}
        self._freed: dict[int, set[int]] = {}
        self.found: list[Finding] = []

    def take(self, order: TracedOrder) -> None:
        """Follow one order."""
        if order.lane == TRANSFER:
            self._transfer(order)
            return
        for rank, plain in order.commands.items():
            for frame in plain.get("free", ()):
                self._freed.setdefault(frame, set()).add(rank)
        self._reads(order)
        self._label[order.number] = order.label
        writes = writes_of(self._trace, order)
        holds = {rank: _holds(plain) for rank, plain in order.commands.items()}
        made = _keys((rank, ids) for rank, ids in holds.items() if ids is not None)
        for name in writes:
            self._held[order.number, name] = made

    def _reads(self, order: TracedOrder) -> None:
        wanted: dict[tuple[int, tuple[str, ...]], list[tuple[int, np.ndarray]]] = {}
        for rank, plain in order.commands.items():
            for part in _parts(plain):
                if "source" not in part:
                    key = part["frame"], tuple(part["columns"])
                    wanted.setdefault(key, []).append((rank, part["ids"]))
                    if rank in self._freed.get(part["frame"], ()):
                        self._wrong(
                            f"{order.name} on rank {rank} reads rows of call "
                            f"{part['frame']}, which it was told to free; expected rows "
                            f"that are kept; report this plan"
                        )
        for (frame, columns), rows in wanted.items():
            keys = _keys(rows)
            for name in columns:
                lacking = keys[~_among(keys, self._held.get((frame, name), _NONE))]
                if len(lacking):
                    self._lacking(order, frame, name, lacking)

    def _lacking(self, order: TracedOrder, frame: int, name: str, keys: np.ndarray) -> None:
        rank = int(keys[0] >> _SHIFT)
        ids = _ids(keys[keys >> _SHIFT == rank])
        sources = _holders_of_all(ids, self._held.get((frame, name), _NONE))
        self._wrong(
            f"edge {_either(sources)} -> {rank}: got no rows {_shown(ids)} of column {name!r} of "
            f"{self._label.get(frame, f'call {frame}')}, expected them before {order.name}; a "
            f"transfer was dropped, or brings other rows"
        )

    def _transfer(self, order: TracedOrder) -> None:
        self._check_pairs(order)
        consumer = consumer_of(self._trace, order)
        by_columns: dict[tuple[str, ...], list[tuple[int, int, np.ndarray]]] = {}
        for rank, plain in order.commands.items():
            for source, columns, ids, *_ in plain["receives"]:
                by_columns.setdefault(tuple(columns), []).append((source, rank, ids))
        for columns, edges in by_columns.items():
            frame = next(iter(order.commands.values()))["frame"]
            self._deliver(order, frame, columns, edges, consumer)

    def _deliver(
        self,
        order: TracedOrder,
        frame: int,
        columns: tuple[str, ...],
        edges: Sequence[tuple[int, int, np.ndarray]],
        consumer: TracedOrder | None,
    ) -> None:
        sizes = [len(ids) for _, _, ids in edges]
        sources = np.repeat(np.array([s for s, _, _ in edges], dtype=np.int64), sizes)
        ids = np.concatenate([_NONE, *(ids for _, _, ids in edges)])
        arriving = np.repeat(np.array([d for _, d, _ in edges], dtype=np.int64), sizes)
        arriving = (arriving << _SHIFT) + ids
        order_of = np.argsort(arriving, kind="stable")
        arriving, sources, ids = arriving[order_of], sources[order_of], ids[order_of]
        names = list(columns)
        twice = np.flatnonzero(arriving[1:] == arriving[:-1]) + 1
        self._edges(order, names, sources, arriving, twice, "twice", "each row once")
        needed = _needed(consumer, frame, columns)
        strange = np.flatnonzero(~_among(arriving, needed))
        reader = consumer.label if consumer else "any call"
        what = f"where {reader} does not read it"
        self._edges(order, names, sources, arriving, strange, what, "only rows that are read")
        for name in columns:
            held = self._held.get((frame, name), _NONE)
            absent = np.flatnonzero(~_among((sources << _SHIFT) + ids, held))
            what, expected = "which the source does not have", "a source that has it"
            self._edges(order, [name], sources, arriving, absent, what, expected)
            there = np.flatnonzero(_among(arriving, held))
            what, expected = "which is there already", "only rows that are missing"
            self._edges(order, [name], sources, arriving, there, what, expected)
            self._held[frame, name] = np.union1d(held, arriving)

    def _edges(
        self,
        order: TracedOrder,
        names: list[str],
        sources: np.ndarray,
        arriving: np.ndarray,
        wrong: np.ndarray,
        what: str,
        expected: str,
    ) -> None:
        """A finding for each edge of the rows at `wrong`."""
        pairs: dict[tuple[int, int], int] = {}
        for place in wrong.tolist():
            pairs.setdefault((int(sources[place]), int(arriving[place]) >> _SHIFT), place)
        for (source, rank), place in list(pairs.items())[:_SHOWN]:
            row = int(_ids(arriving[place : place + 1])[0])
            self._wrong(
                f"edge {source} -> {rank} of {order.name}: got row {row} of {', '.join(names)} "
                f"{what}, expected {expected}; derive the transfer again"
            )

    def _check_pairs(self, order: TracedOrder) -> None:
        sends = Counter(
            (rank, to, tuple(columns), ids.tobytes())
            for rank, plain in order.commands.items()
            for to, columns, ids in plain["sends"]
        )
        receives = Counter(
            (source, rank, tuple(columns), ids.tobytes())
            for rank, plain in order.commands.items()
            for source, columns, ids, *_ in plain["receives"]
            if source != rank
        )
        for alone, what, other in (
            (sends - receives, "sent", "received"),
            (receives - sends, "awaited", "sent"),
        ):
            for source, rank, columns, _ in sorted(alone)[:1]:
                self._wrong(
                    f"edge {source} -> {rank} of {order.name}: got rows of {', '.join(columns)} "
                    f"{what} that are not {other} as often, expected both ends "
                    f"alike; tell both ranks"
                )

    def _wrong(self, text: str) -> None:
        self.found.append(Finding("rows", text))


def check_members(trace: Trace) -> list[Finding]:
    """Every rank of a model runs its calls; every rank of the world makes every group, alike;
    every group that a model needs, or that a call reduces over, is made before."""
    found: list[Finding] = []
    made: set[tuple[int, ...]] = set()
    for order in trace.orders:
        if order.operation == "groups":
            found += _check_makers(trace, order)
            made |= {tuple(s[0]) for s in next(iter(order.commands.values()))["specs"]}
        expected = _members(trace, order)
        missing = sorted(set(expected) - set(order.commands))
        strange = sorted(set(order.commands) - set(expected)) if expected else []
        for rank in missing[:1] or strange[:1]:
            got = "no command" if missing else "a command"
            found.append(
                Finding(
                    "members",
                    f"{order.name}: got {got} for rank {rank}, expected exactly the ranks "
                    f"{_shown(np.array(expected))} of its group; the others would wait for ever",
                )
            )
        for ranks in _groups_entered(trace, order):
            if len(ranks) > 1 and ranks not in made:
                found.append(
                    Finding(
                        "members",
                        f"{order.name}: uses the group of ranks {_shown(np.array(ranks))}, which "
                        f"no order made before, expected it among needed_groups; add it there",
                    )
                )
                made.add(ranks)
    return found[:_SHOWN]


def writes_of(trace: Trace, order: TracedOrder) -> tuple[str, ...]:
    """Columns that an order makes on its ranks."""
    plain = next(iter(order.commands.values()))
    if order.operation == "call" and plain.get("ids") is not None:
        worker_class = trace.models[plain["group"]].worker_class
        return method_spec(worker_class, plain["method"]).writes
    if order.operation == "map":
        return row_maths_spec(find(plain["function"])).writes
    if order.operation == "join":
        return tuple(name for name, _ in names_in(plain["inputs"][0]))
    return ()


def _members(trace: Trace, order: TracedOrder) -> tuple[int, ...]:
    """Ranks that must take part; empty: whoever is asked."""
    plain = next(iter(order.commands.values()))
    if order.operation == "groups":
        return trace.world
    if order.operation == "map":
        return tuple(plain["ranks"])
    if order.operation in ("call", "spawn"):
        names = {p.get("group", p.get("name")) for p in order.commands.values()}
        linked = next((set(pair) for pair in trace.links if names <= set(pair)), names)
        sends = {p.get("method") for p in order.commands.values()}
        if sends & {"send_weights", "receive_weights"}:
            names = linked
        return tuple(sorted({r for name in names for r in trace.models[name].layout.ranks}))
    return ()


def _groups_entered(trace: Trace, order: TracedOrder) -> list[tuple[int, ...]]:
    if order.operation == "spawn":
        model = trace.models[next(iter(order.commands.values()))["name"]]
        return list(model.worker_class.needed_groups(model.cfg, model.layout))
    if order.operation == "map":
        return [tuple(next(iter(order.commands.values()))["ranks"])]
    return []


def _check_makers(trace: Trace, order: TracedOrder) -> list[Finding]:
    specs = {id(plain["specs"]): plain["specs"] for plain in order.commands.values()}
    first, *others = specs.values()
    if all(other == first for other in others):
        return []
    rank = next(r for r, plain in order.commands.items() if plain["specs"] != first)
    return [
        Finding(
            "members",
            f"{order.name}: got other groups on rank {rank} than on rank {order.ranks[0]}, "
            f"expected the same ones in the same order; a new_group that some ranks leave out "
            f"poisons the ones after it",
        )
    ]


def _holds(plain: Mapping[str, Any]) -> np.ndarray | None:
    held: np.ndarray | None = plain.get("holds", plain.get("ids"))
    return held


def _parts(plain: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if "input" in plain:
        return (plain["input"],)
    return plain.get("inputs", ())


def _needed(consumer: TracedOrder | None, frame: int, columns: tuple[str, ...]) -> np.ndarray:
    """Rows that the consumer reads of a frame's columns, by rank."""
    if consumer is None:
        return _NONE
    return _keys(
        (rank, part["ids"])
        for rank, plain in consumer.commands.items()
        for part in _parts(plain)
        if part["frame"] == frame and set(columns) <= set(part["columns"])
    )


def _keys(rows: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Sorted numbers of rows on ranks."""
    parts = list(rows)
    if not parts:
        return _NONE
    ranks = np.repeat(
        np.array([rank for rank, _ in parts], dtype=np.int64), [len(ids) for _, ids in parts]
    )
    return np.unique((ranks << _SHIFT) + np.concatenate([ids for _, ids in parts]))


def _among(keys: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    if not len(ascending):
        return np.zeros(len(keys), dtype=bool)
    places = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return ascending[places] == keys


def _holders_of_all(ids: np.ndarray, held: np.ndarray) -> list[int]:
    """Ranks that have all of the rows; where no rank has: those that have the first one."""
    for rows in (ids, ids[:1]):
        having = held[np.isin(_ids(held), rows)] >> _SHIFT
        ranks, counts = np.unique(having, return_counts=True)
        if (counts == len(rows)).any():
            return ranks[counts == len(rows)].tolist()
    return []


def _either(ranks: Sequence[int]) -> str:
    """Any of which could be meant: [0, 4, 6] -> "0, 4 or 6"."""
    if not ranks:
        return "?"
    *others, last = ranks
    if len(others) > _MOST_SOURCES:
        return f"{', '.join(map(str, others[:_MOST_SOURCES]))}, ... or {last}"
    return f"{', '.join(map(str, others))} or {last}" if others else str(last)


def _ids(keys: np.ndarray) -> np.ndarray:
    return keys & ((1 << _SHIFT) - 1)


def _shown(numbers: np.ndarray) -> str:
    values = numbers.tolist()
    if len(values) <= 8:
        return str(values)
    return f"[{', '.join(map(str, values[:4]))}, ... {values[-1]}; {len(values)}]"
