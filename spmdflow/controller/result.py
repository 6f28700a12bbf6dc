"""Rows that calls made: where they are, what is known of them, how they travel. No values.

`held` records, for the script thread, which rank has or is about to have which rows; it is
exact because protocols are pure functions and calls are numbered. `facts` (dtype, row shape,
lengths) are known once the producer has replied; only the io thread writes them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from spmdflow.blocks.rows import RowEdge, plan_rounds
from spmdflow.data.column import ColumnSpec
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError, ProtocolError, TransferError
from spmdflow.runtime.order import Order, Pending, Replies, Transport
from spmdflow.tracking.metric import merge


@dataclass(frozen=True)
class ColumnFacts:
    """Dtype, row shape and lengths of one column, over all its rows."""

    spec: ColumnSpec
    ids: Ids
    """Ascending; the same for all columns of a result."""
    lengths: np.ndarray | None
    """Items of each row (ragged, text), aligned with ids."""

    def lengths_of(self, ids: Ids) -> np.ndarray:
        """Items of the rows `ids`; dense rows count one item each."""
        if self.lengths is None:
            return np.ones(len(ids), dtype=np.int64)
        return self.lengths[np.searchsorted(self.ids, ids)]


def facts_of(replies: Replies, answer: Mapping[int, Ids], *, label: str) -> dict[str, ColumnFacts]:
    """Dtype, row shape and lengths of the columns, from the replies of the answering ranks.

    label: the call that made them. ColumnError if two ranks made a column of different kinds.
    """
    ranks = [rank for rank, ids in answer.items() if len(ids)] or list(answer)[:1]
    said = [replies[rank]["columns"] for rank in ranks]
    ids, first = np.unique(np.concatenate([answer[rank] for rank in ranks]), return_index=True)
    facts = {}
    for name, (plain, _) in said[0].items():
        spec = ColumnSpec.from_plain(plain)
        for rank, columns in zip(ranks, said, strict=True):
            other = ColumnSpec.from_plain(columns[name][0])
            if other != spec:
                raise _differing_column(label, name, {ranks[0]: spec, rank: other})
        lengths = None
        if spec.kind != "dense":
            lengths = np.concatenate([columns[name][1] for columns in said])[first]
        facts[name] = ColumnFacts(spec, ids, lengths)
    return facts


def _differing_column(label: str, name: str, specs: Mapping[int, ColumnSpec]) -> ColumnError:
    """The error of a column that two ranks made differently; specs: what each of them made."""
    made = " and ".join(
        f"{spec.kind} {spec.dtype} of row shape {spec.row_shape} from rank {rank}"
        for rank, spec in specs.items()
    )
    return ColumnError.of(
        label,
        f"the column {name!r} as {made}",
        "the same dtype and row shape on every rank, whatever rows a rank has",
        f"convert it where {label} makes it, such as {name}.float()",
    )


@dataclass(eq=False)
class RowResult:
    """Rows made by call `number`, and who holds them."""

    number: int
    label: str
    """Who made it, such as "actor.generate_sequences"."""
    ranks: tuple[int, ...]
    """Every rank that ran the call, with or without rows."""
    answer: Mapping[int, Ids]
    """Rows by answering rank: one holder of each row, in order."""
    held: dict[str, dict[int, Ids]]
    """Rows by column and rank, transfers under way included; columns with the same holders share
    one mapping, which is replaced and never changed."""
    on_free: Callable[[int], None]
    sources: frozenset[int] = frozenset()
    """Numbers of the results that it was made from, and of those that these were made from."""
    facts: dict[str, ColumnFacts] = field(default_factory=dict)
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    """What the answering ranks reported of the call."""
    done: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Releases of transfers that wait for the producer (io thread)."""
    spans_pools: bool = False
    """Whether its rows were made on several pools and concatenated: no group has all its ranks."""

    def learn(self, replies: Replies) -> None:
        """Take over what the ranks said of the rows, and release what waited for it (io thread)."""
        self.facts = facts_of(replies, self.answer, label=self.label)
        self.metrics = [replies[rank].get("metrics", {}) for rank in self.answer]
        self.done = True
        waiting = self.waiting
        self.waiting = []
        for release in waiting:
            release()

    @property
    def lineage(self) -> frozenset[int]:
        """Its own number and its sources."""
        return self.sources | {self.number}

    def owners(self, ids: Ids) -> np.ndarray:
        """(B,) int64: the rank that answers for each of the rows; of several the first."""
        own = list(self.answer.values())
        known, first = np.unique(np.concatenate(own), return_index=True)
        ranks = np.repeat(list(self.answer), [len(rows) for rows in own])
        return ranks[first[np.searchsorted(known, ids)]]

    def __del__(self) -> None:
        self.on_free(self.number)


