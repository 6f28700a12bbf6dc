"""The worker process of environments with isolation=process: forks a process for each episode.

    pool -> keeper -> this process -> keeper of an episode -> its process -> what it starts

This process imports the environment's module once and runs none of its functions. The messages are
those of `child`; the first one also has {"limits": {"memory_mb": ..., "max_output_bytes": ...}}.
An episode's process starts as a copy of this one, so it costs no import. It sends lines of JSON
over a pipe: {"worker": pid}, {"forked": number}, and {"ended": number, ...} at the end. When that
has come, or a limit is exceeded, the episode's keeper kills the process and everything that it
started, and only then the pool is told. An episode can fail in no way that reaches another one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from spmdflow.episodes.child import EpisodeFunctions, load_functions
from spmdflow.episodes.episode_process import (
    EpisodeLimits,
    EpisodeProcess,
    close_descriptor,
    play_episode,
)
from spmdflow.episodes.parts import are_parts
from spmdflow.episodes.process_memory import (
    MB,
    children_of_all,
    descendants,
    resident_bytes,
    shared_out_bytes,
)
from spmdflow.rewards.child import (
    decode,
    encode,
    locate_definition,
    open_channel,
)
from spmdflow.rewards.keeper import become_keeper
from spmdflow.rewards.process import are_scores

_KEY = "actor.rollout.episode"
_READ_BYTES = 1 << 16
_MOST_READS = 16
"""Reads of one pipe before others have their turn."""
_MOST_RESULT_BYTES = 1 << 28
_GRACE_SECONDS = 1.0
"""After an episode's limit, which its event loop enforces, until its process is killed."""
_STACK_SECONDS = 0.5
"""Time for a process to write its stack before it is killed."""
_MEMORY_SECONDS = 0.5
"""Between two looks at the memory of all episodes."""
_REAP_SECONDS = 0.02
"""Between two looks at keepers that are ending, where pidfds are not available."""
_SHOWN_LINES = 20
_SHOWN_BYTES = 2000


def main(socket_fd: int, stack_fd: int) -> None:
    """Loads the environment, then runs episodes until the pool's end of the socket is closed."""
    channel = open_channel(socket_fd, stack_fd)
    lines = _Lines(channel)
    request = decode(lines.wait_for_one().decode())

    def tell(message: dict[str, Any]) -> None:
        channel.sendall(encode(message).encode() + b"\n")

    functions = load_functions(request, tell)
    if functions is None:
        return
    gc.freeze()  # collections in the copies then do not touch, and so copy, these pages
    tell({"ready": [locate_definition(functions.environment)]})
    limits = EpisodeLimits(**request["limits"])
    _EpisodeProcesses(channel, lines, functions, limits, stack_fd).serve()


