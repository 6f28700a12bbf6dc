"""Row bytes of a plan: by edge, and by producer and consumer. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spmdflow.plan.answers import received_bytes
from spmdflow.plan.record import COMPUTE, TRANSFER, Trace, TracedOrder

EdgeBytes = Mapping[tuple[int, int], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True)
class RowEdge:
    """Rows of one transfer between two ranks."""

    release: int
    """Place of the transfer in the trace."""
    source: int
    destination: int
    columns: tuple[str, ...]
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class Route:
    """All edges from one call to another."""

    producer: str
    consumer: str
    columns: tuple[str, ...]
    num_edges: int
    intra_bytes: int
    """Between ranks of one node."""
    inter_bytes: int
    """Between nodes."""

    @property
    def num_bytes(self) -> int:
        """Both."""
        return self.intra_bytes + self.inter_bytes


def row_edges(orders: Sequence[TracedOrder]) -> Iterator[RowEdge]:
    """Every edge between two ranks, transfer by transfer."""
    for order in orders:
        if order.lane != TRANSFER:
            continue
        for destination, command in order.commands.items():
            for edge in command["receives"]:
                source, columns, ids = edge[:3]
                if source != destination:
                    size = received_bytes(edge)
                    names = tuple(columns)
                    yield RowEdge(order.place, source, destination, names, len(ids), size)


def consumer_of(trace: Trace, release: TracedOrder) -> TracedOrder | None:
    """The call whose rows a transfer brings: the first one after it in the compute lane."""
    later = trace.orders[release.place + 1 :]
    return next((order for order in later if order.lane == COMPUTE), None)


def producer_label(release: TracedOrder) -> str:
    """The call that made the rows of a transfer."""
    return release.label.partition(" of ")[2]


def routes_of(trace: Trace, edges: Iterable[RowEdge]) -> list[Route]:
    """Edges by producer and consumer, in the order of the transfers."""
    labels: dict[int, tuple[str, str]] = {}
    gathered: dict[tuple[str, str], list[RowEdge]] = {}
    for edge in edges:
        if edge.release not in labels:
            order = trace.orders[edge.release]
            consumer = consumer_of(trace, order)
            labels[edge.release] = producer_label(order), consumer.label if consumer else ""
        gathered.setdefault(labels[edge.release], []).append(edge)
    return [_route(trace, *pair, found) for pair, found in gathered.items()]


def _route(trace: Trace, producer: str, consumer: str, edges: Sequence[RowEdge]) -> Route:
    node = dict(zip(trace.world, trace.nodes, strict=True))
    inside = sum(e.num_bytes for e in edges if node[e.source] == node[e.destination])
    total = sum(e.num_bytes for e in edges)
    columns = tuple(dict.fromkeys(name for edge in edges for name in edge.columns))
    pairs = {(edge.source, edge.destination) for edge in edges}
    return Route(producer, consumer, columns, len(pairs), inside, total - inside)


def bytes_by_edge(edges: Iterable[RowEdge]) -> dict[tuple[int, int], int]:
    """Bytes by (source, destination); none of 0."""
    found: dict[tuple[int, int], int] = {}
    for edge in edges:
        if edge.num_bytes:
            pair = edge.source, edge.destination
            found[pair] = found.get(pair, 0) + edge.num_bytes
    return found
