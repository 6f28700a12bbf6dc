"""One worker process as the pool sees it: start, send, read, kill. Knows no other process.

Nothing here blocks but `stack` (0.5 s at most) and `kill`, which waits for the process to end.
"""

from __future__ import annotations

import contextlib
import json
import os
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

# Not multiprocessing: its spawn imports the main module again, and torch with it.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)
_READ_BYTES = 1 << 16
_REAP_SECONDS = 5.0
_STACK_SECONDS = 0.5


class WorkerProcess:
    """A running process that speaks lines of JSON with the pool that started it."""

    child = ""
    """Module whose `main` it runs."""

    def __init__(self) -> None:
        self.ready = False
        self._unread, self._unsent = b"", memoryview(b"")
        self._popen, self._channel, self._lifeline, self._stack = _start(self.child)
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
        """Its process id, which is also the id of its process group."""
        return self._popen.pid

    def fileno(self) -> int:
        """The socket, for poll."""
        return self._channel.fileno()

    def read(self) -> tuple[list[dict[str, Any]], str | None]:
        """Messages that have come, and how it ended if it did (after its last message)."""
        status = self._popen.poll()  # before reading: what a dead process sent is all there
        self._flush()
        messages = self._read()
        if status is not None and status < 0:
            return messages, f"signal {signal.Signals(-status).name}"
        return messages, None if status is None else f"exit status {status}"

    def send(self, message: object) -> None:
        """Send a line of JSON, at once or as its socket has room."""
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(message).encode() + b"\n")
        self._flush()

    def stack(self) -> str:
        """The stack of the running function, or of a crash: lines "  File ..., line ... in ...".

        Innermost call first; "" if none comes in time.
        """
        if not self.ended:
            os.kill(self.pid, signal.SIGUSR1)
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
        """End it and whatever it started in its group; harmless when repeated."""
        if self._channel.fileno() < 0:
            return
        with contextlib.suppress(ProcessLookupError):  # the whole group has gone already
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it will go
            self._popen.wait(_REAP_SECONDS)
        self._channel.close()
        os.close(self._lifeline)
        os.close(self._stack)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it is gone: advance() says so
            self._unsent = memoryview(b"")

    def _read(self) -> list[dict[str, Any]]:
        parts = [self._unread]
        try:
            while part := self._channel.recv(_READ_BYTES):
                parts.append(part)
        except (BlockingIOError, ConnectionResetError):
            pass
        *lines, self._unread = b"".join(parts).split(b"\n")
        return [json.loads(line) for line in lines]


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

    def advance(self) -> tuple[list[dict[str, Any]], str | None]:
        """As `read`; a message gives the next call its full time."""
        messages, end = self.read()
        if messages:
            self._deadline = time.monotonic() + self._sample_seconds
        return messages, end

    def seconds_left(self) -> float:
        """Until its running call, or its start, takes too long; infinite when idle."""
        return float("inf") if self.idle else self._deadline - time.monotonic()


def _start(child: str) -> tuple[subprocess.Popen[bytes], socket.socket, int, int]:
    """(process, socket to it, pipe end whose closing kills it, pipe end to read its stack)."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    watched, lifeline = os.pipe()
    stack, shown = os.pipe()
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    given = (theirs.fileno(), watched, shown)
    try:
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path, child, *map(str, given)],
            stdin=subprocess.DEVNULL,
            pass_fds=given,
            start_new_session=True,  # torchrun signals the rank's whole group
        )
    finally:
        theirs.close()
        os.close(watched)
        os.close(shown)
    return popen, ours, lifeline, stack
