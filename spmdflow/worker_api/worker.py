"""`Worker`, the base class of every role, and what it knows of the run and of the running call.

A worker is one rank's part of a model. `spawn` creates it once. It then runs its registered methods
in the order of the script's calls. It does not know sockets or other models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from spmdflow.message import find
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.renamed import warn_renamed
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.metric import Metric

Load = TypeVar("Load", bound=Callable[..., None])


def any_layout(load_state: Load) -> Load:
    """Marks a `load_state` that also restores what more or fewer ranks have saved.

    `checkpoint.StateFiles` reads any box of what `checkpoint.write_state` wrote on those ranks.
    """
    load_state.any_layout = True  # type: ignore[attr-defined]
    return load_state


def loads_any_layout(worker_class: type[Worker]) -> bool:
    """Whether its `load_state` is marked with `any_layout`."""
    return getattr(worker_class.load_state, "any_layout", False)


@dataclass(frozen=True)
class WorkerContext:
    """The rank, the pool and the run that a worker belongs to."""

    name: str
    """Name of the worker group, such as "actor"."""
    layout: Layout
    rank: int
    """Global rank."""
    groups: GroupTable
    device: torch.device
    seed: int
    total_steps: int = 0
    call_seconds: float = 3600.0
    """Time limit for what a method waits for outside of the run, such as a server. The controller
    enforces the limit of the method itself (failure/limit.py)."""
    run_dir: Path | None = None
    nodes: Sequence[int] = ()
    """The node of every rank of the run, by global rank. Empty: all ranks are on one node."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    """The workers that this rank already has, by name."""

    def node_of(self, rank: int) -> int:
        """The node of a global rank, as a number."""
        if self.nodes:
            return self.nodes[rank]
        return 0

    @property
    def rank_on_node(self) -> int:
        """Number of this rank among those of its node, from 0."""
        neighbours = [r for r in range(self.rank) if self.node_of(r) == self.node_of(self.rank)]
        return len(neighbours)


class Worker:
    """Base class of every role. Has `self.cfg`, `self.context` and, during a call, `self.call`."""

    role = ""
    """The name of this class in placements, such as "actor"."""
    evaluation: ClassVar[str | None] = None
    """Name of a method that evaluates held-out rows on its own: `method(batch, prefix="eval")`."""
    evaluation_columns: ClassVar[str | None] = None
    """Name of a method that writes columns which another class's `evaluation` reads:
    `method(batch)`."""

    def __init__(self, cfg: Any, context: WorkerContext) -> None:
        self.cfg = cfg
        self.context = context
        self.call = Command(0)
        self.early_result: Future[Any] | None = None
        """During a call: the result of its early method, as a future. None if it has none."""
        self._metrics: dict[str, Metric] = {}

    @property
    def begun(self) -> Future[Any] | None:
        """The old name of `early_result`, until 0.3.0; warns."""
        warn_renamed("Worker.begun", "Worker.early_result")
        return self.early_result

    @begun.setter
    def begun(self, result: Future[Any] | None) -> None:
        warn_renamed("Worker.begun", "Worker.early_result")
        self.early_result = result

    @classmethod
    def layout_of(cls, cfg: Any, ranks: tuple[int, ...]) -> Layout:
        """The layout of this worker on a pool. Plain data parallelism unless overridden."""
        return Layout.data_parallel(ranks)

    @classmethod
    def needed_groups(cls, cfg: Any, layout: Layout) -> list[tuple[int, ...]]:
        """The process groups that this worker uses in the compute lane, as tuples of ranks."""
        return [layout.ranks]

    @classmethod
    def host_groups(cls, cfg: Any, layout: Layout) -> list[tuple[int, ...]]:
        """Which of `needed_groups` also get a gloo group, for data in host memory such as Python
        objects."""
        return cls.needed_groups(cfg, layout)

    def report(self, metrics: Mapping[str, Metric]) -> None:
        """Sends metrics along with the answer of the running call."""
        self._metrics.update(metrics)

    def take_metrics(self) -> dict[str, Metric]:
        """Returns the metrics reported since the last call, and resets them (for the executor)."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    @property
    def frozen_folder(self) -> Path | None:
        """Folder of the weights of this worker that are never trained. None: it has none.

        Such weights are not saved. A resumed run reads the folder again, so its content must not
        change.
        """
        return None

    def make_room(self, *, trains: bool) -> None:
        """Frees device memory that can be reallocated. Called before a call of another worker of
        this rank.

        trains: that call trains its model.
        """

    def halt(self, turn: int) -> None:
        """Ends the running call of this turn, or prevents it from starting. Runs in the transfer
        lane.

        Only for methods that run until they are halted. Others ignore it.
        """

    def save_state(self, folder: Path) -> Callable[[], None] | None:
        """Writes this rank's state into folder. Workers without state write nothing.

        It may copy the state and return a function that writes the copy. That function is called
        in a thread while training continues.
        """

    def export_state(self, saved: Path, folder: Path, wait: Callable[[list[Path]], None]) -> None:
        """Writes more files into folder, from the files that all ranks write into `saved`.

        Called in a thread while training continues, after this rank has written its state.
        wait(paths) returns when these files exist.
        """

    @any_layout
    def load_state(self, folder: Path) -> None:
        """Restores what `save_state` wrote, bit for bit.

        A class that overrides it can be resumed only on the ranks and sizes that saved, unless its
        own `load_state` is also marked with `any_layout`.
        """

    def close(self) -> None:
        """Frees engines and processes. Called once, at the end of a run."""


def find_worker_class(name: str) -> type[Worker]:
    """Return the worker class with the name that a command has, "module:class".

    ProtocolError if this rank has not imported its module, or if it is no subclass of `Worker`.
    """

    def is_worker(thing: object) -> bool:
        return isinstance(thing, type) and issubclass(thing, Worker)

    worker_class: type[Worker] = find(name, is_worker, "a subclass of Worker")
    return worker_class
