"""What a dry run wrote down: every order, by rank, what the script read, bytes by edge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spmdflow.config.placement import Pool
from spmdflow.config.resolve import Choice
from spmdflow.data.column import ColumnSpec
from spmdflow.data.row_id import Ids
from spmdflow.mapping.dataflow import Kind
from spmdflow.models.base import EngineWorker
from spmdflow.models.generator import GeneratorWorker
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.register import method_spec
from spmdflow.worker_api.worker import Worker, find_worker_class


@dataclass(frozen=True)
class Problem:
    """What a check finds wrong, and what to change."""

    check: str
    """rows, members, batches, weights, memory, settings or bytes."""
    text: str
    """Got, expected, do; names the edge, the call or the setting."""


COMPUTE = "compute"
TRANSFER = "transfer"
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
    def command(self) -> Mapping[str, Any]:
        """The first rank's command, for facts that are the same on all ranks."""
        return next(iter(self.commands.values()))

    @property
    def operation(self) -> str:
        """call, map, transfer, groups, spawn, ..."""
        return str(self.command["operation"])

    @property
    def model(self) -> str:
        """The part of the label before the first point."""
        return self.label.partition(".")[0]

    @property
    def method(self) -> str:
        """The part of the label behind the first point."""
        return self.label.partition(".")[2]

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

    @cached_property
    def settings(self) -> Any:
        """cfg with the engine that the class binds (Any: the user's dataclass)."""
        if issubclass(self.worker_class, EngineWorker):
            return self.worker_class.bind_engine(self.cfg)
        return self.cfg

    @property
    def generates(self) -> bool:
        """Whether it writes responses, with a generator of its settings."""
        return hasattr(self.worker_class, "generate_sequences") and hasattr(self.cfg, "rollout")

    @property
    def only_generates(self) -> bool:
        """Whether its weights come from another model, or from files."""
        return issubclass(self.worker_class, GeneratorWorker)

    def kind_of(self, method: str) -> Kind:
        """Training, generation or inference."""
        spec = method_spec(self.worker_class, method)
        if spec.minibatches:
            return "train"
        if "responses" in spec.writes:
            return "generate"
        return "infer"


@dataclass(frozen=True)
class Read:
    """A line of the script that read a value, or ran more than once in a step."""

    line: int | None
    what: str
    in_loop: bool
    """Whether a loop inside of the step encloses the line: a run may repeat it more often."""
    waits: bool = True
    """Whether it reads a value; else it is a loop that repeats its calls."""


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
    """Tokens of the orders that have rows, by place."""
    steps: tuple[int, ...]
    """Numbers of the steps that were traced."""
    reads: tuple[Read, ...] = ()
    assumptions: tuple[str, ...] = ()
    """Where each length and value comes from, as sentences."""
    edges_by_step: Mapping[int, BytesByEdge] = field(default_factory=dict)
    """Row bytes of each step, as the controller's own account has them."""
    choices: tuple[Choice, ...] = ()
    """Values that `auto` was resolved to by its calls."""
    batches: Mapping[int, tuple[Ids, Ids]] = field(default_factory=dict)
    """Row ids of the batch that each update is given, and their parents, by place."""

    @property
    def edges(self) -> dict[tuple[int, int], int]:
        """Row bytes by (source, destination) of all steps."""
        return dict(sum(map(Counter, self.edges_by_step.values()), Counter()))

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """Node by rank."""
        return dict(zip(self.world, self.nodes, strict=True))

    @cached_property
    def consumers(self) -> Mapping[int, TracedOrder | None]:
        """The call whose rows each transfer brings, by the transfer's place: the next call."""
        found: dict[int, TracedOrder | None] = {}
        following = None
        for order in reversed(self.orders):
            if order.lane == COMPUTE:
                following = order
            else:
                found[order.place] = following
        return found

    def in_step(self, step: int | None = None) -> tuple[TracedOrder, ...]:
        """Orders of a step; without one, of the last that was traced."""
        number = self.steps[-1] if step is None else step
        return tuple(order for order in self.orders if order.step == number)


def models_of(orders: Sequence[TracedOrder], pools: Mapping[str, Pool]) -> dict[str, TracedModel]:
    """The models that orders spawn; a pool that is not in `pools` is named by its ranks."""
    found = {}
    for plain in (order.command for order in orders if order.operation == "spawn"):
        layout = Layout(**plain["layout"] | {"ranks": tuple(plain["layout"]["ranks"])})
        names = (name for name, pool in pools.items() if set(layout.ranks) <= set(pool.ranks))
        facts = (
            find_worker_class(plain["class"]),
            plain["config"],
            layout,
            next(names, str(layout.ranks)),
        )
        found[plain["name"]] = TracedModel(plain["name"], *facts)
    return found


def links_of(orders: Sequence[TracedOrder]) -> tuple[tuple[str, str], ...]:
    """Pairs that `flow.connect` joins: it opens the weights of a policy, then of its generator."""
    opened = []
    for order in orders:
        if order.label.endswith(".open_weights"):
            opened.append(order.model)
    return tuple(zip(opened[::2], opened[1::2], strict=True))


@dataclass(frozen=True)
class TracedEdge:
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


def row_edges(orders: Sequence[TracedOrder]) -> Iterator[TracedEdge]:
    """Every edge between two ranks, transfer by transfer."""
    for order in (order for order in orders if order.lane == TRANSFER):
        for destination, command in order.commands.items():
            for source, columns, ids, specs, lengths, *_ in command["receives"]:
                if source == destination:
                    continue
                size = sum(
                    int(lengths[name].sum() if name in lengths else len(ids))
                    * ColumnSpec.from_plain(specs[name]).item_bytes
                    for name in columns
                )
                yield TracedEdge(order.place, source, destination, tuple(columns), size)


def routes_of(trace: Trace, edges: Iterable[TracedEdge]) -> list[Route]:
    """Edges by producer and consumer, in the order of the transfers."""
    gathered: dict[tuple[str, str], list[TracedEdge]] = {}
    for edge in edges:
        consumer = trace.consumers[edge.release]
        producer = trace.orders[edge.release].label.partition(" of ")[2]
        gathered.setdefault((producer, consumer.label if consumer else ""), []).append(edge)
    routes = []
    node = trace.node_of
    for pair, found in gathered.items():
        columns = tuple(dict.fromkeys(name for edge in found for name in edge.columns))
        ends = {(edge.source, edge.destination) for edge in found}
        intra = sum(e.num_bytes for e in found if node[e.source] == node[e.destination])
        inter = sum(e.num_bytes for e in found) - intra
        routes.append(Route(*pair, columns, len(ends), intra, inter))
    return routes


def bytes_by_edge(edges: Iterable[TracedEdge]) -> dict[tuple[int, int], int]:
    """Bytes by (source, destination); none of 0."""
    found: Counter[tuple[int, int]] = Counter()
    for edge in edges:
        found[edge.source, edge.destination] += edge.num_bytes
    return dict(+found)