@dataclass(eq=False)
class SourceRows:
    """Rows of a data file: every rank can read them, so they never travel."""

    number: int
    label: str
    """Name of the file's part, such as "prompts.train"."""
    ids: Ids
    rows: np.ndarray
    """Row number in the file of each id, aligned."""
    on_free: Callable[[int], None]
    token_lengths: np.ndarray | None = None
    """Prompt tokens of each id, aligned; none: not known."""

    def __del__(self) -> None:
        self.on_free(self.number)

    def part(self, ids: Ids) -> tuple[np.ndarray, np.ndarray | None]:
        """Row numbers of `ids`, and their prompt tokens if these are known."""
        order = np.argsort(self.ids, kind="stable")
        places = order[np.searchsorted(self.ids, ids, sorter=order)]
        tokens = None if self.token_lengths is None else self.token_lengths[places]
        return self.rows[places], tokens

    def lengths_of(self, name: str, ids: Ids) -> np.ndarray:
        """Prompt tokens of each row; the file's responses are empty, other columns not measured."""
        if name == "responses":
            return np.zeros(len(ids), dtype=np.int64)
        lengths = self.part(ids)[1] if name == "prompts" else None
        if lengths is None:
            raise ColumnError(
                f"column {name!r} of {self.label}: its lengths are not known on the controller, "
                f"expected prompts; fetch the column instead"
            )
        return lengths


@dataclass(frozen=True)
class ColumnRef:
    """A column of a batch: the result that holds it and, per row of the batch, the result's id."""

    result: RowResult | SourceRows
    ids: Ids
    stored: str
    """Its name there; `rename` changes only the batch's."""

    def at(self, places: np.ndarray) -> ColumnRef:
        """The rows at these places."""
        return ColumnRef(self.result, self.ids[places], self.stored)

    def row_bytes(self) -> np.ndarray:
        """(B,) bytes of each row; of rows that a call has made."""
        assert isinstance(self.result, RowResult), self.result.label
        fact = self.result.facts[self.stored]
        return fact.lengths_of(self.ids) * fact.spec.item_bytes

    def equals(self, other: ColumnRef) -> bool:
        """Whether both are the same column of the same rows."""
        same = self.result is other.result and self.stored == other.stored
        return same and np.array_equal(self.ids, other.ids)


def cut_rows(row_bytes: np.ndarray, piece_bytes: int) -> list[int]:
    """Where to cut rows of these sizes, so that each piece has at most piece_bytes, or one row."""
    ends = np.cumsum(row_bytes)
    cuts: list[int] = []
    start = 0
    while start < len(ends):
        taken = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, taken + piece_bytes, side="right"))
        start = max(fitting, start + 1)
        if start < len(ends):
            cuts.append(start)
    return cuts


def input_of(
    result: RowResult | SourceRows, columns: Mapping[str, str], ids: Ids
) -> dict[str, Any]:
    """One result's part of the inputs; columns: stored names by the names that the call sees."""
    stored = list(dict.fromkeys(columns.values()))
    plain: dict[str, Any] = {"result": result.number, "columns": stored, "ids": ids}
    if stored != list(columns):
        plain["seen"] = list(columns.items())
    if isinstance(result, SourceRows):
        plain |= {"source": result.label, "rows": result.part(ids)[0]}
    return plain


class CallRecord(NamedTuple):
    """One submitted order of the running step; it keeps no rows."""

    number: int
    label: str
    phase: str
    """train or eval: which metrics its reports belong to."""
    commands: Mapping[int, Mapping[str, Any]]
    pending: Pending
    answering: tuple[int, ...] = ()
    """Ranks whose reported metrics count."""
    step: int = 0
    lane: str = "compute"

    @property
    def replies(self) -> Replies:
        """By rank; waits for them."""
        return self.pending.result()


