"""Starts a run on the ranks of a process group: groups, session, the controller's thread.

`start_run` is called by every rank of the default process group. Ranks outside `ranks` only help
to make process groups (every rank of the world must call `new_group`), and get the result of the
run (`Outcome`). The groups of the host program are not changed. Afterwards no group, thread or
descriptor of the run remains.

For ranks outside, the run's first rank writes into the world's store which groups its ranks make,
then that there are no more, and finally how the run ended (`Announcements`). Waiting for the end
polls the store once a second, has no time limit (runs are long), and can be interrupted.
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
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from spmdflow.checkpoint.lock import RunDirLock, claim_run_dir
from spmdflow.checkpoint.run_dir import path_of
from spmdflow.data.store import RowCondition
from spmdflow.errors import ConfigError, RunFailed, SpmdflowError
from spmdflow.failure.cause import failure_record, write_failure
from spmdflow.failure.limit import FIRST_SECONDS
from spmdflow.failure.settings import SessionSettings
from spmdflow.parallel.allocated import AllocatedPeak
from spmdflow.parallel.device import CPU, own_device
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.runtime.call import InprocTransport, Transport, stop_on_signals
from spmdflow.runtime.executor import Operation, failure_of
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.runtime.session import remove_old_reports, run_session
from spmdflow.transfer.lane import CountedTransport

logger = logging.getLogger(__name__)

Control = Callable[[Transport, tuple[int, ...], bool, RunDirLock], int]
"""Runs in the controller's thread: control(transport, ranks of the run, whether others help to make
its groups, the lock of RUN_DIR) -> exit status."""


@dataclass(frozen=True)
class Surroundings:
    """What `spmdflow.run` knows about its process."""

    secret: str | None = None
    """SPMDFLOW_SECRET."""
    launcher: int | None = None
    """Pid of torchrun's agent, whose end ends this process. None in a host program."""
    owns_process: bool = False
    """Whether every failure may end the process; in a host program only the loss of a process."""
    on_met: Callable[[], None] = lambda: None
    """Called once all ranks have met, when the session begins to watch them."""
    show_failure: Callable[[], None] = lambda: None
    """As in `SessionSettings`."""
    restarts: int = 0
    """How often torchrun has restarted the ranks in this launch."""


