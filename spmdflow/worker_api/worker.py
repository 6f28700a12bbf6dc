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
from torch import Tensor

from spmdflow.message import find
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.metric import Metric

Load = TypeVar("Load", bound=Callable[..., None])


def any_layout(load_state: Load) -> Load:
    """Mark a `load_state` that restores what other ranks, more or fewer, have saved.

    `checkpoint.StateFiles` reads any box of what their `checkpoint.write_state` wrote.
    """
    load_state.any_layout = True  # type: ignore[attr-defined]
    return load_state


def loads_any_layout(worker_class: type[Worker]) -> bool:
    """Whether its `load_state` is marked with `any_layout`."""
    return getattr(worker_class.load_state, "any_layout", False)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's share of this rank."""

    index: Tensor
    """(rows,) int64: positions in the batch that the method receives; may be empty."""
    num_micro_batches: int
    """Forward passes that every rank of the dp group makes: the most that one of them needs."""


@dataclass(frozen=True)
class CallInfo:
    """Facts of the call that is running."""

    number: int
    step: int
    row_ids: Tensor
    """(B,) int64: ids of the rows received, unique in a run; seeds derive from them."""
    num_micro_batches: int = 1
    """Forward passes that every rank of the dp group makes."""
    mini_batches: tuple[MiniBatch, ...] = ()
    generation: Tensor | None = None
    """(B,) int64: calls of this step that drew for each row before this one; None: the method is
    not marked with draws=True."""
    total_steps: int = 0
    """Steps that the script takes (flow.steps), for updates; 0: outside of its steps."""


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker lives."""

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
    """Limit for what a method waits for outside of the run, such as a server. The limit of the
    method itself is the controller's to enforce (runtime/limit.py)."""
    run_dir: Path | None = None
    nodes: Sequence[int] = ()
    """Node of every rank of the run, by global rank; empty: all share one."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    """The workers that this rank has already, by name."""

    def node_of(self, rank: int) -> int:
        """The node of a global rank, as a number."""
        if self.nodes:
            return self.nodes[rank]
        return 0


class Worker:
    """Base of every role: `self.cfg`, `self.context`, and during a call `self.call`."""

    role = ""
    """Name under which placements know this class, such as "actor"."""
    evaluation: ClassVar[str | None] = None
    """Method that evaluates held-out rows by itself: `method(batch, prefix="eval")`."""
    evaluation_columns: ClassVar[str | None] = None
    """Method that writes columns which another class's `evaluation` reads: `method(batch)`."""

    def __init__(self, cfg: Any, context: WorkerContext) -> None:
        self.cfg = cfg
        self.context = context
        self.call = CallInfo(0, 0, torch.zeros(0, dtype=torch.int64))
        self.begun: Future[Any] | None = None
        """During a call: the future of its early method; None if it has none."""
        self._metrics: dict[str, Metric] = {}

    @classmethod
    def layout_of(cls, cfg: Any, ranks: tuple[int, ...]) -> Layout:
        """The layout of this worker on a pool; plain data parallelism unless overridden."""
        return Layout.data_parallel(ranks)

    @classmethod
    def needed_groups(cls, cfg: Any, layout: Layout) -> list[tuple[int, ...]]:
        """Rank tuples of the compute-lane process groups this worker uses."""
        return [layout.ranks]

    @classmethod
    def host_groups(cls, cfg: Any, layout: Layout) -> list[tuple[int, ...]]:
        """Those of `needed_groups` that also get a gloo group, for data in host memory such as
        Python objects."""
        return cls.needed_groups(cfg, layout)

    def report(self, metrics: Mapping[str, Metric]) -> None:
        """Send metrics along with the answer of the running call."""
        self._metrics.update(metrics)

    def take_metrics(self) -> dict[str, Metric]:
        """Metrics reported since the last call; empties them (used by the executor)."""
        taken = self._metrics
        self._metrics = {}
        return taken

    @property
    def frozen_folder(self) -> Path | None:
        """Folder of this worker's weights that are never trained; None: it has none.

        Such weights are not saved: a resumed run reads the folder again, whose content must be
        what it was.
        """
        return None

    def make_room(self, *, trains: bool) -> None:
        """Called before another worker of this rank: free device memory that can be reallocated.

        trains: that call trains its model.
        """

    def halt(self, turn: int) -> None:
        """End the running call of this turn, or keep it from beginning (transfer lane).

        Only for methods that go on until they are told to end; others take no notice.
        """

    def save_state(self, folder: Path) -> Callable[[], None] | None:
        """Write this rank's state into folder; stateless workers write nothing.

        A function that it returns is called in a thread while training goes on: it writes what
        has been copied before.
        """

    def export_state(self, saved: Path, folder: Path, wait: Callable[[list[Path]], None]) -> None:
        """Write more files into folder, out of what all ranks write into `saved`.

        Called in a thread while training goes on, after this rank has written its state.
        wait(paths) returns when these files are there.
        """

    @any_layout
    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit.

        A class with one of its own resumes on the ranks and sizes that saved, and on no others,
        unless that one is marked too (`any_layout`).
        """

    def close(self) -> None:
        """Free engines and processes; called once at the end of a run."""


def find_worker_class(name: str) -> type[Worker]:
    """The worker class of that name in a command; ProtocolError if it is none."""

    def is_worker(thing: object) -> bool:
        return isinstance(thing, type) and issubclass(thing, Worker)

    worker_class: type[Worker] = find(name, is_worker, "a subclass of Worker")
    return worker_class
