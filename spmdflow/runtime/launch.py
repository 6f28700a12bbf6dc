"""Starts a run on the ranks of a process group: groups, session, the controller's thread.

`begin` is called by every rank of the default process group. Ranks outside `ranks` only help
to make process groups (every rank of the world must call `new_group`) and hear of the end
(runtime/launch.py). What the host program's groups were, they are afterwards, and nothing of
the run is left: no group, no thread, no descriptor.

Ranks of a host program that are not in the run: `new_group` must be called by every rank of the
world. So the run's first rank writes into the world's store which groups its ranks make, then that
there are no more, and at last how the run ended. The others follow. Waiting for the end costs a
look into the store per second, has no limit (runs are long), and lets signals through.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from spmdflow.checkpoint.run_dir import path_of
from spmdflow.errors import ConfigError, RunFailed, SpmdflowError
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.inproc import InprocTransport, stop_on_sigterm
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.runtime.order import Transport
from spmdflow.runtime.session import Member, SessionSettings, run_session
from spmdflow.transfer.lane import CountedTransport

logger = logging.getLogger(__name__)

Control = Callable[[Transport, tuple[int, ...], bool], int]
"""Runs in the controller's thread: control(transport, ranks of the run, whether others help to make
its groups) -> exit status."""


@dataclass(frozen=True)
class Surroundings:
    """What `spmdflow.run` knows of its process."""

    secret: str | None = None
    """SPMDFLOW_SECRET."""
    launcher: int | None = None
    """Pid of torchrun's agent, with which this process ends; None in a host program."""
    owns_process: bool = False
    """A failure may end the process at once; in a host program only if a process is lost."""


def begin(
    control: Control,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    surroundings: Surroundings | None = None,
) -> Outcome:
    """Run `control` on the first of `ranks` (default: all), which carry out its orders.

    Collective over the default process group, which must exist; ranks outside of the run get their
    `Outcome` once its groups are made. ConfigError if ranks are no ascending ranks of the group.
    Other failures raise RunFailed; they end the processes with status 1 instead if these belong to
    the run, or if one of them is lost.
    """
    world = tuple(range(dist.get_world_size()))
    ranks = world if ranks is None else tuple(ranks)
    check_ranks(ranks, len(world))
    return _Run(control, cfg, ranks, surroundings or Surroundings(), world).start()


def check_ranks(ranks: tuple[int, ...], world_size: int) -> None:
    """ConfigError if ranks are no ascending ranks of the world."""
    if not ranks or list(ranks) != sorted(set(ranks) & set(range(world_size))):
        raise ConfigError(
            f"launch: got ranks {ranks}, expected ascending ranks of the {world_size} that there "
            f"are, each once; correct them"
        )


class _Run:
    """One launch on one rank."""

    def __init__(
        self,
        control: Control,
        cfg: Any,
        ranks: tuple[int, ...],
        surroundings: Surroundings,
        world: tuple[int, ...],
    ) -> None:
        self._control, self._cfg, self._ranks = control, cfg, ranks
        self._surroundings, self._world = surroundings, world
        self._status = 0
        self._state: RankState | None = None
        limit = cfg.run.call_seconds
        self._groups = GroupTable(dist.get_rank(), timeout_seconds=limit)

    def start(self) -> Outcome:
        """Make the transfer group, then take part or stand by."""
        rank, limit = dist.get_rank(), timedelta(seconds=self._cfg.run.transfer_seconds)
        self._lane = dist.new_group(list(self._ranks), timeout=limit, backend="gloo")
        store = dist.distributed_c10d._get_default_store()
        self._announcements = Announcements(store, rank)
        if rank not in self._ranks:
            self._announcements.make_groups(self._groups)
            return Outcome(None, self._announcements)
        self._run_dir = path_of(self._cfg.run)
        try:
            run_session(
                self._main, self._operations_of, self._session_settings(), release=self._release
            )
        except SpmdflowError as err:
            failure = err if isinstance(err, RunFailed) else RunFailed(str(err))
            self._tell(failure)
            raise
        finally:
            self._release()
        self._tell(None)
        return Outcome(self._status)

    def _operations_of(self, member: Member) -> Mapping[str, Operation]:
        transport = CountedTransport(self._lane, seconds=self._cfg.run.transfer_seconds)
        announce = self._announcements.announce if self._is_told else None
        settings = _rank_settings(self._cfg, member.rank, self._run_dir, announce)
        self._state = RankState(settings, self._groups, transport, member.arrival)
        return self._state.operations()

    def _release(self) -> None:
        """Give back what the run had here: workers, then groups (again: nothing)."""
        if self._state is not None:
            try:
                self._state.close()
            except (SpmdflowError, OSError, RuntimeError) as err:
                logger.warning("closing workers: %s", err)
            self._state = None
        gc.collect()  # modules and their parameters refer to each other, and to groups
        self._groups.destroy()
        if self._lane is not None:
            dist.destroy_process_group(self._lane)
            self._lane = None

    @property
    def _is_told(self) -> bool:
        """Whether this rank is the one that tells ranks outside of the run."""
        return self._ranks != self._world and dist.get_rank() == self._ranks[0]

    def _tell(self, failure: RunFailed | None) -> None:
        if self._is_told:
            self._announcements.announce(None)
            self._announcements.tell(self._status, failure)

    def _main(self, transport: Transport) -> None:
        """The controller thread."""
        self._status = self._control(transport, self._ranks, self._ranks != self._world)

    def _session_settings(self) -> SessionSettings:
        run, around = self._cfg.run, self._surroundings
        return SessionSettings(
            run_dir=self._run_dir,
            ranks=self._ranks,
            start_seconds=run.start_seconds,
            call_seconds=run.call_seconds,
            transfer_seconds=run.transfer_seconds,
            heartbeat_seconds=2 * run.transfer_seconds,
            secret=around.secret,
            launcher=around.launcher,
            unwinds=not around.owns_process,
            on_failure=self._tell if self._is_told else None,
        )


