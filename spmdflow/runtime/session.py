"""One controller and N executors, made of the ranks of a process group that already exists.

Every rank calls `run_session`. The calling (main) thread becomes the compute lane. The threads
transfer, files and comm are started in addition, and on the controller's rank also io and
controller (the script). At the end, signal handlers and interpreter settings are restored, and
threads and sockets are closed, so that a session can run inside any torchrun program.

A session that fails does not return. Each process ends with status 1 after the cause has been
written (runtime/teardown.py, comm.py). With `SessionSettings.unwinds`, and if no process is lost,
every rank raises RunFailed instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import distributed as dist

from spmdflow.checkpoint.lock import STATUS_FILE, RunDirLock, RunDirMark, claim_run_dir
from spmdflow.data.store import RowCondition
from spmdflow.errors import ProtocolError, RunFailed
from spmdflow.failure.cause import run_failed
from spmdflow.failure.launcher import outlive_launcher
from spmdflow.failure.peers import Peers
from spmdflow.failure.process import Process
from spmdflow.failure.settings import SessionSettings
from spmdflow.failure.signals import Signals
from spmdflow.failure.stacks import stacks_on_signal, stacks_path
from spmdflow.runtime.call import Transport
from spmdflow.runtime.comm import Comm
from spmdflow.runtime.executor import Operation, failure_of
from spmdflow.runtime.io import Io
from spmdflow.runtime.rendezvous import meet
from spmdflow.runtime.wire import Hub, RankSocket

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 5e-4
"""Thread switch interval. A round trip while Python is busy then takes 0.6 instead of 5.2 ms."""
_JOIN_SECONDS = 60.0
"""Longer than the controller lets ranks take to leave (runtime/teardown.py)."""


def run_session(
    main: Callable[[Transport], None],
    operations_of: Callable[[int, RowCondition], Mapping[str, Operation]],
    settings: SessionSettings,
    *,
    release: Callable[[], None] = lambda: None,
) -> int:
    """Run main(transport) on the first rank and the operations on all ranks. Returns 0.

    All ranks of settings.ranks call it together; the default process group must exist. main runs in
    the thread "controller", operations in the calling thread and in the threads "transfer" and
    "files". operations_of(rank, arrival) returns them; arrival is how the compute lane waits for
    rows.

    The first rank creates and locks RUN_DIR first. ConfigError on every rank if that fails.
    DeadlineError if ranks do not arrive in time. ProtocolError outside the main thread. Later
    failures end every process of the session, or raise RunFailed on every rank
    (`SessionSettings.unwinds`). In the latter case release() is called once this rank has left its
    lanes: what it closes frees ranks that wait in a collective for this one.
    """
    rank = dist.get_rank()
    assert rank in settings.ranks, (rank, settings.ranks)
    if threading.current_thread() is not threading.main_thread():
        raise ProtocolError(
            f"session: started in thread {threading.current_thread().name!r}, expected the main "
            f"thread (signals and CUDA belong to it); call it there"
        )
    with contextlib.ExitStack() as at_end:

        def claim() -> RunDirLock:
            """Lock RUN_DIR until the session ends, and remove failure reports of earlier starts.

            Called on the controller's rank only, before anything is written there. ConfigError if
            RUN_DIR is in use or not writable.
            """
            lock = claim_run_dir(settings.run_dir)
            at_end.callback(lock.release)
            remove_old_reports(settings.run_dir)
            settings.on_claimed(lock)
            return lock

        rendezvous = meet(dist.distributed_c10d._get_default_store(), rank, settings, claim)
        hub = rendezvous.hub
        if rendezvous.lock is not None:
            settings = replace(settings, owns_run_dir=rendezvous.lock.is_held)
        else:
            settings = replace(settings, owns_run_dir=RunDirMark.read(settings.run_dir).is_there)
        settings.on_met()
        at_end.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)
        signals = at_end.enter_context(Signals())
        at_end.enter_context(stacks_on_signal(stacks_path(settings.run_dir, rank)))
        endpoint = RankSocket(
            rendezvous.address,
            rank,
            run_id=rendezvous.run_id,
            key=rendezvous.key,
            context=hub.context if hub else None,
        )
        comm = Comm(
            endpoint,
            rank=rank,
            controller=rendezvous.controller,
            settings=settings,
            signals=signals,
        )
        if hub:
            threads = _start_controller(hub, rendezvous.processes, main, settings)
        else:
            threads = []
        comm.start()
        if settings.launcher is not None:
            outlive_launcher()  # comm watches it, and can report its end
        threads = [*_run_lanes(comm, rank, operations_of), comm.thread, *threads]
        if comm.cause is not None:
            release()
        _join(threads)
        if hub:
            hub.terminate()
    if comm.cause is not None:
        raise run_failed(comm.cause)
    return 0


def remove_old_reports(run_dir: Path) -> None:
    """Remove failure.json, failure-rank*.json, stacks-* and status.json of an earlier start.

    They would look like new ones. A file that cannot be removed is only logged. Only the process
    that has locked run_dir may call this, because otherwise a live run may own the files.
    """
    for pattern in ("failure.json", "failure-rank*.json", "stacks-*", STATUS_FILE):
        for path in run_dir.glob(pattern):
            try:
                path.unlink(missing_ok=True)
            except OSError as err:  # such as a folder of that name
                logger.warning("warning: cannot remove %s: %s", path, err.strerror)


def _join(threads: Iterable[threading.Thread]) -> None:
    """Wait for all threads to end, at most 60 s each.

    If one does not end, it prints all stacks on stderr and raises AssertionError.
    """
    for thread in threads:
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            faulthandler.dump_traceback()
            raise AssertionError(f"thread {thread.name} has not ended; see the stacks above")


def _start_controller(
    hub: Hub,
    processes: Mapping[int, Process],
    main: Callable[[Transport], None],
    settings: SessionSettings,
) -> list[threading.Thread]:
    """Start the io thread and the thread "controller", which runs main(transport); return both.

    processes: of all ranks, by rank.
    """
    rank = settings.controller_rank
    silence = settings.heartbeat_seconds
    io = Io(
        hub, peers=Peers(processes, own_rank=rank, heartbeat_seconds=silence), settings=settings
    )
    script = threading.Thread(
        target=_run_script, args=(main, io, rank), name="controller", daemon=True
    )
    io.thread.start()
    script.start()
    return [script, io.thread]


def _run_script(main: Callable[[Transport], None], io: Io, rank: int) -> None:
    """Wait until all ranks are connected, run main(io), then close the session (controller thread).

    sys.exit() with 0 or None counts as a normal end. Any other exception is reported as a failure
    of kind "script", which ends the run; not a RunFailed that only repeats a known failure. Then
    this thread waits for the end of the run.
    """
    try:
        io.met.result()
        try:
            main(io)
        except SystemExit as err:
            if err.code not in (None, 0):
                raise
        io.close()
    except BaseException as err:
        if not (isinstance(err, RunFailed) and io.has_failed):
            io.fail(failure_of(err, rank, kind="script"))
        io.stay()


def _run_lanes(
    comm: Comm,
    rank: int,
    operations_of: Callable[[int, RowCondition], Mapping[str, Operation]],
) -> list[threading.Thread]:
    """Start the other lanes in threads, and run the compute lane until the controller closes it.

    Returns the threads. If operations_of raises, the failure is reported and the run ends; a lane
    without operations still runs, for a process that continues.
    """
    lanes = comm.other_lanes
    threads = []
    for lane in lanes:
        threads.append(threading.Thread(target=lane.run, name=lane.name, daemon=True))
    operations: Mapping[str, Operation] = {}
    try:
        operations = operations_of(rank, comm.arrival)
    except BaseException as err:
        comm.fail(failure_of(err, rank))
        comm.stay()
    for lane in (comm.compute, *lanes):
        lane.operations = operations
    for thread in threads:
        thread.start()
    comm.compute.run()
    return threads