class ReportedMetrics(dict[str, float]):
    """What calls reported; KeyError with the setting to change for a metric of an omitted call."""

    def __init__(self, metrics: Mapping[str, float], omitted: Mapping[str, str]) -> None:
        """omitted: why a metric was not reported."""
        super().__init__(metrics)
        self._omitted = omitted

    def __missing__(self, name: str) -> float:
        raise KeyError(f"{name}: {self._omitted.get(name, f'the calls reported {sorted(self)}')}")


class Result(Mapping[str, float]):
    """The answer of a call, by rank. As a mapping: its metrics, merged over ranks.

    Looking inside waits for the call.
    """

    def __init__(self, label: str, pending: Pending, ranks: tuple[int, ...]) -> None:
        self.label = label
        self.pending = pending
        self.ranks = ranks

    def values_by_rank(self) -> list[Any]:
        """What each answering rank returned, in the protocol's order."""
        replies = self.pending.result()
        return [replies[rank].get("value") for rank in self.ranks]

    def metrics(self) -> dict[str, float]:
        """Metrics of the answering ranks, merged."""
        values = self.values_by_rank()
        if not all(isinstance(value, dict) for value in values):
            raise ProtocolError(
                f"{self.label}: returned {type(values[0]).__name__}, expected a dict of metrics; "
                f"use values_by_rank() for plain values"
            )
        return merge(values)

    def __getitem__(self, key: str) -> float:
        return self.metrics()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics())

    def __len__(self) -> int:
        return len(self.metrics())

    def __repr__(self) -> str:
        state = "done" if self.pending.done else "pending"
        return f"Result({self.label}, {state})"


def nothing(label: str) -> Result:
    """The answer of an update that was left out: no metrics."""
    pending = Pending(label, lambda _: None)
    pending.resolve({0: {"value": {}}})
    return Result(label, pending, (0,))


Edge = tuple[int, int]
Edges = Mapping[tuple[int, int, bytes], tuple[list[str], RowEdge]]
"""Columns that travel together and their rows, by (source, destination, row ids)."""