def start_run(
    control: Control,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    surroundings: Surroundings | None = None,
) -> Outcome:
    """Run `control` on the first of `ranks` (default: all), which execute its calls.

    All ranks of the default process group, which must exist, call it together. A rank of the run
    returns when the run has ended; a rank outside helps to make the run's groups, then gets an
    `Outcome` to wait on. `ranks` are ascending ranks of the group (`check_ranks`). A failure raises
    RunFailed on every rank of the run. Instead it ends the processes with status 1 if they belong
    to the run (`owns_process`) or one of them is lost. Groups, workers and threads are released in
    either case.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    run = cfg.run
    ranks = tuple(range(world_size)) if ranks is None else ranks
    groups = GroupTable(rank)
    limit = timedelta(seconds=run.transfer_seconds)
    lane = dist.new_group(list(ranks), timeout=limit, backend="gloo")
    announcements: Announcements | None
    announcements = Announcements(dist.distributed_c10d._get_default_store(), rank)
    if rank not in ranks:
        announcements.make_groups(groups)
        return Outcome(None, announcements)
    has_outside = len(ranks) < world_size
    if not has_outside or rank != ranks[0]:
        announcements = None
    membership = _Membership(cfg, groups, lane, announcements)
    del lane  # the traceback of an error would keep the group

    def main(transport: Transport) -> None:
        assert membership.lock is not None, "the session claims RUN_DIR before the script runs"
        membership.status = control(transport, ranks, has_outside, membership.lock)

    membership.run(main, ranks, surroundings or Surroundings())
    return Outcome(membership.status)


def check_ranks(ranks: tuple[int, ...], world_size: int) -> None:
    """Raise ConfigError unless ranks are ascending ranks of the world, without repetition."""
    if not ranks or list(ranks) != sorted(set(ranks) & set(range(world_size))):
        expected = f"ascending ranks from 0 to {world_size - 1}, each at most once"
        raise ConfigError.of("launch", f"ranks {ranks}", expected, "correct the argument `ranks`")


class _Membership:
    """The groups, workers and session of one rank of a run."""

    def __init__(
        self,
        cfg: Any,
        groups: GroupTable,
        lane: dist.ProcessGroup,
        announcements: Announcements | None,
    ) -> None:
        """announcements: given on the rank that informs ranks outside the run, otherwise None."""
        self._cfg = cfg
        self._groups = groups
        self._announcements = announcements
        self._lane: dist.ProcessGroup | None = lane
        self._state: RankState | None = None
        self.status = 0
        self.lock: RunDirLock | None = None
        """The lock of RUN_DIR, on the controller's rank during the session."""

    def run(
        self, main: Callable[[Transport], None], ranks: tuple[int, ...], around: Surroundings
    ) -> None:
        """Take part in the session until it ends, then close workers and destroy the run's groups.

        All ranks of the run call it together; main(transport) runs on the first. Ranks outside the
        run are told how it ended. SpmdflowError of the session is passed on, after telling them.
        """
        run = self._cfg.run
        settings = SessionSettings(
            run_dir=path_of(run),
            ranks=ranks,
            start_seconds=run.start_seconds,
            call_seconds=run.call_seconds,
            transfer_seconds=run.transfer_seconds,
            heartbeat_seconds=run.transfer_seconds,
            secret=around.secret,
            launcher=around.launcher,
            on_met=around.on_met,
            on_claimed=self._keep_lock,
            unwinds=not around.owns_process,
            on_failure=self._announce_end if self._announcements else None,
            show_failure=around.show_failure,
        )
        try:
            run_session(main, self._operations_of, settings, release=self._release)
        except SpmdflowError as err:
            self._announce_end(err if isinstance(err, RunFailed) else RunFailed(str(err)))
            raise
        finally:
            self._release()
        self._announce_end(None)

    def _keep_lock(self, lock: RunDirLock) -> None:
        self.lock = lock

    def _operations_of(self, rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
        announce = self._announcements.announce if self._announcements else None
        self._state = _state(self._cfg, rank, self._groups, self._lane, announce, arrival)
        return self._state.operations()

    def _release(self) -> None:
        """Close this rank's workers, then destroy the process groups of the run.

        An error while closing workers is only logged. Runs the garbage collector in between,
        because modules still refer to groups. A second call does nothing.
        """
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

    def _announce_end(self, failure: RunFailed | None) -> None:
        """Tell ranks outside the run that it has ended, and how."""
        if self._announcements:
            self._announcements.announce(None)
            self._announcements.announce_outcome(self.status, failure)


def run_inproc(control: Control, cfg: Any) -> int:
    """Run `control` in this process, as a world of one rank, and return its exit status.

    Locks RUN_DIR, and removes failure reports of earlier starts. An exception is written to
    RUN_DIR/failure.json, except ConfigError, and raised unchanged. ConfigError, before anything is
    written, if a live run uses RUN_DIR.
    """
    run_dir = path_of(cfg.run)
    lock = claim_run_dir(run_dir)
    try:
        remove_old_reports(run_dir)
        return _run_claimed(control, cfg, lock)
    finally:
        lock.release()


def _run_claimed(control: Control, cfg: Any, lock: RunDirLock) -> int:
    """Do the work of `run_inproc` in a RUN_DIR that this process has locked.

    Creates a gloo group of one rank unless a process group exists, and destroys it at the end.
    SIGTERM, SIGINT and SIGHUP ask the script to stop after its step. An Exception or Ctrl-C, but
    not ConfigError, is written to failure.json if the lock is still held, and raised again.
    """
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = _state(cfg, 0, GroupTable(0), None)
    controller = InprocTransport(state.operations())
    try:
        with stop_on_signals(controller):
            return control(controller, (0,), False, lock)
    except ConfigError:
        raise  # the settings were refused, and nothing was run
    except (Exception, KeyboardInterrupt) as err:
        failure = failure_of(err, 0, kind="script")
        if lock.is_held():
            write_failure(lock.run_dir / "failure.json", failure_record(failure, ()))
        raise
    finally:
        state.close()
        if own_group:
            dist.destroy_process_group()


def _state(
    cfg: Any,
    rank: int,
    groups: GroupTable,
    lane: dist.ProcessGroup | None,
    announce: Callable[[Any], None] | None = None,
    arrival: RowCondition | None = None,
) -> RankState:
    """Return a new `RankState` (workers, rows and groups of one rank) with settings from `cfg.run`.

    lane: the gloo group of transfers, or None. announce: as in `RankSettings`. arrival: how the
    compute lane waits for rows; None: it never waits, and missing rows are an error. The rank is
    profiled if it is in run.profile_ranks.
    """
    run = cfg.run
    settings = RankSettings(
        rank=rank,
        device=own_device(),
        seed=run.seed,
        call_seconds=run.call_seconds or FIRST_SECONDS,
        run_dir=path_of(run),
        announce=announce,
        profiled=tuple(run.profile_steps) if rank in run.profile_ranks else (),
        waits_for_rows=arrival is not None,
    )
    transport = CountedTransport(lane, seconds=run.transfer_seconds)
    allocated = AllocatedPeak() if settings.device == CPU else None
    return RankState(settings, groups, transport, arrival, allocated)


_FIRST_SECONDS = 0.01
_GROUP_SECONDS = 0.1
_END_SECONDS = 1.0
"""Poll intervals of the store: the first, and the longest ones for groups and for the run's end."""

Specs = Sequence[tuple[Sequence[int], str, str]]
"""Ranks, lane, backend of process groups."""


class Announcements:
    """What a run announces to ranks outside it, through the store.

    Keys contain the number of the launch. Every rank of the world calls `launch` equally often.
    """

    def __init__(self, store: Store, rank: int) -> None:
        """Count this launch in the store."""
        launches = store.add(f"spmdflow/launches/{rank}", 1)
        self._store = store
        self._root = f"spmdflow/launch-{launches}"
        self._numbers = itertools.count()
        self._has_ended = False

    def announce(self, specs: Specs | None) -> None:
        """Announce the groups that the ranks of the run make next (first rank).

        None: there are no more.
        """
        if not self._has_ended:
            self._store.set(self._key(), json.dumps(specs))
        self._has_ended = specs is None

    def announce_outcome(self, status: int, failure: RunFailed | None = None) -> None:
        """Write how the run ended to the store, as JSON, for ranks outside the run (first rank).

        {"status": status}, or after a failure its "text" and the fields of its record.
        """
        if failure is None:
            outcome = {"status": status}
        else:
            outcome = {"text": str(failure)} | failure.record
        self._store.set(f"{self._root}/outcome", json.dumps(outcome))

    def make_groups(self, groups: GroupTable) -> None:
        """Make the announced process groups, until it is announced that no more will come.

        Called on ranks outside the run. Collective: all ranks of the world make the same groups in
        the same order. Polls the store at least every 0.1 s, without a time limit.
        """
        specs: Specs | None = []
        while specs is not None:
            groups.make([GroupSpec(tuple(ranks), lane, backend) for ranks, lane, backend in specs])
            key = self._key()
            _poll_until(partial(self._store.check, [key]), max_seconds=_GROUP_SECONDS)
            specs = json.loads(self._store.get(key))

    def outcome(self) -> Mapping[str, Any] | None:
        """Return how the run ended, as `announce_outcome` wrote it; None while it is running."""
        key = f"{self._root}/outcome"
        if not self._store.check([key]):
            return None
        outcome: dict[str, Any] = json.loads(self._store.get(key))
        return outcome

    def _key(self) -> str:
        """The key of the next announcement of groups."""
        return f"{self._root}/groups/{next(self._numbers)}"


class Outcome:
    """How a run ends, on a rank that is part of it or outside of it."""

    def __init__(self, status: int | None, announcements: Announcements | None = None) -> None:
        """status: None if it comes from announcements."""
        self._outcome: Mapping[str, Any] | None = None if status is None else {"status": status}
        self._announcements = announcements

    @property
    def is_known(self) -> bool:
        """Whether the run has ended, so that `wait` returns (or raises) at once."""
        if self._outcome is None and self._announcements is not None:
            self._outcome = self._announcements.outcome()
        return self._outcome is not None

    def wait(self) -> int:
        """Wait for the end of the run, without a limit. Returns 0 (finished) or 3 (stopped).

        RunFailed with the run's record if it failed; its note has the failed rank's traceback.
        """
        _poll_until(lambda: self.is_known, max_seconds=_END_SECONDS)
        outcome = dict(self._outcome or {})
        if "text" in outcome:
            error = RunFailed(outcome.pop("text"), outcome)
            error.add_note(f"on rank {outcome.get('rank')}:\n{outcome.get('traceback', '')}")
            raise error
        return int(outcome["status"])


def _poll_until(condition: Callable[[], bool], *, max_seconds: float) -> None:
    """Call condition() until it is true; sleeps 0.01 s first, then twice as long up to max_seconds.

    There is no time limit. `Store.wait` would block the store for this rank's other threads, and
    warn at each timeout.
    """
    seconds = _FIRST_SECONDS
    while not condition():
        time.sleep(seconds)
        seconds = min(max_seconds, 2 * seconds)
