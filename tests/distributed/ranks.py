"""Runs a function on gloo ranks, each a process of its own, and brings back what it returned.

The ranks are forked from a server that has imported torch already, so that a test pays for its
work and not for imports. The store listens on a port that the system chooses.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import distributed as dist

from tests.forked import fork_server

SECONDS = 840.0
"""Only ends what hangs."""
_AFTERMATH_SECONDS = 60.0
"""Once a rank has failed the others get this long to tell why they fail."""


class RanksFailed(AssertionError):
    """Some rank raised, died or did not finish; carries every rank's traceback."""


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    error: str | None = None
    """Traceback, or how the process ended; None if it returned."""
    exit_code: int | None = None
    """As `multiprocessing.Process.exitcode`: negative for signals; None: had to be killed."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, seconds: float = SECONDS
) -> list[Any]:
    """function(*arguments) on every rank; the results by rank. RanksFailed if any fails."""
    outcomes = watch_ranks(function, world_size, *arguments, seconds=seconds)
    errors = [f"rank {o.rank}: {o.error}" for o in outcomes if o.error]
    if errors:
        raise RanksFailed("\n".join(errors))
    return [outcome.value for outcome in outcomes]


def watch_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, seconds: float = SECONDS
) -> list[Outcome]:
    """As `run_ranks` for ranks that are meant to fail: says how each one ended."""
    context = fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    pipes = []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(function, rank, world_size, store.port, arguments, seconds, writer),
            daemon=False,
        )
        process.start()
        writer.close()
        processes.append(process)
        pipes.append(reader)
    try:
        return _collect(processes, pipes, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(
    processes: Sequence[BaseProcess], pipes: Sequence[Connection], deadline: float
) -> list[Outcome]:
    """Read every rank's answer until the deadline, which a failure moves closer."""
    outcomes = [Outcome(rank, error="did not finish in time") for rank in range(len(pipes))]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            outcomes[rank] = _outcome(rank, pipe)
            if outcomes[rank].error is not None:
                deadline = min(deadline, time.monotonic() + _AFTERMATH_SECONDS)
    for outcome, process in zip(outcomes, processes, strict=True):
        process.join(max(0.1, min(_AFTERMATH_SECONDS, deadline - time.monotonic())))
        outcome.exit_code = process.exitcode
        if outcome.error == "":
            outcome.error = f"ended with exit code {process.exitcode} and no answer"
    return outcomes


def _outcome(rank: int, pipe: Connection) -> Outcome:
    try:
        value, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Outcome(rank, error="")
    return Outcome(rank, value, error)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    arguments: tuple[Any, ...],
    seconds: float,
    pipe: Connection,
) -> None:
    """One rank: join the group, run, answer."""
    faulthandler.dump_traceback_later(max(1.0, seconds - 2.0), exit=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        answer = pickle.dumps((function(*arguments), None))
        dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(answer)
    faulthandler.cancel_dump_traceback_later()