class Transfers:
    """All row transfers of a run: plans what rows travel, releases each transfer when its producer
    has replied, counts bytes.

    `need` runs in the script thread; releasing and counting run in the io thread, which alone knows
    dtypes and lengths and writes the fields below. The script reads them under the lock, as copies.
    """

    def __init__(self, transport: Transport, *, seconds: float) -> None:
        self._transport = transport
        self.seconds = seconds
        self._lock = threading.Lock()
        self._planned: Counter[Edge] = Counter()
        self._moved: Counter[Edge] = Counter()
        self._header_bytes = 0
        self._num_released = 0
        self._outstanding: list[CallRecord] = []

    @property
    def planned_bytes(self) -> Counter[Edge]:
        """Of rows by (source, destination), since the run began; a copy."""
        with self._lock:
            return self._planned.copy()

    @property
    def moved_bytes(self) -> Counter[Edge]:
        """As planned_bytes, as the ranks counted them."""
        with self._lock:
            return self._moved.copy()

    @property
    def header_bytes(self) -> int:
        """Sent besides the rows: one short header for each edge of a transfer."""
        with self._lock:
            return self._header_bytes

    def need(self, result: RowResult, names: Sequence[str], need: Mapping[int, Ids]) -> None:
        """Plan transfers so that each rank gets its rows `need[rank]` of `names` (script thread).

        A rank that needs no rows and has never had the column gets an empty one, from itself.
        """
        alike: dict[int, tuple[list[str], dict[int, Ids]]] = {}  # columns with the same holders
        for name in names:
            held = result.held[name]
            alike.setdefault(id(held), ([], held))[0].append(name)
        rounds: list[dict[tuple[int, int, bytes], tuple[list[str], RowEdge]]] = [{}, {}]
        for columns, held in alike.values():
            unions: dict[tuple[int, int], Ids | None] = {}  # ranks that are alike share theirs
            after: dict[int, Ids] = {}
            for rank, ids in need.items():
                pair = (id(held.get(rank)), id(ids))
                if pair not in unions:
                    unions[pair] = _union_or_none(held.get(rank), ids)
                union = unions[pair]
                if union is not None:
                    after[rank] = union
            lacking = {}
            for rank in after:
                lacking[rank] = need[rank]
            found = plan_rounds(held, lacking, node_of=self._transport.node_of)
            found[0] += [RowEdge(rank, rank, ids) for rank, ids in lacking.items() if not len(ids)]
            for edges, planned in zip(rounds, found, strict=False):
                for edge in planned:
                    key = (edge.source, edge.destination, edge.ids.tobytes())
                    edges.setdefault(key, ([], edge))[0].extend(columns)
            result.held |= dict.fromkeys(columns, {**held, **after})
        for edges in filter(None, rounds):
            self._transport.post(partial(self._offer, result, edges))

    def take_outstanding(self) -> list[CallRecord]:
        """Transfers released and not yet waited for; the end of a step waits for them."""
        with self._lock:
            taken = self._outstanding
            self._outstanding = []
        return taken

    def _offer(self, result: RowResult, edges: Edges) -> None:
        """Release a transfer now, or when the rows are made."""
        if result.done:
            self._release(result, edges)
        else:
            result.waiting.append(partial(self._release, result, edges))

    def _release(self, result: RowResult, edges: Edges) -> None:
        """Send the commands."""
        self._num_released += 1
        planned: Counter[Edge] = Counter()
        commands: dict[int, dict[str, Any]] = {}
        kinds = {name: fact.spec.to_plain() for name, fact in result.facts.items()}
        for names, edge in edges.values():
            place = np.searchsorted(result.facts[names[0]].ids, edge.ids)
            lengths = {}
            size = 0
            for name in names:
                fact = result.facts[name]
                items = len(edge.ids)
                if fact.lengths is not None:
                    lengths[name] = fact.lengths[place]
                    items = int(lengths[name].sum())
                size += items * fact.spec.item_bytes
            of_names = {}
            for name in names:
                of_names[name] = kinds[name]
            received = [edge.source, names, edge.ids, of_names, lengths]
            _command(commands, edge.destination, result)["receives"].append(received)
            if edge.source != edge.destination:
                sent = [edge.destination, names, edge.ids]
                _command(commands, edge.source, result)["sends"].append(sent)
                planned[edge.source, edge.destination] += size
        with self._lock:
            self._planned.update(planned)
        label = f"transfer {self._num_released} of {result.label}"
        number = self._num_released
        done = partial(self._count, result, label, planned)
        kind = f"transfer of {result.label}"
        order = Order(number, "transfer", label, commands, self.seconds, done, kind=kind)
        pending = self._transport.submit(order)
        record = CallRecord(number, label, "train", commands, pending, lane="transfer")
        with self._lock:
            self._outstanding.append(record)

    def _count(
        self, _kept: RowResult, label: str, planned: Counter[Edge], replies: Replies
    ) -> None:
        """Check and count the bytes. Keeps the result alive while its holders send its rows."""
        sent = {}
        for r, reply in replies.items():
            for to, n in reply["sent"].items():
                sent[(r, to)] = n
        got = {}
        for r, reply in replies.items():
            for at, n in reply["received"].items():
                got[(at, r)] = n
        expected = dict(+planned)
        if not sent == got == expected:
            raise TransferError(
                f"{label}: sent {sent}, received {got}, expected {expected} bytes by edge; "
                f"the ranks and the plan disagree: report this with RUN_DIR/trace.json"
            )
        with self._lock:
            self._moved.update(got)
            self._header_bytes += sum(reply["header_bytes"] for reply in replies.values())


def _command(commands: dict[int, dict[str, Any]], rank: int, result: RowResult) -> dict[str, Any]:
    empty = {"operation": "transfer", "result": result.number, "sends": [], "receives": []}
    return commands.setdefault(rank, empty)


def _union_or_none(held: Ids | None, ids: Ids) -> Ids | None:
    """What a rank has after it was given the rows ids; None: it has them all."""
    if held is None:
        return ids
    if held is ids or (len(held) == len(ids) and np.array_equal(held, ids)):
        return None
    if np.isin(ids, held).all():
        return None
    return np.union1d(held, ids)
