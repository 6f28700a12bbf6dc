"""What a dry run wrote down: every call, what the script read, bytes by edge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spmdflow.config.placement import Pool
from spmdflow.config.resolve import Choice
from spmdflow.data.column import ColumnSpec
from spmdflow.mapping.dataflow import Kind
from spmdflow.mapping.unequal import Rows
from spmdflow.models.base import EngineWorker
from spmdflow.models.generator import GeneratorWorker
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.call import Call
from spmdflow.runtime.executor import COMPUTE, TRANSFER
from spmdflow.worker_api.register import method_spec
from spmdflow.worker_api.worker import Worker, find_worker_class


@dataclass(frozen=True)
class Problem:
    """What a check finds wrong, and what to change."""

    check: str
    """rows, members, batches, weights, memory, settings or bytes."""
    text: str
    """Got, expected, do; names the edge, the call or the setting."""


BytesByEdge = Mapping[tuple[int, int], int]
"""Bytes by (source, destination)."""


Key = tuple[str, int]
"""Of a call (`Call.key`)."""


def name_of(call: Call) -> str:
    """Return how messages name a call, such as "actor.update_actor (call 7, line 40)".

    A transfer is a "release" instead of a "call". The line is omitted if it is not known.
    """
    line = call.line_number
    where = f", line {line}" if line else ""
    what = "release" if call.lane == TRANSFER else "call"
    return f"{call.label} ({what} {call.number}{where})"


@dataclass(frozen=True)
class RowTokens:
    """Tokens of each row of a call."""

    ids: np.ndarray
    """(n,), ascending."""
    prompts: np.ndarray
    responses: np.ndarray
    prompt_ids: np.ndarray
    """(n,): rows with the same number have the same prompt."""
    num_sequences: int = 1
    """Sequences of each row, such as 2 of a pair. They have a row's tokens in equal parts, and one
    prompt if they have responses."""

    def of(self, ids: np.ndarray) -> Rows:
        """The sequences of the rows with these ids: the first of each row, then the second."""
        at = np.searchsorted(self.ids, ids)
        parts = self.num_sequences
        prompts = np.tile(self.prompts[at] // parts, parts)
        responses = np.tile(self.responses[at] // parts, parts)
        if parts > 1 and not responses.any():
            return Rows(prompts, responses)
        return Rows(prompts, responses, np.tile(self.prompt_ids[at], parts))

    @property
    def rows_per_prompt(self) -> int:
        """Sequences that share a prompt, the mean over all prompts, rounded up; 1 without rows."""
        if self.num_sequences > 1 and not self.responses.any():
            return 1
        different = len(np.unique(self.prompt_ids))
        return max(1, -(-len(self.ids) * self.num_sequences // max(different, 1)))


@dataclass(frozen=True)
class Tokens:
    """Rows of a call, each counted once, and the mean of their tokens."""

    num_rows: int
    prompts: float
    responses: float
    by_row: RowTokens | None = field(default=None, compare=False, repr=False)
    """None: not all are known."""


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
        """Return train for a method with mini-batches, generate for one that writes responses.

        Any other method is infer.
        """
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
    calls: tuple[Call, ...]
    """Transfers too, each before the call that reads its rows."""
    tokens: Mapping[Key, Tokens]
    """Of the calls that have rows."""
    steps: tuple[int, ...]
    """Numbers of the steps that were traced."""
    reads: tuple[Read, ...] = ()
    assumptions: tuple[str, ...] = ()
    """Where each length and value comes from, as sentences."""
    edges_by_step: Mapping[int, BytesByEdge] = field(default_factory=dict)
    """Row bytes of each step, as the controller's own account has them."""
    choices: tuple[Choice, ...] = ()
    """Values that `auto` was resolved to by its calls."""

    @property
    def edges(self) -> dict[tuple[int, int], int]:
        """Row bytes by (source, destination) of all steps."""
        return dict(sum(map(Counter, self.edges_by_step.values()), Counter()))

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """Node by rank."""
        return dict(zip(self.world, self.nodes, strict=True))

    @cached_property
    def by_key(self) -> Mapping[Key, Call]:
        """Every call by its key."""
        return {call.key: call for call in self.calls}

    @cached_property
    def consumers(self) -> Mapping[Key, Call | None]:
        """The compute call that reads the rows of each transfer, by the transfer's key.

        It is the next compute call in `calls`; None if there is none.
        """
        consumers: dict[Key, Call | None] = {}
        following = None
        for call in reversed(self.calls):
            if call.lane == COMPUTE:
                following = call
            else:
                consumers[call.key] = following
        return consumers

    def in_step(self, step: int | None = None) -> tuple[Call, ...]:
        """Calls of a step; without one, of the last that was traced."""
        number = self.steps[-1] if step is None else step
        return tuple(call for call in self.calls if call.step == number)


