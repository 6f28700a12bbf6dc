"""What a dry run wrote down: every order, by rank, and what the script read. Facts only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdflow.config.placement import Pool
from spmdflow.data.row_id import Ids
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.worker import Worker

COMPUTE, TRANSFER = "compute", "transfer"


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

    @property
    def role(self) -> str:
        """Name under which placements know it."""
        return str(getattr(self.worker_class, "role", "")) or self.name


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
    edges: Mapping[tuple[int, int], int]
    """Row bytes by (source, destination) as the controller's own account has them."""
    steps: tuple[int, ...]
    """Numbers of the steps that were traced."""
    reads: tuple[Read, ...] = ()
    assumptions: tuple[str, ...] = ()
    """How each length and value was come by, as sentences."""
    edges_by_step: Mapping[int, Mapping[tuple[int, int], int]] = field(default_factory=dict)
    """The account of edges, of each step alone."""
    batches: Mapping[int, tuple[Ids, Ids]] = field(default_factory=dict)
    """Row ids of the batch that each update is given, and their parents, by place."""

    def node_of(self, rank: int) -> int:
        """The machine that a rank would run on."""
        return self.nodes[self.world.index(rank)]

    def in_step(self, step: int | None = None) -> tuple[TracedOrder, ...]:
        """Orders of a step; without one, of the last that was traced."""
        number = self.steps[-1] if step is None else step
        return tuple(order for order in self.orders if order.step == number)

    def sequence(self, rank: int, lane: str) -> list[int]:
        """Places of the orders that a rank runs in a lane, in their order."""
        return [o.place for o in self.orders if o.lane == lane and rank in o.commands]
