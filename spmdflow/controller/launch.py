"""Starts a run on the ranks of a process group: groups, session, script.

`launch` is called by every rank of the default process group. Ranks outside `ranks` only help
to make process groups (every rank of the world must call `new_group`) and return before the
first step. What the host program's groups were, they are afterwards.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from spmdflow.checkpoint.run_dir import open_run_dir, path_of
from spmdflow.config.describe import to_yaml
from spmdflow.config.placement import pools_of
from spmdflow.controller.caller import Caller, CallSettings
from spmdflow.controller.flow import Flow, FlowSettings, Stopped
from spmdflow.controller.group import END_OF_GROUPS
from spmdflow.controller.inproc import InprocTransport, stop_on_sigterm
from spmdflow.controller.neighbours import readable_memory
from spmdflow.controller.operation import RankSettings, RankState
from spmdflow.controller.order import Transport
from spmdflow.controller.saving import Saving, check_shared
from spmdflow.controller.session import Member, SessionSettings, run_session
from spmdflow.controller.show import Show
from spmdflow.controller.transcript import TRANSCRIPT_FILE, Transcript
from spmdflow.controller.transfers import Transfers
from spmdflow.errors import ConfigError
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.transfer.lane import CountedTransport

logger = logging.getLogger(__name__)

FINISHED, STOPPED = 0, 3


@dataclass(frozen=True)
class Surroundings:
    """What `spmdflow.run` knows of its process."""

    secret: str | None = None
    """SPMDFLOW_SECRET."""
    launcher: int | None = None
    """Pid of torchrun's agent, with which this process ends; None in a host program."""


def launch(
    script: ModuleType,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    surroundings: Surroundings | None = None,
) -> int:
    """Run script.main(flow, cfg) on `ranks` (default: all). Exit status: 0 finished, 3 stopped.

    Collective over the default process group, which must exist unless inproc. ConfigError if
    the script has no main or ranks are no ascending ranks of the group; other failures end the
    processes of the session with status 1.
    """
    if not callable(getattr(script, "main", None)):
        raise ConfigError(
            f"{script.__name__}: defines no main, expected main(flow, cfg); add it to the script"
        )
    if inproc:
        return _run_inproc(script, cfg)
    world = tuple(range(dist.get_world_size()))
    ranks = world if ranks is None else tuple(ranks)
    if not ranks or list(ranks) != sorted(set(ranks) & set(world)):
        raise ConfigError(
            f"launch: got ranks {ranks}, expected ascending ranks of the {len(world)} that there "
            f"are, each once; correct them"
        )
    run = _Run(script, cfg, ranks, surroundings or Surroundings(), world)
    return run.start()


class _Run:
    """One launch on one rank."""

    def __init__(
        self,
        script: ModuleType,
        cfg: Any,
        ranks: tuple[int, ...],
        surroundings: Surroundings,
        world: tuple[int, ...],
    ) -> None:
        self._script, self._cfg, self._ranks = script, cfg, ranks
        self._surroundings, self._world = surroundings, world
        self._status = FINISHED
        limit = cfg.run.call_seconds
        self._groups = GroupTable(dist.get_rank(), timeout_seconds=limit)

    def start(self) -> int:
        """Make the transfer group, then take part or stand by."""
        transfer_seconds = self._cfg.run.transfer_seconds
        lane = dist.new_group(
            list(self._ranks), timeout=timedelta(seconds=transfer_seconds), backend="gloo"
        )
        rank = dist.get_rank()
        self._announced = _announcements(rank)
        if rank not in self._ranks:
            _stand_by(self._groups, self._announced, seconds=self._cfg.run.start_seconds)
            return FINISHED
        run_dir = path_of(self._cfg.run)
        settings = self._session_settings(run_dir)
        transport = CountedTransport(lane, seconds=transfer_seconds)

        def operations_of(member: Member) -> Any:
            settings = _rank_settings(self._cfg, member.rank, run_dir)
            state = RankState(settings, self._groups, transport, member.rest)
            return state.operations()

        run_session(self._main, operations_of, settings)
        dist.destroy_process_group(lane)
        # compute groups stay: DTensor keeps meshes by rank list, and would find them destroyed
        return self._status

    def _main(self, transport: Transport) -> None:
        """The controller thread: build the flow, run the script."""
        publish = _publisher(self._announced) if self._ranks != self._world else None
        self._status = _run_script(self._script, self._cfg, transport, self._ranks, publish)
        if publish is not None:  # a script without steps has not said so yet
            publish(END_OF_GROUPS)

    def _session_settings(self, run_dir: Path) -> SessionSettings:
        run, around = self._cfg.run, self._surroundings
        return SessionSettings(
            run_dir=run_dir,
            ranks=self._ranks,
            start_seconds=run.start_seconds,
            call_seconds=run.call_seconds,
            transfer_seconds=run.transfer_seconds,
            heartbeat_seconds=2 * run.transfer_seconds,
            secret=around.secret,
            launcher=around.launcher,
        )