def models_of(calls: Sequence[Call], pools: Mapping[str, Pool]) -> dict[str, TracedModel]:
    """Return the models that these calls spawn, by name.

    The pool of a model is the first of `pools` that has all of its ranks. If there is none, the
    pool is named by the ranks, such as "(0, 1)".
    """
    models = {}
    for call in calls:
        if call.operation != "spawn":
            continue
        plain = call.command
        layout = Layout(**plain["layout"] | {"ranks": tuple(plain["layout"]["ranks"])})
        pool_name = str(layout.ranks)
        for name, pool in pools.items():
            if set(layout.ranks) <= set(pool.ranks):
                pool_name = name
                break
        models[plain["name"]] = TracedModel(
            plain["name"], find_worker_class(plain["class"]), plain["config"], layout, pool_name
        )
    return models


def links_of(calls: Sequence[Call]) -> tuple[tuple[str, str], ...]:
    """Return the (policy, generator) pairs that `flow.connect` joined, in the order of the calls.

    It opens the weights of a policy, then of its generator, so every two calls named open_weights
    are a pair.
    """
    opened = []
    for call in calls:
        if call.label.endswith(".open_weights"):
            opened.append(call.model)
    return tuple(zip(opened[::2], opened[1::2], strict=True))


@dataclass(frozen=True)
class TracedEdge:
    """Rows of one transfer between two ranks."""

    release: Key
    """The transfer's."""
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


def row_edges(calls: Sequence[Call]) -> Iterator[TracedEdge]:
    """Yield the rows and bytes between each two ranks, transfer by transfer.

    Rows that stay on their rank are omitted. The bytes of a column are its items (one for each row
    if it is dense) times its bytes per item.
    """
    for call in calls:
        if call.lane != TRANSFER:
            continue
        for destination, command in call.commands.items():
            for source, columns, ids, specs, lengths, *_ in command["receives"]:
                if source == destination:
                    continue
                size = 0
                for name in columns:
                    items = lengths[name].sum() if name in lengths else len(ids)
                    size += int(items) * ColumnSpec.from_plain(specs[name]).item_bytes
                yield TracedEdge(call.key, source, destination, tuple(columns), size)


def routes_of(trace: Trace, edges: Iterable[TracedEdge]) -> list[Route]:
    """Return the sums of all edges from one call to another, in the order of the first transfer.

    Bytes inside a node and between nodes are counted apart. A pair of ranks counts once in
    num_edges.
    """
    edges_by_pair: dict[tuple[str, str], list[TracedEdge]] = {}
    for edge in edges:
        consumer = trace.consumers[edge.release]
        producer = trace.by_key[edge.release].label.partition(" of ")[2]
        pair = (producer, consumer.label if consumer else "")
        edges_by_pair.setdefault(pair, []).append(edge)
    routes = []
    node = trace.node_of
    for pair, of_pair in edges_by_pair.items():
        columns = tuple(dict.fromkeys(name for edge in of_pair for name in edge.columns))
        ends = {(edge.source, edge.destination) for edge in of_pair}
        intra = sum(e.num_bytes for e in of_pair if node[e.source] == node[e.destination])
        inter = sum(e.num_bytes for e in of_pair) - intra
        routes.append(Route(*pair, columns, len(ends), intra, inter))
    return routes


def bytes_by_edge(edges: Iterable[TracedEdge]) -> dict[tuple[int, int], int]:
    """Return the total bytes by (source, destination), without pairs of 0 bytes."""
    sizes: Counter[tuple[int, int]] = Counter()
    for edge in edges:
        sizes[edge.source, edge.destination] += edge.num_bytes
    return dict(+sizes)
