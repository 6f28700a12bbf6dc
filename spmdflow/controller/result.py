"""Lazy answers of calls that return no rows: metrics or plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmdflow.errors import ProtocolError
from spmdflow.runtime.order import Pending
from spmdflow.tracking.metric import merge


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
        self._label, self._pending, self._ranks = label, pending, ranks

    def values_by_rank(self) -> list[Any]:
        """What each answering rank returned, in the protocol's order."""
        replies = self._pending.result()
        return [replies[rank].get("value") for rank in self._ranks]

    def metrics(self) -> dict[str, float]:
        """Metrics of the answering ranks, merged."""
        values = self.values_by_rank()
        if not all(isinstance(value, dict) for value in values):
            raise ProtocolError(
                f"{self._label}: returned {type(values[0]).__name__}, expected a dict of metrics; "
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
        state = "done" if self._pending.done else "pending"
        return f"Result({self._label}, {state})"