def run_inproc(control: Control, cfg: Any) -> int:
    """Run `control` with everything in this process, a world of one rank; the exit status."""
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = GroupTable(0, timeout_seconds=cfg.run.call_seconds)
    run_dir = path_of(cfg.run)
    transport = CountedTransport(None, seconds=cfg.run.transfer_seconds)
    state = RankState(_rank_settings(cfg, 0, run_dir, None), groups, transport)
    controller = InprocTransport(state.operations())
    try:
        with stop_on_sigterm(controller):
            return control(controller, (0,), False)
    finally:
        state.close()
        if own_group:
            dist.destroy_process_group()


def _rank_settings(
    cfg: Any, rank: int, run_dir: Path, announce: Callable[[Any], None] | None
) -> RankSettings:
    return RankSettings(
        rank=rank,
        device=_device(),
        seed=cfg.run.seed,
        call_seconds=cfg.run.call_seconds,
        run_dir=run_dir,
        announce=announce,
    )


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_FIRST_SECONDS, _GROUP_SECONDS, _END_SECONDS = 0.01, 0.1, 1.0
"""Between two looks: at first, and later for more groups or the end of the run."""

Specs = Sequence[tuple[Sequence[int], str, str]]
"""Ranks, lane, backend of process groups."""


class Announcements:
    """What is said of one launch. Every rank of the world calls `launch` equally often."""

    def __init__(self, store: Store, rank: int) -> None:
        launches = store.add(f"spmdflow/launches/{rank}", 1)
        self._store, self._root = store, f"spmdflow/launch-{launches}"
        self._numbers = itertools.count()
        self._has_ended = False

    def announce(self, specs: Specs | None) -> None:
        """Say which groups the ranks of the run make now; None: there are no more (first rank)."""
        if not self._has_ended:
            self._store.set(self._key(), json.dumps(specs))
        self._has_ended = specs is None

    def tell(self, status: int, failure: RunFailed | None = None) -> None:
        """Say how the run ended (first rank)."""
        told = {"status": status} if failure is None else {"text": str(failure)} | failure.record
        self._store.set(f"{self._root}/outcome", json.dumps(told))

    def make_groups(self, groups: GroupTable) -> None:
        """Make the groups that are announced, until there are no more (outside)."""
        specs: Specs | None = []
        while specs is not None:
            groups.make([GroupSpec(tuple(ranks), lane, backend) for ranks, lane, backend in specs])
            specs = json.loads(self._next())

    def outcome(self) -> Mapping[str, Any] | None:
        """How the run ended; None while it goes on."""
        key = f"{self._root}/outcome"
        if not self._store.check([key]):
            return None
        told: dict[str, Any] = json.loads(self._store.get(key))
        return told

    def _next(self) -> bytes:
        """The next announcement, when it is there."""
        key = self._key()
        _look_until(lambda: self._store.check([key]), at_most=_GROUP_SECONDS)
        return bytes(self._store.get(key))

    def _key(self) -> str:
        return f"{self._root}/groups/{next(self._numbers)}"


class Outcome:
    """How a run ends, on a rank that is in it or outside of it."""

    def __init__(self, status: int | None, announcements: Announcements | None = None) -> None:
        """status: None if it must be heard from announcements."""
        self._status, self._announcements = status, announcements

    @property
    def is_known(self) -> bool:
        """Whether the run has ended: `wait` returns (or raises) at once."""
        return self._status is not None or self._look() is not None

    def wait(self) -> int:
        """Wait for the end: 0 finished, 3 stopped; RunFailed if the run failed."""
        if self._status is None:
            _look_until(lambda: self.is_known, at_most=_END_SECONDS)
            told = dict(self._look() or {})
            if "text" in told:
                error = RunFailed(told.pop("text"), told)
                error.add_note(f"on rank {told.get('rank')}:\n{told.get('traceback', '')}")
                raise error
            self._status = int(told["status"])
        return self._status

    def _look(self) -> Mapping[str, Any] | None:
        assert self._announcements is not None
        return self._announcements.outcome()


def _look_until(condition: Callable[[], bool], *, at_most: float) -> None:
    """Wait for condition, with up to at_most seconds between two looks.

    `Store.wait` would hold the store for this rank's other threads, and warn at each timeout.
    """
    seconds = _FIRST_SECONDS
    while not condition():
        time.sleep(seconds)
        seconds = min(at_most, 2 * seconds)
