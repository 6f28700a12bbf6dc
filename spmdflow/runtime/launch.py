"""Starts a run on the ranks of a process group: groups, session, the controller's thread.

`begin` is called by every rank of the default process group. Ranks outside `ranks` only help
to make process groups (every rank of the world must call `new_group`) and hear of the end
(runtime/outside.py). What the host program's groups were, they are afterwards, and nothing of
the run is left: no group, no thread, no descriptor.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdflow.checkpoint.run_dir import path_of
from spmdflow.errors import ConfigError, RunFailed, SpmdflowError
from spmdflow.parallel.group import GroupTable
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.inproc import InprocTransport, stop_on_sigterm
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.runtime.order import Transport
from spmdflow.runtime.outside import Announcements, Outcome
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
        self._state = RankState(settings, self._groups, transport, member.rest)
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
        config=cfg,
        announce=announce,
    )


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
