"""One process of isolation=process: what its parent knows of it, and what it runs itself."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdflow.episodes.child import Environment, Forks, UnsharedSelector, run_episode
from spmdflow.episodes.process_memory import limit_memory
from spmdflow.rewards.child import encode, set_up_signals

_KEY = "actor.rollout.episode"


class EpisodeLimits(NamedTuple):
    """Limits of one episode."""

    memory_mb: int | None
    """Of a process's writable memory, and of the resident memory of all its processes together."""
    max_output_bytes: int
    """Of standard output and standard error together."""


@dataclass
class EpisodeProcess:
    """A running episode, as this process sees it."""

    number: int
    keeper_pid: int
    result_fd: int
    output_fd: int
    lifeline_fd: int
    """Closing it ends the keeper, and with it the episode's processes. -1: it is closed."""
    keeper_fd: int
    """A pidfd, which becomes readable when the keeper has ended; -1: not available."""
    deadline: float
    worker_pid: int | None = None
    result: bytes = b""
    """What has come of the current message."""
    answer: dict[str, Any] | None = None
    cause: str = ""
    """Which limit it exceeded; empty: none."""
    is_over: bool = False
    """Whether its limit of time has passed, and it has been asked for its stack."""
    num_output_bytes: int = 0
    output: bytes = b""
    """The end of its output."""
    unshown: bytes = b""
    """The last line of its output, which is not complete yet."""

    @property
    def descriptors(self) -> list[int]:
        """All that are open."""
        every = (self.result_fd, self.output_fd, self.lifeline_fd, self.keeper_fd)
        return [fd for fd in every if fd >= 0]

    def end(self, cause: str = "") -> None:
        """Tells the keeper to kill the episode's processes. The first cause counts."""
        if self.answer is None:
            self.cause = self.cause or cause
        self.lifeline_fd = close_descriptor(self.lifeline_fd)


def play_episode(
    function: Environment,
    number: int,
    call: dict[str, Any],
    limits: EpisodeLimits,
    result_fd: int,
    output_fd: int,
) -> None:
    """Runs one episode in its process, which ends here.

    number, call: see `run_episode`. result_fd, output_fd: pipes to this process's parent.
    """
    set_up_signals()
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    faulthandler.enable(file=2, all_threads=False)
    if "numpy" in sys.modules:  # Python's own random numbers are seeded again at each fork
        sys.modules["numpy"].random.seed()
    if limits.memory_mb is not None:
        limit_memory(limits.memory_mb)
    forks = Forks(result_fd)

    def tell(message: dict[str, Any]) -> None:
        forks.leave_if_forked()
        if message.get("failed", "").startswith("raised MemoryError"):
            first, newline, trace = message["failed"].partition("\n")
            limit = f" ({_KEY}.memory_mb is {limits.memory_mb})"
            message = message | {"failed": first + limit + newline + trace}
        sys.stdout.flush()
        sys.stderr.flush()
        data = memoryview(encode(message).encode() + b"\n")
        while data:
            data = data[os.write(result_fd, data) :]

    tell({"worker": os.getpid()})
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(UnsharedSelector(forks))
    ) as runner:
        runner.run(run_episode(function, number, call, tell))
    os._exit(0)


def close_descriptor(descriptor: int) -> int:
    """Closes a descriptor that may be closed already (-1). Returns -1."""
    if descriptor >= 0:
        os.close(descriptor)
    return -1
