"""One worker process as the pool sees it: start, send, read, kill. Knows no other process.

Its parent is a keeper (rewards.keeper), which ends everything below it; the pool ends the keeper by
closing a pipe. Nothing here blocks but `stack` (0.5 s at most) and `kill`, which waits for the
process to end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from spmdflow.rewards.keeper import kill_marked

# Not multiprocessing: its spawn imports the main module again, and torch with it.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module('spmdflow.rewards.keeper').main(sys.argv[2], *map(int, sys.argv[3:]))"
)
_READ_BYTES = 1 << 16
_MOST_READ_BYTES = 1 << 26
"""Of one look, so that who writes without an end does not hold the rank."""
_MOST_LINE_BYTES = 1 << 28
_SHOWN_BYTES = 40
_SECRET = "SPMDFLOW_SECRET"
_MARK = "SPMDFLOW_WORKER"
"""Environment variable that tells what a worker process started, if its keeper is killed."""
_REAP_SECONDS = 5.0
_STACK_SECONDS = 0.5


class WorkerProcess:
    """A running process that speaks lines of JSON with the pool that started it."""

    child = ""
    """Module whose `main` it runs."""

    def __init__(self) -> None:
        self.ready = False
        self._unread = b""
        self._unsent = memoryview(b"")
        self._mark = f"{_MARK}={secrets.token_hex(16)}"
        self._worker_pid: int | None = None
        """None: it has not said so yet."""
        self._popen, self._channel, self._lifeline, self._stack = _start(self.child, self._mark)
        self._ours = f"/{self.child.replace('.', '/')}.py"
        """First frame of a stack that is not the user's; then the stack is complete."""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return len(self._unsent) > 0

    @property
    def ended(self) -> bool:
        """Whether it is gone, by itself or killed from outside."""
        return self._popen.poll() is not None

    @property
    def pid(self) -> int:
        """Its process id, once it has begun; until then, its keeper's."""
        if self._worker_pid is None:
            return self._popen.pid
        return self._worker_pid

    def fileno(self) -> int:
        """The socket, for poll."""
        return self._channel.fileno()

    def read(self) -> tuple[list[dict[str, Any]], str | None]:
        """Messages that have come, and why it is of no more use if it is not (after the last one).

        That is what it did, in words, such as "ended its worker process (exit status 1)".
        """
        status = self._popen.poll()  # before reading: what a dead process sent is all there
        self._flush()
        messages, foreign = self._read()
        if foreign is not None:
            return messages, wrote_to_channel(foreign)
        if status is None:
            return messages, None
        if status >= 0:
            how = f"exit status {status}"
        else:
            how = f"signal {_signal_name(-status)}"
        return messages, f"ended its worker process ({how})"

    def accepts(self, message: dict[str, Any]) -> bool:
        """Whether it may send this message now; the user's code can write to its channel, too."""
        raise NotImplementedError

    def send(self, message: object) -> None:
        """Send a line of JSON, at once or as its socket has room."""
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(message).encode() + b"\n")
        self._flush()

    def stack(self) -> str:
        """The stack of the running function, or of a crash: lines "  File ..., line ... in ...".

        Innermost call first; "" if none comes in time.
        """
        if self._worker_pid is not None and not self.ended:
            self._drop_stacks()
            with contextlib.suppress(ProcessLookupError):  # its keeper is still ending the others
                os.kill(self._worker_pid, signal.SIGUSR1)
        text = b""
        limit = time.monotonic() + _STACK_SECONDS
        while self._ours.encode() not in text and (left := limit - time.monotonic()) > 0:
            if not select.select([self._stack], [], [], 0 if self.ended else left)[0]:
                break
            if not (part := os.read(self._stack, _READ_BYTES)):
                break
            text += part
        lines = text.decode(errors="replace").splitlines()
        frames = takewhile(lambda line: self._ours not in line, lines)
        return "\n".join(line for line in frames if line.startswith('  File "/'))

    def kill(self) -> None:
        """End it and everything that it started; harmless when repeated."""
        if self._channel.fileno() < 0:
            return
        os.close(self._lifeline)  # the keeper ends them
        try:
            self._popen.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # the keeper was stopped
            self._popen.kill()
            self._popen.wait()
        if self._popen.returncode == -signal.SIGKILL:  # maybe the keeper itself was killed
            kill_marked(self._mark)
        self._channel.close()
        os.close(self._stack)

    def _drop_stacks(self) -> None:
        """Read away stacks that others asked for, such as a batch system's SIGUSR1 to a job."""
        while select.select([self._stack], [], [], 0)[0] and os.read(self._stack, _READ_BYTES):
            pass

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it is gone: advance() says so
            self._unsent = memoryview(b"")

    def _read(self) -> tuple[list[dict[str, Any]], bytes | None]:
        """(messages that have come, the first line that is none)."""
        parts = [self._unread]
        try:
            for _ in range(_MOST_READ_BYTES // _READ_BYTES):
                part = self._channel.recv(_READ_BYTES)
                if not part:
                    break
                parts.append(part)
        except (BlockingIOError, ConnectionResetError):
            pass
        *lines, self._unread = b"".join(parts).split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines:
            message = _message_or_none(line)
            if message is None:
                return messages, line
            is_first = self._worker_pid is None  # which it sends before it runs code of users
            if is_first and message.keys() == {"worker"} and type(message["worker"]) is int:
                self._worker_pid = message["worker"]
            else:
                messages.append(message)
        return messages, self._unread if len(self._unread) > _MOST_LINE_BYTES else None


class RewardProcess(WorkerProcess):
    """A worker process with the calls it has been given: functions of samples."""

    child = "spmdflow.rewards.child"

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        start_seconds: float,
        sample_seconds: float,
    ) -> None:
        """functions: name and keyword arguments of each."""
        super().__init__()
        self.pending: deque[int] = deque()
        """Numbers of the calls it has not answered; it is running the first of them."""
        self._num_functions = len(functions)
        self._sample_seconds = sample_seconds
        self._deadline = time.monotonic() + start_seconds
        self.send({"functions": functions})

    @property
    def idle(self) -> bool:
        """Whether it can be given samples."""
        return self.ready and not self.pending

    def give(self, numbers: Sequence[int], calls: Sequence[Any]) -> None:
        """Send ([function numbers], prompt, response, row) of these calls; the first starts now."""
        assert self.idle, self.pending
        self.pending.extend(numbers)
        self._deadline = time.monotonic() + self._sample_seconds
        self.send(calls)

    def accepts(self, message: dict[str, Any]) -> bool:
        """Whether it may send this message now."""
        if message.keys() == {"ready"}:
            return not self.ready and are_texts(message["ready"], self._num_functions)
        if message.keys() == {"refused"}:
            return not self.ready and isinstance(message["refused"], str)
        if message.keys() == {"broken"}:
            return not self.ready and are_texts(message["broken"], 2)
        if message.keys() == {"scores"}:
            return len(self.pending) > 0 and are_scores(message["scores"])
        if message.keys() == {"failed"}:
            return len(self.pending) > 0 and isinstance(message["failed"], str)
        if message.keys() == {"forked"}:
            return len(self.pending) > 0 and message["forked"] in range(self._num_functions)
        return False

    def advance(self) -> tuple[list[dict[str, Any]], str | None]:
        """As `read`; a message gives the next call its full time."""
        messages, end = self.read()
        if messages:
            self._deadline = time.monotonic() + self._sample_seconds
        return messages, end

    def seconds_left(self) -> float:
        """Until its running call, or its start, takes too long; infinite when idle."""
        if self.idle:
            return float("inf")
        return self._deadline - time.monotonic()


