"""Rows that calls made: where they are, and what is known of them. No values.

`holders` records, for the script thread, which rank has or is about to have which rows; it is
exact because protocols are pure functions and calls are numbered. `facts` (dtype, row shape,
lengths) are known once the producer has replied; only the io thread writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from spmdflow.data.column import ColumnSpec
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.runtime.call import Call, Pending, Replies
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


def facts_of(
    replies: Mapping[int, Mapping[str, Any]], answer: Mapping[int, Ids], *, label: str
) -> dict[str, ColumnFacts]:
    """Return dtype, row shape and lengths of each column, from the replies of the answering ranks.

    answer: the ids of the rows that each rank answers for. Of a row that several ranks have, the
    first one's length counts. Ranks without rows are ignored, unless no rank has rows. label: the
    call that made the columns. ColumnError if two ranks made a column of different kinds, dtypes or
    row shapes.
    """
    ranks = [rank for rank, ids in answer.items() if len(ids)] or list(answer)[:1]
    columns_of_ranks = [replies[rank]["columns"] for rank in ranks]
    ids, first = np.unique(np.concatenate([answer[rank] for rank in ranks]), return_index=True)
    facts = {}
    for name, (plain, _) in columns_of_ranks[0].items():
        spec = ColumnSpec.from_plain(plain)
        for rank, columns in zip(ranks, columns_of_ranks, strict=True):
            other = ColumnSpec.from_plain(columns[name][0])
            if other != spec:
                raise _differing_column(label, name, {ranks[0]: spec, rank: other})
        lengths = None
        if spec.kind != "dense":
            lengths = np.concatenate([columns[name][1] for columns in columns_of_ranks])[first]
        facts[name] = ColumnFacts(spec, ids, lengths)
    return facts


def _differing_column(label: str, name: str, specs: Mapping[int, ColumnSpec]) -> ColumnError:
    """The error of a column that two ranks made differently; specs: what each of them made."""
    columns = " and ".join(
        f"{spec.kind} {spec.dtype} of row shape {spec.row_shape} from rank {rank}"
        for rank, spec in specs.items()
    )
    return ColumnError.of(
        label,
        f"the column {name!r} as {columns}",
        "the same dtype and row shape on every rank, also on ranks with other rows or none",
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
    holders: dict[str, dict[int, Ids]]
    """Rows by column and rank, transfers under way included; columns with the same holders share
    one mapping, which is replaced and never changed."""
    on_free: Callable[[int], None]
    lineage: frozenset[int] = frozenset()
    """Its own number, those of the results that it was made from, and of those before them."""
    pending: Pending | None = None
    """The call, once it was sent."""
    facts: dict[str, ColumnFacts] = field(default_factory=dict)
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    """What the answering ranks reported of the call."""
    done: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Releases of transfers that wait for the producer (io thread)."""
    spans_pools: bool = False
    """Whether its rows were made on several pools and concatenated: no group has all its ranks."""

    @classmethod
    def of(cls, call: Call, on_free: Callable[[int], None]) -> RowResult:
        """Return the result of a call that writes columns, before its ranks have replied.

        Its holders are the ranks that have rows afterwards. on_free: called with its number once
        nothing refers to it.
        """
        answer = {}
        for rank in call.reply_ranks:
            answer[rank] = call.rows_after[rank]
        return cls(
            call.number,
            call.label,
            tuple(sorted(call.commands)),
            answer,
            dict.fromkeys(call.writes, dict(call.rows_after)),
            on_free,
            call.lineage | {call.number},
        )

    def wait(self) -> None:
        """Block until the call has replied."""
        if self.pending is not None:
            self.pending.result()

    def learn(self, replies: Replies) -> None:
        """Set facts and metrics from the replies, then release waiting transfers.

        Runs once, in the io thread. ColumnError if two ranks made a column differently.
        """
        self.facts = facts_of(replies, self.answer, label=self.label)
        self.metrics = [replies[rank].get("metrics", {}) for rank in self.answer]
        self.done = True
        waiting = self.waiting
        self.waiting = []
        for release in waiting:
            release()

    def owners(self, ids: Ids) -> np.ndarray:
        """Return (B,) int64: the rank that answers for each row of `ids`; of several the first."""
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

    def file_rows(self, ids: Ids) -> np.ndarray:
        """(B,) int64: row numbers of `ids` in the file."""
        return self.part(ids)[0]

    def part(self, ids: Ids) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the row numbers (B,) of `ids` in the file, and prompt tokens (B,) if known."""
        order = np.argsort(self.ids, kind="stable")
        indices = order[np.searchsorted(self.ids, ids, sorter=order)]
        tokens = None if self.token_lengths is None else self.token_lengths[indices]
        return self.rows[indices], tokens

    def lengths_of(self, name: str, ids: Ids) -> np.ndarray:
        """Return (B,) int64: the prompt tokens of each row for "prompts", and 0 for "responses".

        ColumnError for other columns, and for prompts whose tokens were not counted.
        """
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

    def at(self, indices: np.ndarray) -> ColumnRef:
        """The rows at these places."""
        return ColumnRef(self.result, self.ids[indices], self.stored)

    is_postponed: ClassVar[bool] = False

    def resolve(self) -> ColumnRef:
        """Itself; see PostponedRef."""
        return self

    def row_bytes(self) -> np.ndarray:
        """(B,) bytes of each row; of rows that a call has made."""
        assert isinstance(self.result, RowResult), self.result.label
        fact = self.result.facts[self.stored]
        return fact.lengths_of(self.ids) * fact.spec.item_bytes

    def equals(self, other: Ref) -> bool:
        """Whether both are the same column of the same rows."""
        return _are_equal(self, other)


@dataclass(eq=False)
class PostponedRows:
    """Rows of a call that is made when something first reads them (controller/on_demand.py)."""

    number: int
    label: str
    ids: Ids
    """(B,): the rows that the call is made for."""
    lineage: frozenset[int]
    """Of the results that it would be made from."""
    make: Callable[[], Mapping[str, Ref]] | None
    """Makes the call; returns the references of its columns, for the rows `ids`. None: it was
    made."""
    refs: Mapping[str, Ref] = field(default_factory=dict)
    """What `make` returned."""

    def column(self, stored: str, ids: Ids) -> ColumnRef:
        """Return the reference of the rows `ids` of a column; makes the call if nothing did yet."""
        if self.make is not None:
            self.refs = self.make()
            self.make = None  # it keeps the call's inputs
        order = np.argsort(self.ids, kind="stable")
        positions = order[np.searchsorted(self.ids, ids, sorter=order)]
        return self.refs[stored].at(positions).resolve()


@dataclass(frozen=True)
class PostponedRef:
    """A column of a batch whose values may not have been computed yet; otherwise a ColumnRef."""

    result: PostponedRows
    ids: Ids
    stored: str

    @property
    def is_postponed(self) -> bool:
        """Whether the call that makes the column was not made yet."""
        return self.result.make is not None

    def resolve(self) -> ColumnRef:
        """Return where the values are; makes the call if nothing did yet."""
        return self.result.column(self.stored, self.ids)

    def at(self, indices: np.ndarray) -> PostponedRef:
        """The rows at these places."""
        return PostponedRef(self.result, self.ids[indices], self.stored)

    def equals(self, other: Ref) -> bool:
        """Whether both are the same column of the same rows."""
        return _are_equal(self, other)


Ref = ColumnRef | PostponedRef
"""A column of a batch."""


def _are_equal(one: Ref, other: Ref) -> bool:
    same = one.result is other.result and one.stored == other.stored
    return same and np.array_equal(one.ids, other.ids)


def cut_rows(row_bytes: np.ndarray, piece_bytes: int) -> list[int]:
    """Return where to cut rows of these sizes into pieces of at most piece_bytes each.

    row_bytes (B,). Pieces are as long as possible; a larger row is a piece on its own. The result
    has the first row of every piece but the first, so it is empty for one piece or no rows.
    """
    ends = np.cumsum(row_bytes)
    cuts: list[int] = []
    start = 0
    while start < len(ends):
        start_bytes = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, start_bytes + piece_bytes, side="right"))
        start = max(fitting, start + 1)
        if start < len(ends):
            cuts.append(start)
    return cuts


OnRead = Callable[[Iterable[str]], None]
"""Called with the names of the metrics that the script reads."""


def ignore_reads(names: Iterable[str]) -> None:
    """An `OnRead` that does nothing."""


class UnknownMetric(KeyError):
    """A metric that was read, but that no call has reported."""

    def __init__(self, name: str, why: str, *, is_omitted: bool = False) -> None:
        """is_omitted: the settings are why: a call that reports it computes nothing."""
        super().__init__(f"{name}: {why}")
        self.name = name
        self.is_omitted = is_omitted


class ReportedMetrics(dict[str, float]):
    """What calls reported; UnknownMetric says why one is missing."""

    def __init__(
        self,
        metrics: Mapping[str, float],
        omitted: Mapping[str, str],
        on_read: OnRead = ignore_reads,
    ) -> None:
        """omitted: why a metric was not reported."""
        super().__init__(metrics)
        self._omitted = omitted
        self._on_read = on_read

    def __getitem__(self, name: str) -> float:
        value = super().__getitem__(name)
        self._on_read([name])
        return value

    def __missing__(self, name: str) -> float:
        if name in self._omitted:
            raise UnknownMetric(name, self._omitted[name], is_omitted=True)
        raise UnknownMetric(name, f"the calls reported {sorted(self)}")


class Result(Mapping[str, float]):
    """The answer of a call, by rank. As a mapping: its metrics, merged over ranks.

    Looking inside waits for the call.
    """

    def __init__(
        self,
        label: str,
        pending: Pending,
        ranks: tuple[int, ...],
        on_read: OnRead = ignore_reads,
    ) -> None:
        self.label = label
        self.pending = pending
        self.ranks = ranks
        self._on_read = on_read

    def values_by_rank(self) -> list[Any]:
        """What each answering rank returned, in the protocol's order."""
        replies = self.pending.result()
        return [replies[rank].get("value") for rank in self.ranks]

    def metrics(self) -> dict[str, float]:
        """Metrics of the answering ranks, merged."""
        metrics = self._merge()
        self._on_read(metrics)
        return metrics

    def _merge(self) -> dict[str, float]:
        """Return the metrics of the answering ranks, merged; waits for them.

        Does not count them as read by the script (`on_read`). ProtocolError if a rank did not
        return a dict of metrics.
        """
        values = self.values_by_rank()
        if not all(isinstance(value, dict) for value in values):
            raise ProtocolError(
                f"{self.label}: returned {type(values[0]).__name__}, expected a dict of metrics; "
                f"use values_by_rank() for plain values"
            )
        return merge(values)

    def __getitem__(self, key: str) -> float:
        """One metric, merged over ranks. UnknownMetric if the call has not reported it."""
        metrics = self._merge()
        if key not in metrics:
            raise UnknownMetric(key, f"{self.label} reported {sorted(metrics)}")
        self._on_read([key])
        return metrics[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics())

    def __len__(self) -> int:
        return len(self.metrics())

    def __repr__(self) -> str:
        state = "done" if self.pending.done else "pending"
        return f"Result({self.label}, {state})"


def nothing(label: str) -> Result:
    """The answer of an update that was skipped: no metrics."""
    pending = Pending.of_no_call(label, lambda _: None)
    pending.resolve({0: {"value": {}}})
    return Result(label, pending, (0,))
