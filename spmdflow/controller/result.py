"""Results: what the controller knows of the rows that one call made. No values, only integers.

`held` is the script thread's account of which rank has, or is about to have, which rows; it is
exact because protocols are pure functions and calls are numbered. `facts` (dtype, row shape,
lengths) are known once the producer has replied; only the io thread writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmdflow.data.column import ColumnSpec
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.runtime.order import Pending
from spmdflow.tracking.metric import merge


@dataclass(frozen=True)
class ColumnFacts:
    """Dtype, row shape and lengths of one column, over all its rows."""

    spec: ColumnSpec
    ids: Ids
    """Ascending."""
    lengths: np.ndarray | None
    """Items of each row (ragged, text), aligned with ids."""

    def lengths_of(self, ids: Ids) -> np.ndarray:
        """Items of the rows `ids`; dense rows count one item each."""
        if self.lengths is None:
            return np.ones(len(ids), dtype=np.int64)
        return self.lengths[np.searchsorted(self.ids, ids)]

    def num_bytes(self, ids: Ids) -> int:
        """Bytes of the rows `ids`."""
        return int(self.lengths_of(ids).sum()) * self.spec.item_bytes


@dataclass(eq=False)
class RowResult:
    """Rows made by call `number`, and who holds them."""

    number: int
    label: str
    """Who made it, such as "actor.generate_sequences"."""
    ranks: tuple[int, ...]
    """Every rank that ran the call, with or without rows."""
    columns: tuple[str, ...]
    answer: Mapping[int, Ids]
    """Rows by answering rank: one holder of each row, in order."""
    held: dict[str, dict[int, Ids]]
    """Rows by column and rank, transfers under way included; columns with the same holders share
    one mapping, which is replaced and never changed."""
    on_free: Callable[[int], None]
    facts: dict[str, ColumnFacts] = field(default_factory=dict)
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    """What the answering ranks reported of the call."""
    done: bool = False
    waiting: list[Any] = field(default_factory=list)
    """Transfers that wait for the producer (io thread)."""

    def learn(self, replies: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what the ranks said of the rows (io thread)."""
        self.facts = facts_of(replies, self.answer)
        self.metrics = [replies[rank].get("metrics", {}) for rank in self.answer]

    def __del__(self) -> None:
        self.on_free(self.number)


@dataclass(eq=False)
class SourceRows:
    """Rows of a data file: every rank can read them, so they never travel."""

    number: int
    source: str
    columns: tuple[str, ...]
    ids: Ids
    rows: np.ndarray
    """Row number in the file of each id, aligned."""
    on_free: Callable[[int], None]
    token_lengths: np.ndarray | None = None
    """Prompt tokens of each id, aligned; none: not known."""

    def __del__(self) -> None:
        self.on_free(self.number)

    def rows_of(self, ids: Ids) -> np.ndarray:
        """Row numbers of `ids`."""
        return self.rows[self._places(ids)]

    def lengths_of(self, ids: Ids) -> np.ndarray | None:
        """Prompt tokens of `ids`; None: not known."""
        return None if self.token_lengths is None else self.token_lengths[self._places(ids)]

    def _places(self, ids: Ids) -> np.ndarray:
        order = np.argsort(self.ids, kind="stable")
        return order[np.searchsorted(self.ids, ids, sorter=order)]


def facts_of(
    replies: Mapping[int, Mapping[str, Any]], answer: Mapping[int, Ids]
) -> dict[str, ColumnFacts]:
    """Join what the answering ranks said of their columns."""
    said = {rank: replies[rank]["columns"] for rank, ids in answer.items() if len(ids)}
    if not said:
        said = {rank: replies[rank]["columns"] for rank in list(answer)[:1]}
    names = next(iter(said.values())).keys()
    return {name: _facts_of(name, said, answer) for name in names}


def _facts_of(
    name: str, said: Mapping[int, Mapping[str, Any]], answer: Mapping[int, Ids]
) -> ColumnFacts:
    specs = {rank: ColumnSpec.from_plain(columns[name][0]) for rank, columns in said.items()}
    first_rank, first = next(iter(specs.items()))
    for rank, spec in specs.items():
        assert spec == first, f"column {name}: rank {rank} made {spec}, rank {first_rank} {first}"
    ids = np.concatenate([answer[rank] for rank in said])
    order = np.argsort(ids, kind="stable")
    if first.kind == "dense":
        return ColumnFacts(first, ids[order], None)
    lengths = np.concatenate([said[rank][name][1] for rank in said])
    return ColumnFacts(first, ids[order], lengths[order])


@dataclass(frozen=True)
class CallRecord:
    """One submitted call of the running step."""

    number: int
    label: str
    phase: str
    """train or eval: which metrics its reports belong to."""
    pending: Pending
    answering: tuple[int, ...] = ()
    """Ranks whose reported metrics count."""
    lane: str = "compute"

    @property
    def stage(self) -> str:
        """The method of "group.method"; empty for fetches and transfers."""
        return self.label.partition(".")[2]


class Result(Mapping[str, float]):
    """The answer of a call, by rank. As a mapping: its metrics, merged over ranks.

    Looking inside waits for the call.
    """

    def __init__(self, label: str, pending: Pending, ranks: tuple[int, ...]) -> None:
        self.label, self.pending, self.ranks = label, pending, ranks

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


def ascending(ids: Ids) -> Ids:
    """ids in order, each once."""
    return ids if (ids[1:] > ids[:-1]).all() else np.unique(ids)


def input_of(
    result: RowResult | SourceRows, columns: Mapping[str, str], ids: Ids
) -> dict[str, Any]:
    """One result's part of the inputs; columns: stored names by the names that the call sees."""
    stored = list(dict.fromkeys(columns.values()))
    plain: dict[str, Any] = {"result": result.number, "columns": stored, "ids": ids}
    if stored != list(columns):
        plain["seen"] = list(columns.items())
    if isinstance(result, SourceRows):
        plain |= {"source": result.source, "rows": result.rows_of(ids)}
    return plain


def source_lengths(result: SourceRows, ids: Ids, name: str) -> np.ndarray:
    """Prompt tokens of each row; a file's responses are empty, its other columns not measured."""
    if name == "responses":
        return np.zeros(len(ids), dtype=np.int64)
    lengths = result.lengths_of(ids) if name == "prompts" else None
    if lengths is None:
        raise ColumnError(
            f"column {name!r} of {result.source}: its lengths are not known on the controller, "
            f"expected prompts; fetch the column instead"
        )
    return lengths
