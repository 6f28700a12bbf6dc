"""The pool's end of one worker process: start, feed, read, kill. Knows no other process.

Nothing here blocks but `kill`, which waits for the kernel to take a killed process away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

# Not multiprocessing: its spawn imports the main module again, and torch with it.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmdflow.rewards.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_READ_BYTES = 1 << 16
_REAP_SECONDS = 5.0


class RewardProcess:
    """A running worker process with the samples it has been given."""

    def __init__(self, function_name: str, *, start_seconds: float, sample_seconds: float) -> None:
        self.ready = False
        self.pending: deque[int] = deque()
        """Numbers of the samples it has not answered yet; it is at the first of them."""
        self._sample_seconds = sample_seconds
        self._deadline = time.monotonic() + start_seconds
        self._unread, self._unsent = b"", memoryview(b"")
        self._popen, self._channel, self._lifeline = _start()
        self._write({"function": function_name})

    @property
    def idle(self) -> bool:
        """Whether it can be given samples."""
        return self.ready and not self.pending

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

    def give(self, numbers: Sequence[int], samples: Sequence[Any]) -> None:
        """Send a chunk of (prompt, response, row); the first one's time starts now."""
        assert self.idle and len(numbers) == len(samples), (self.pending, len(numbers))
        self.pending.extend(numbers)
        self._deadline = time.monotonic() + self._sample_seconds
        self._write(samples)

    def advance(self) -> tuple[list[dict[str, Any]], str | None]:
        """Messages that have come, and how it ended if it did (after its last message)."""
        status = self._popen.poll()  # before reading: what a dead process sent is all there
        self._flush()
        messages = self._read()
        if messages:
            self._deadline = time.monotonic() + self._sample_seconds
        return messages, None if status is None else _end_in_words(status)

    def seconds_left(self) -> float:
        """Until the sample it is at, or its start, takes too long; infinite when idle."""
        return float("inf") if self.idle else self._deadline - time.monotonic()

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

    def _write(self, message: object) -> None:
        data = bytes(self._unsent) + json.dumps(message).encode() + b"\n"
        self._unsent = memoryview(data)
        self._flush()

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


def _start() -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """The process, our end of its socket, and the pipe end whose closing kills it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    watched, lifeline = os.pipe()
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    arguments = [path, str(theirs.fileno()), str(watched)]
    try:
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), watched),
            start_new_session=True,  # torchrun signals the rank's whole group
        )
    finally:
        theirs.close()
        os.close(watched)
    return popen, ours, lifeline


def _end_in_words(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"