def wrote_to_channel(what: object) -> str:
    """What a process did that sent what it may not send, in words."""
    data = what if isinstance(what, bytes) else json.dumps(what).encode()
    shown = data[:_SHOWN_BYTES].decode(errors="replace")
    return (
        f"wrote {shown!r} to the socket between its worker process and the rank (the code must use "
        f"only file descriptors that it has opened)"
    )


def are_scores(value: object) -> bool:
    """Whether this is what `rewards.child.scores_of` makes."""
    if not isinstance(value, dict) or "score" not in value:
        return False
    for name, entry in value.items():
        is_number = isinstance(entry, int | float) and math.isfinite(entry)
        is_answer = name == "answer" and (entry is None or isinstance(entry, str))
        if not (is_number or is_answer):
            return False
    return True


def _signal_name(number: int) -> str:
    """SIGKILL, ...; of real-time signals Python names the first and the last alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def are_texts(value: object, count: int) -> bool:
    """Whether this is a list of so many texts."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(text, str) for text in value)
    )


def _message_or_none(line: bytes) -> dict[str, Any] | None:
    """The message in a line; None if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(message, dict):
        return message
    return None


def _start(child: str, mark: str) -> tuple[subprocess.Popen[bytes], socket.socket, int, int]:
    """(keeper, socket to its worker process, pipe end whose closing kills both, pipe end to read
    the worker's stack)."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    watched, lifeline = os.pipe()
    stack, shown = os.pipe()
    name, _, value = mark.partition("=")
    environment = {}
    for key, text in os.environ.items():
        if key != _SECRET:
            environment[key] = text
    environment[name] = value
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    given = (theirs.fileno(), watched, shown)
    try:
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path, child, *map(str, given)],
            stdin=subprocess.DEVNULL,
            pass_fds=given,
            env=environment,
            start_new_session=True,  # torchrun signals the rank's whole group
        )
    except OSError:  # no more processes or memory
        ours.close()
        os.close(lifeline)
        os.close(stack)
        raise
    finally:
        theirs.close()
        os.close(watched)
        os.close(shown)
    return popen, ours, lifeline, stack