def _run_inproc(script: ModuleType, cfg: Any) -> int:
    """Everything in this process: a world of one rank."""
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = GroupTable(0, timeout_seconds=cfg.run.call_seconds)
    run_dir = path_of(cfg.run)
    transport = CountedTransport(None, seconds=cfg.run.transfer_seconds)
    state = RankState(_rank_settings(cfg, 0, run_dir), groups, transport)
    controller = InprocTransport(state.operations())
    try:
        with stop_on_sigterm(controller):
            return _run_script(script, cfg, controller, (0,), None)
    finally:
        state.close()
        if own_group:
            dist.destroy_process_group()


def _run_script(
    script: ModuleType,
    cfg: Any,
    transport: Transport,
    ranks: tuple[int, ...],
    publish: Callable[[str], None] | None,
) -> int:
    """Build what the script needs and run it; the exit status."""
    run_dir = open_run_dir(cfg.run, to_yaml(cfg))
    check_shared(transport, ranks, run_dir.path)
    readable = readable_memory(transport, ranks, seconds=cfg.run.start_seconds)
    transport = transcript = Transcript(transport, run_dir.path / TRANSCRIPT_FILE, ranks)
    transfers = Transfers(transport, seconds=cfg.run.transfer_seconds, readable=readable)
    settings = CallSettings(cfg.run.seed, cfg.run.call_seconds, ranks)
    caller = Caller(transport, transfers, settings)
    flow_settings = FlowSettings(
        config=cfg,
        world=ranks,
        pools=pools_of(cfg, ranks),
        run_dir=run_dir.path,
        backend="nccl" if _device().type == "cuda" else "gloo",
        start_seconds=cfg.run.start_seconds,
        publish=publish,
        transcript=transcript,
    )
    show = Show(cfg, run_dir.path, last_step=run_dir.last_step)
    saving = Saving(run_dir.path, run_dir.checkpoint, keep=cfg.run.keep_checkpoints)
    flow = Flow(caller, flow_settings, saving, show)
    try:
        script.main(flow, cfg)
        status = FINISHED
    except Stopped as stop:
        logger.warning("%s", stop)
        status = STOPPED
    finally:
        show.close()
        run_dir.lock.release()
    caller.submit("close", {rank: {"operation": "close"} for rank in ranks}).result()
    return status


def _rank_settings(cfg: Any, rank: int, run_dir: Path) -> RankSettings:
    return RankSettings(
        rank=rank,
        device=_device(),
        seed=cfg.run.seed,
        call_seconds=cfg.run.call_seconds,
        run_dir=run_dir,
        config=cfg,
    )


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Ranks of the host program that take no part


def _publisher(announced: str) -> Callable[[str], None]:
    """Tells ranks that stand by which groups are made."""
    store, numbers = dist.distributed_c10d._get_default_store(), itertools.count()

    def publish(text: str) -> None:
        store.set(f"{announced}/{next(numbers)}", text)

    return publish


def _stand_by(groups: GroupTable, announced: str, *, seconds: float) -> None:
    """Make every group that the controller announces, until it announces no more."""
    store = dist.distributed_c10d._get_default_store()
    for number in itertools.count():
        key = f"{announced}/{number}"
        store.wait([key], timedelta(seconds=seconds))
        text = store.get(key).decode()
        if text == END_OF_GROUPS:
            return
        groups.make([GroupSpec(tuple(ranks), lane, name) for ranks, lane, name in json.loads(text)])


def _announcements(rank: int) -> str:
    """Key prefix of this launch in the store; every rank calls `launch` equally often."""
    launches = dist.distributed_c10d._get_default_store().add(f"spmdflow/launches/{rank}", 1)
    return f"spmdflow/groups/{launches}"
