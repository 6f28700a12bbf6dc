"""The pool's side of one worker process: start, send, read, kill. It knows no other process.

Its parent is a keeper (rewards.keeper), which ends all its descendants. The pool ends the keeper by
closing a pipe. Only two functions block: `stack` (0.5 s at most) and `kill`, which waits for the
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

from spmdflow.rewards.keeper import BOOT, kill_marked

_BETWEEN = ("/spmdflow/source_file.py", "/spmdflow/rewards/calling.py")
"""Files between a worker process's own and the user's: they import and call a function."""
_READ_BYTES = 1 << 16
_MOST_READ_BYTES = 1 << 26
"""Limit of one `read`, so that a process that writes endlessly does not block the rank."""
_MOST_LINE_BYTES = 1 << 28
_SHOWN_BYTES = 40
_SECRET = "SPMDFLOW_SECRET"
_MARK = "SPMDFLOW_WORKER"
"""Environment variable that marks a worker's descendants, in case its keeper is killed."""
_REAP_SECONDS = 5.0
_STACK_SECONDS = 0.5
_GRACE_SECONDS = 2.0
"""After the limit of a call, until a process that limits its calls itself counts as hung."""


class WorkerProcess:
    """A running process that exchanges lines of JSON with the pool that started it."""

    child = ""
    """Module whose `main` it runs."""

    def __init__(self) -> None:
        """Start the keeper, which starts the worker process; OSError if that fails."""
        self.ready = False
        self._unread = b""
        self._unsent = memoryview(b"")
        self._mark = f"{_MARK}={secrets.token_hex(16)}"
        self._worker_pid: int | None = None
        """None until the process has sent it."""
        self._popen, self._channel, self._lifeline, self._stack = _start_keeper(
            self.child, self._mark
        )
        self._ours = (f"/{self.child.replace('.', '/')}.py", *_BETWEEN)
        """Files of the frames of a stack that are not the user's. The first one completes it."""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for space in the socket's buffer."""
        return len(self._unsent) > 0

    @property
    def ended(self) -> bool:
        """Whether it has exited or was killed."""
        return self._popen.poll() is not None

    @property
    def pid(self) -> int:
        """The worker's process id, once it is known; until then, the keeper's."""
        if self._worker_pid is None:
            return self._popen.pid
        return self._worker_pid

    def fileno(self) -> int:
        """The socket, for poll."""
        return self._channel.fileno()

    def read(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return (messages received, why the process is unusable or None), without blocking.

        The cause is a phrase such as "ended its worker process (exit status 1)"; the messages came
        before it. A line that is no message makes the process unusable too. Also sends bytes that
        were waiting.
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
        """Whether it may send this message now. The user's code can write to its socket, too."""
        raise NotImplementedError

    def send(self, message: object) -> None:
        """Send a line of JSON now, or later if the socket's buffer is full."""
        self._unsent = memoryview(bytes(self._unsent) + json.dumps(message).encode() + b"\n")
        self._flush()

    def stack(self) -> str:
        """Return the stack of the running function, or of a crash; "" if none arrives within 0.5 s.

        Sends SIGUSR1 to the worker, whose handler writes it. One line "  File ..., line ... in ..."
        per call, innermost first, without the frames of spmdflow.
        """
        if self._worker_pid is not None and not self.ended:
            self._drop_stacks()
            with contextlib.suppress(ProcessLookupError):  # its keeper is still ending the others
                os.kill(self._worker_pid, signal.SIGUSR1)
        text = b""
        limit = time.monotonic() + _STACK_SECONDS
        while self._ours[0].encode() not in text and (left := limit - time.monotonic()) > 0:
            if not select.select([self._stack], [], [], 0 if self.ended else left)[0]:
                break
            if not (part := os.read(self._stack, _READ_BYTES)):
                break
            text += part
        lines = text.decode(errors="replace").splitlines()
        frames = takewhile(lambda line: not any(file in line for file in self._ours), lines)
        return "\n".join(line for line in frames if line.startswith('  File "/'))

    def kill(self) -> None:
        """End the keeper, which ends the worker and all processes that it started; wait for that.

        If the keeper does not end within 5 s it is killed; if it was killed, marked processes are
        looked for and killed. Closes the socket and the pipes. Repeated calls do nothing.
        """
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
        """Discard stacks that others triggered, such as a batch system's SIGUSR1 to a job."""
        while select.select([self._stack], [], [], 0)[0] and os.read(self._stack, _READ_BYTES):
            pass

    def _flush(self) -> None:
        """Send waiting bytes as far as the socket takes them; drop them if the process is gone."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it is gone: advance() reports it
            self._unsent = memoryview(b"")

    def _read(self) -> tuple[list[dict[str, Any]], bytes | None]:
        """Return (messages received, the first line that is no message or None), without blocking.

        An incomplete last line is stored for the next call; one of more than 2**28 bytes counts as
        no message. The first message that is {"worker": pid} sets the worker's pid and is not
        returned. Reads at most 2**26 bytes.
        """
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
            is_first = self._worker_pid is None  # it is sent before any code of users runs
            if is_first and message.keys() == {"worker"} and type(message["worker"]) is int:
                self._worker_pid = message["worker"]
            else:
                messages.append(message)
        return messages, self._unread if len(self._unread) > _MOST_LINE_BYTES else None


class RewardProcess(WorkerProcess):
    """A worker process and the calls (function x sample) that were sent to it."""

    child = "spmdflow.rewards.child"

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        start_seconds: float,
        sample_seconds: float,
        concurrency: int = 1,
        retries: int = 0,
    ) -> None:
        """functions: name and keyword arguments of each. concurrency: of async functions."""
        super().__init__()
        self.pending: deque[int] = deque()
        """Numbers of the calls that it has not answered. It is running the first of them."""
        self.is_concurrent = False
        """Whether a function is an `async def`. Its process limits the seconds of a call itself."""
        self._num_functions = len(functions)
        self._sample_seconds = sample_seconds
        self._concurrency = concurrency
        self._deadline = time.monotonic() + start_seconds
        limits = {"seconds": sample_seconds, "concurrency": concurrency, "retries": retries}
        self.send({"functions": functions} | limits)

    @property
    def idle(self) -> bool:
        """Whether it can take samples."""
        return self.ready and not self.pending

    @property
    def num_wanted(self) -> float:
        """Calls that it can take now: any number if it is idle, 0 while it works.

        With async functions, as many as may run at once besides the pending ones.
        """
        if not self.ready:
            return 0
        if self.is_concurrent:
            return max(0, self._concurrency - len(self.pending))
        return 0 if self.pending else math.inf

    def give(self, numbers: Sequence[int], calls: Sequence[Any]) -> None:
        """Send calls to a process that wants them; the time limit starts if it was idle.

        numbers: of the calls, in the order of their answers. calls: ([function numbers], prompt,
        response, row) of each sample.
        """
        assert self.num_wanted, self.pending
        if self.idle:
            self._restart_limit()
        self.pending.extend(numbers)
        self.send(calls)

    def _restart_limit(self) -> None:
        """Start the time limit of the oldest call, with time for a concurrent process's own one."""
        grace = _GRACE_SECONDS if self.is_concurrent else 0.0
        self._deadline = time.monotonic() + self._sample_seconds + grace

    def accepts(self, message: dict[str, Any]) -> bool:
        """Return whether the process may send this message now, in this form.

        "concurrent", "ready", "refused" and "broken" only before it is ready; "scores", "failed",
        "batch" and "forked" only while a call is pending. A message has one key.
        """
        if message.keys() == {"concurrent"}:
            return not self.ready and message["concurrent"] is True
        if message.keys() == {"batch"}:
            return len(self.pending) > 0 and message["batch"] is True
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
        """Read messages as `read` does; each restarts the time limit, for the next call."""
        messages, end = self.read()
        if messages:
            self._restart_limit()
        return messages, end

    def seconds_left(self) -> float:
        """Seconds until its running call or its start exceeds the limit; infinite when idle."""
        if self.idle:
            return float("inf")
        return self._deadline - time.monotonic()


def wrote_to_channel(what: object) -> str:
    """Return the phrase for a process that sent something that it may not send.

    It quotes the first 40 bytes. what: a line, or a message, which is written as JSON.
    """
    data = what if isinstance(what, bytes) else json.dumps(what).encode()
    shown = data[:_SHOWN_BYTES].decode(errors="replace")
    return (
        f"wrote {shown!r} to the socket between its worker process and the rank (the code must use "
        f"only file descriptors that it has opened)"
    )


def are_scores(value: object) -> bool:
    """Return whether a value is a dict with "score" whose entries are finite numbers.

    The entry "answer" may also be a text or None.
    """
    if not isinstance(value, dict) or "score" not in value:
        return False
    for name, entry in value.items():
        is_number = isinstance(entry, int | float) and math.isfinite(entry)
        is_answer = name == "answer" and (entry is None or isinstance(entry, str))
        if not (is_number or is_answer):
            return False
    return True


def _signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL; the number as text if Python does not name it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def are_texts(value: object, count: int) -> bool:
    """Whether the value is a list of `count` texts."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(text, str) for text in value)
    )


def _message_or_none(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(message, dict):
        return message
    return None


def _start_keeper(child: str, mark: str) -> tuple[subprocess.Popen[bytes], socket.socket, int, int]:
    """Start a keeper, which starts the worker process, with `mark` in their environment.

    It has its own session, and no SPMDFLOW_SECRET. Returns (keeper, socket to the worker, pipe end
    whose closing kills both, pipe end to read the worker's stack). OSError if it cannot be started.
    child: module whose `main` the worker runs. mark: "NAME=value".
    """
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
    descriptors = (theirs.fileno(), watched, shown)
    try:
        popen = subprocess.Popen(
            [sys.executable, "-c", BOOT, path, child, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
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