class _Lines:
    """Lines that come over a socket, read without blocking but for the first one."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unread = b""

    def wait_for_one(self) -> bytes:
        """The first line. Exits if the pool is gone."""
        while b"\n" not in self._unread:
            part = self._channel.recv(_READ_BYTES)
            if not part:
                sys.exit(0)
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def take(self) -> list[bytes] | None:
        """The lines that have come. None: the other end is closed."""
        parts = [self._unread]
        with contextlib.suppress(BlockingIOError):
            while True:
                part = self._channel.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                if not part:
                    return None
                parts.append(part)
        *lines, self._unread = b"".join(parts).split(b"\n")
        return lines


class _EpisodeProcesses:
    """Starts the processes of episodes, watches their limits and reports how they end."""

    def __init__(
        self,
        channel: socket.socket,
        lines: _Lines,
        functions: EpisodeFunctions,
        limits: EpisodeLimits,
        stack_fd: int,
    ) -> None:
        """channel: to the pool. functions: of its calls. stack_fd: closed in the copies."""
        self._channel = channel
        self._lines = lines
        self._functions = functions
        self._limits = limits
        self._stack_fd = stack_fd
        self._episodes: dict[int, EpisodeProcess] = {}
        """By number."""
        self._next_look = 0.0
        """Time of the next look at the memory."""

    def serve(self) -> None:
        """Serves the pool until it closes its end of the socket."""
        while True:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            for episode in self._episodes.values():
                for descriptor in (episode.result_fd, episode.output_fd, episode.keeper_fd):
                    if descriptor >= 0:
                        poll.register(descriptor, select.POLLIN)
            poll.poll(self._milliseconds())
            lines = self._lines.take()
            if lines is None:
                return
            for line in lines:
                self._obey(decode(line.decode()))
            for episode in list(self._episodes.values()):
                self._read(episode)
                self._check_time(episode)
                self._finish_if_ended(episode)
            if self._limits.memory_mb is not None and time.monotonic() >= self._next_look:
                self._check_memory(self._limits.memory_mb)

    def _milliseconds(self) -> float | None:
        """Longest wait until something must be looked at; None: there is nothing."""
        now = time.monotonic()
        times = []
        for episode in self._episodes.values():
            if episode.lifeline_fd >= 0:
                times.append(episode.deadline)
            elif episode.keeper_fd < 0:
                times.append(now + _REAP_SECONDS)
        if self._episodes and self._limits.memory_mb is not None:
            times.append(self._next_look)
        if not times:
            return None
        return max(0.0, min(times) - now) * 1000 + 1

    def _tell(self, message: dict[str, Any]) -> None:
        self._channel.sendall(encode(message).encode() + b"\n")

    def _obey(self, call: dict[str, Any]) -> None:
        """Starts an episode, or ends a running one; the pool knows why."""
        if "cancel" in call:
            episode = self._episodes.get(call["cancel"])
            if episode is not None:
                episode.end("was ended")
            return
        number = call.pop("run")
        try:
            self._episodes[number] = self._start(number, call)
        except OSError as err:  # no more processes, descriptors or memory
            self._tell({"ended": number, "failed": f"got no process of its own ({err})"})

    def _start(self, number: int, call: dict[str, Any]) -> EpisodeProcess:
        """Forks the keeper of an episode, which forks its process. OSError if that fails."""
        sys.stdout.flush()
        sys.stderr.flush()
        result_fd, theirs = os.pipe()
        output_fd, shown = os.pipe()
        watched, lifeline_fd = os.pipe()
        keeper_pid = os.fork()
        if keeper_pid == 0:
            for descriptor in (result_fd, output_fd, lifeline_fd, self._stack_fd):
                os.close(descriptor)
            self._channel.close()
            for other in self._episodes.values():
                for descriptor in other.descriptors:
                    os.close(descriptor)
            become_keeper(watched, (theirs, shown))
            play_episode(self._functions.of_call(call), number, call, self._limits, theirs, shown)
        for descriptor in (theirs, shown, watched):
            os.close(descriptor)
        os.set_blocking(result_fd, False)
        os.set_blocking(output_fd, False)
        keeper_fd = -1
        with contextlib.suppress(OSError):  # a sandbox without pidfds
            keeper_fd = os.pidfd_open(keeper_pid)
        deadline = time.monotonic() + call["seconds"] + _GRACE_SECONDS
        return EpisodeProcess(
            number, keeper_pid, result_fd, output_fd, lifeline_fd, keeper_fd, deadline
        )

    def _read(self, episode: EpisodeProcess) -> None:
        """Reads what an episode has written: its output and its messages."""
        parts, is_open = _read_parts(episode.output_fd)
        for part in parts:
            self._take_output(episode, part)
        if not is_open:
            episode.output_fd = close_descriptor(episode.output_fd)
        parts, is_open = _read_parts(episode.result_fd)
        episode.result += b"".join(parts)
        if not is_open:
            episode.result_fd = close_descriptor(episode.result_fd)
        *lines, episode.result = episode.result.split(b"\n")
        for line in lines:
            self._take_message(episode, line)
        if len(episode.result) > _MOST_RESULT_BYTES:
            episode.end(f"returned more than {_MOST_RESULT_BYTES} bytes")

    def _take_output(self, episode: EpisodeProcess, part: bytes) -> None:
        """Keeps the end of the output, and copies complete lines of it to this process's output.

        The episode ends if it has written too much; what it writes after that is dropped.
        """
        if episode.num_output_bytes > self._limits.max_output_bytes:
            return
        episode.num_output_bytes += len(part)
        episode.output = (episode.output + part)[-_SHOWN_BYTES:]
        lines, newline, episode.unshown = (episode.unshown + part).rpartition(b"\n")
        if newline:
            with contextlib.suppress(OSError):
                os.write(1, lines + newline)
        if episode.num_output_bytes > self._limits.max_output_bytes:
            limit = f"{_KEY}.max_output_bytes ({self._limits.max_output_bytes} bytes)"
            episode.end(f"wrote more to its standard output and standard error than {limit}")

    def _take_message(self, episode: EpisodeProcess, line: bytes) -> None:
        """Handles a line that came over an episode's pipe, to which users' code can write too."""
        message = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
        if not isinstance(message, dict):
            message = {}
        if episode.worker_pid is None and type(message.get("worker")) is int:
            episode.worker_pid = message["worker"]
        elif message == {"forked": episode.number}:
            self._tell(message)
        elif message.get("ended") == episode.number and _is_answer(message):
            episode.answer = episode.answer or message
            episode.end()
        else:
            shown = line[:40].decode(errors="replace")
            episode.end(
                f"wrote {shown!r} to the pipe between its process and the rank (the code must use "
                f"only file descriptors that it has opened)"
            )

    def _check_time(self, episode: EpisodeProcess) -> None:
        """Ends an episode whose event loop did not end it in time: first asks for its stack."""
        if episode.lifeline_fd < 0 or time.monotonic() < episode.deadline:
            return
        if not episode.is_over and episode.worker_pid is not None:
            episode.is_over = True
            episode.deadline = time.monotonic() + _STACK_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.kill(episode.worker_pid, signal.SIGUSR1)
            return
        episode.end(f"kept its process busy for longer than {_KEY}.seconds")

    def _check_memory(self, memory_mb: int) -> None:
        """Ends the episodes whose processes together have more memory than the limit."""
        self._next_look = time.monotonic() + _MEMORY_SECONDS
        children = children_of_all()
        for episode in self._episodes.values():
            pids = descendants(episode.keeper_pid, children)
            if sum(map(resident_bytes, pids)) <= memory_mb * MB:
                continue
            used = sum(map(shared_out_bytes, pids))
            if used > memory_mb * MB:
                episode.end(
                    f"used {used // MB} MB of memory in {len(pids)} processes, more than "
                    f"{_KEY}.memory_mb ({memory_mb} MB)"
                )

    def _finish_if_ended(self, episode: EpisodeProcess) -> None:
        """Reports an episode whose keeper has ended: all its processes are gone."""
        pid, status = os.waitpid(episode.keeper_pid, os.WNOHANG)
        if pid == 0:
            return
        self._read(episode)  # what a process wrote before it ended is all there
        for descriptor in episode.descriptors:
            os.close(descriptor)
        del self._episodes[episode.number]
        if episode.unshown:
            with contextlib.suppress(OSError):
                os.write(1, episode.unshown + b"\n")
        message = episode.answer
        if episode.cause or message is None:
            what = episode.cause or f"ended its process ({_status_text(status)})"
            message = {"ended": episode.number, "failed": what}
        if "failed" in message:
            message["failed"] += _last_lines(episode.output)
        self._tell(message)


def _read_parts(descriptor: int) -> tuple[list[bytes], bool]:
    """What can be read from a pipe now, at most 1 MiB, and whether more may come.

    descriptor: -1 if it has been closed.
    """
    parts: list[bytes] = []
    if descriptor < 0:
        return parts, False
    with contextlib.suppress(BlockingIOError):
        for _ in range(_MOST_READS):
            part = os.read(descriptor, _READ_BYTES)
            if not part:
                return parts, False
            parts.append(part)
    return parts, True


def _is_answer(message: dict[str, Any]) -> bool:
    """Whether a message is one that the pool accepts for the end of an episode."""
    is_scored = "scores" not in message or are_scores(message["scores"])
    return (
        is_scored and are_parts(message.get("parts", {})) and type(message.get("failed", "")) is str
    )


def _status_text(status: int) -> str:
    """How a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def _last_lines(output: bytes) -> str:
    """The end of an episode's output for the message of its failure; empty without output."""
    lines = output.decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    if not lines:
        return ""
    return "\nIts last output:\n" + "\n".join(lines)
