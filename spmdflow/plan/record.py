"""What a dry run wrote down: every order, by rank, what the script read, bytes by edge. Facts only.

Also `Problem`, what a check says is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdflow.config.placement import Pool
from spmdflow.data.column import ColumnSpec
from spmdflow.data.row_id import Ids
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.message import find
from spmdflow.transfer.worker import Worker


@dataclass(frozen=True)
class Problem:
    """A fault: what is wrong, and which knob to turn."""

    check: str
    """Which proof failed: rows, members, batches, weights, memory, settings, bytes."""
    text: str
    """Got, expected, do; names the edge, the call or the setting."""


COMPUTE, TRANSFER = "compute", "transfer"
BytesByEdge = Mapping[tuple[int, int], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True)
class TracedOrder:
    """One order: a command for each of some ranks, as the controller made it."""

    place: int
    """Position in the trace, over both lanes, from 0."""
    number: int
    """Call number (compute lane) or release number (transfer lane)."""
    lane: str
    """compute or transfer."""
    label: str
    """Such as "actor.generate_sequences"; of a transfer "transfer 3 of <producer>"."""
    step: int
    """Step of the script; 0 before the first."""
    phase: str
    """train or eval."""
    line: int | None
    """Line of the script that led to it."""
    commands: Mapping[int, Mapping[str, Any]]
    """By rank: plain data, as it would travel."""

    @property
    def operation(self) -> str:
        """call, map, transfer, groups, spawn, ..."""
        command = next(iter(self.commands.values()))
        return str(command["operation"])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return tuple(sorted(self.commands))

    @property
    def name(self) -> str:
        """Label, number and lane, as messages name it."""
        where = f", line {self.line}" if self.line else ""
        return (
            f"{self.label} ({'call' if self.lane == COMPUTE else 'release'} {self.number}{where})"
        )


@dataclass(frozen=True)
class Tokens:
    """Rows of a call, each counted once, and the mean of their tokens."""

    num_rows: int
    prompts: float
    responses: float


@dataclass(frozen=True)
class TracedModel:
    """A worker group that the script spawned."""

    name: str
    worker_class: type[Worker]
    cfg: Any
    layout: Layout
    pool: str


@dataclass(frozen=True)
class Read:
    """A place of the script that looked at a value, or ran more than once in a step."""

    line: int | None
    what: str
    in_loop: bool
    """Whether a loop inside of the step encloses the line: a run may go round more often."""
    waits: bool = True
    """Whether data is looked at there; else it is a loop that only repeats its calls."""


@dataclass(frozen=True)
class Trace:
    """Everything that a dry run knows."""

    world: tuple[int, ...]
    nodes: tuple[int, ...]
    """Node of each rank, aligned with world."""
    pools: Mapping[str, Pool]
    models: Mapping[str, TracedModel]
    links: tuple[tuple[str, str], ...]
    """Pairs of models that `flow.connect` joined: policy, generator."""
    orders: tuple[TracedOrder, ...]
    tokens: Mapping[int, Tokens]
    """Of orders that have rows, by place."""
    steps: tuple[int, ...]
    """Numbers of the steps that were traced."""
    reads: tuple[Read, ...] = ()
    assumptions: tuple[str, ...] = ()
    """How each length and value was come by, as sentences."""
    edges_by_step: Mapping[int, Mapping[tuple[int, int], int]] = field(default_factory=dict)
    """Row bytes by (source, destination) of each step, as the controller's own account has them."""
    batches: Mapping[int, tuple[Ids, Ids]] = field(default_factory=dict)
    """Row ids of the batch that each update is given, and their parents, by place."""

    @property
    def edges(self) -> dict[tuple[int, int], int]:
        """Row bytes by (source, destination) of all steps."""
        found: dict[tuple[int, int], int] = {}
        for edges in self.edges_by_step.values():
            for edge, size in edges.items():
                found[edge] = found.get(edge, 0) + size
        return found

    def in_step(self, step: int | None = None) -> tuple[TracedOrder, ...]:
        """Orders of a step; without one, of the last that was traced."""
        number = self.steps[-1] if step is None else step
        return tuple(order for order in self.orders if order.step == number)


def models_of(orders: Sequence[TracedOrder], pools: Mapping[str, Pool]) -> dict[str, TracedModel]:
    """The models that orders spawn; a pool of others than `pools` is named by its ranks."""
    found = {}
    for plain in (next(iter(o.commands.values())) for o in orders if o.operation == "spawn"):
        layout = Layout(**plain["layout"] | {"ranks": tuple(plain["layout"]["ranks"])})
        names = (name for name, pool in pools.items() if set(layout.ranks) <= set(pool.ranks))
        facts = find(plain["class"]), plain["config"], layout, next(names, str(layout.ranks))
        found[plain["name"]] = TracedModel(plain["name"], *facts)
    return found


def links_of(orders: Sequence[TracedOrder]) -> tuple[tuple[str, str], ...]:
    """Pairs that `flow.connect` joins: it opens the weights of a policy, then of its generator."""
    opened = [o.label.partition(".")[0] for o in orders if o.label.endswith(".open_weights")]
    return tuple(zip(opened[::2], opened[1::2], strict=True))


@dataclass(frozen=True)
class RowEdge:
    """Rows of one transfer between two ranks."""

    release: int
    """Place of the transfer in the trace."""
    source: int
    destination: int
    columns: tuple[str, ...]
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


def row_edges(orders: Sequence[TracedOrder]) -> Iterator[RowEdge]:
    """Every edge between two ranks, transfer by transfer."""
    for order in orders:
        if order.lane != TRANSFER:
            continue
        for destination, command in order.commands.items():
            for edge in command["receives"]:
                source, columns = edge[:2]
                if source != destination:
                    size = received_bytes(edge)
                    yield RowEdge(order.place, source, destination, tuple(columns), size)


def consumer_of(trace: Trace, release: TracedOrder) -> TracedOrder | None:
    """The call whose rows a transfer brings: the first one after it in the compute lane."""
    later = trace.orders[release.place + 1 :]
    return next((order for order in later if order.lane == COMPUTE), None)


def routes_of(trace: Trace, edges: Iterable[RowEdge]) -> list[Route]:
    """Edges by producer and consumer, in the order of the transfers."""
    labels: dict[int, tuple[str, str]] = {}
    gathered: dict[tuple[str, str], list[RowEdge]] = {}
    for edge in edges:
        if edge.release not in labels:
            order = trace.orders[edge.release]
            consumer = consumer_of(trace, order)
            producer = order.label.partition(" of ")[2]
            labels[edge.release] = producer, consumer.label if consumer else ""
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


def received_bytes(edge: list[Any]) -> int:
    """Row bytes of one entry of a transfer's `receives`."""
    _, columns, ids, specs, lengths, *_ = edge
    total = 0
    for name in columns:
        items = int(lengths[name].sum()) if name in lengths else len(ids)
        total += items * ColumnSpec.from_plain(specs[name]).item_bytes
    return total
