"""Worker processes that run environments: assignment of episodes, time limits, and blame.

A process runs many episodes in one event loop. If it dies or does not answer in time, each of its
episodes is run again in a separate process. The episode that makes its process fail again is to
blame. The others are not affected, since an episode's random numbers depend on its row alone.
"""

from __future__ import annotations

import json
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from spmdflow.config.episode import EpisodeConfig, environment_of, judge_of
from spmdflow.config.reward import RewardTerm
from spmdflow.episodes.parts import are_parts
from spmdflow.errors import ConfigError, RewardError
from spmdflow.rewards.process import WorkerProcess, are_scores, are_texts, wrote_to_channel

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_ROW_LETTERS = 200


class EndedEpisode(NamedTuple):
    """How an episode ended."""

    number: int
    scores: dict[str, Any] | None = None
    """Score and other numbers. None: it failed, or the environment returned None."""
    cause: str = ""
    """Why it failed. Empty: it did not fail."""
    parts: Mapping[str, Any] = MappingProxyType({})
    """Scores of its segments, turns and tokens (`parts.parts_of`)."""


class _Process(WorkerProcess):
    """A worker process and the episodes that run in it."""

    child = "spmdflow.episodes.child"
    grace_seconds = 2.0
    """Time after an episode's limit, which the process enforces, until the process is killed."""

    def __init__(
        self,
        term: RewardTerm,
        judge: RewardTerm | None,
        *,
        certificate_path: str | None,
        limits: Mapping[str, int | None],
    ) -> None:
        """Starts the process and sends it the names of the environment and of the judge.

        limits: of the memory and output of one episode, for processes that have them.
        """
        super().__init__()
        self.running: dict[int, float] = {}
        """Episode -> its deadline, including the grace period."""
        self.deadline = time.monotonic() + _START_SECONDS
        """Deadline of its start."""
        functions = [[term.function, dict(term.arguments)]]
        named = None if judge is None else [judge.function, dict(judge.arguments)]
        self.send(
            {
                "functions": functions,
                "judge": named,
                "certificate": certificate_path,
                "limits": dict(limits),
            }
        )

    def accepts(self, message: dict[str, Any]) -> bool:
        """Returns whether the process may send this message now; otherwise it is to blame.

        "ended" is for a running episode, with valid scores or a cause, if any. "forked" is always
        accepted; "refused", "broken" and "ready" only before the process is ready.
        """
        if "ended" in message:
            is_known = isinstance(message["ended"], int) and message["ended"] in self.running
            is_scored = "scores" not in message or are_scores(message["scores"])
            is_scored = is_scored and are_parts(message.get("parts", {}))
            return is_known and is_scored and isinstance(message.get("failed", ""), str)
        if message.keys() == {"forked"}:
            return True
        if message.keys() == {"refused"}:
            return not self.ready and isinstance(message["refused"], str)
        if message.keys() == {"broken"}:
            return not self.ready and are_texts(message["broken"], 2)
        is_ready = message.keys() == {"ready"} and are_texts(message["ready"], 1)
        return is_ready and not self.ready

    @property
    def seconds_left(self) -> float:
        """Time until its start or an episode takes too long. Infinite if it is idle."""
        limits = self.running.values() if self.ready else [self.deadline]
        return min(limits, default=float("inf")) - time.monotonic()


class _TemplateProcess(_Process):
    """A worker process that starts a process for each of its episodes (`isolated`)."""

    child = "spmdflow.episodes.isolated"
    grace_seconds = 15.0
    """It has to kill the episode's processes, and may have many to kill."""


@dataclass
class _Call:
    """An episode that is waiting or running."""

    row: dict[str, Any]
    alone: bool = False
    """Whether it must run in a separate process, because a process that ran it was lost."""
    causes: list[str] = field(default_factory=list)
    is_judge: bool = False
    """Whether the judge is called instead of the environment."""


class EnvironmentPool:
    """Runs the configured environment for many rows at once."""

    def __init__(self, cfg: EpisodeConfig, *, certificate_path: str | None = None) -> None:
        """Starts the worker processes.

        certificate_path: of the endpoint, if clients do not trust it without being told.
        """
        self._certificate_path = certificate_path
        self._term = environment_of(cfg.environment)
        self._kind = _TemplateProcess if cfg.isolation == "process" else _Process
        self._limits = {"memory_mb": cfg.memory_mb, "max_output_bytes": cfg.max_output_bytes}
        self._judge = None if cfg.judge is None else judge_of(cfg.judge)
        self._num_processes = cfg.num_processes
        self._concurrency = cfg.concurrency
        self._seconds = cfg.seconds
        self._processes: list[_Process] = []
        self._calls: dict[int, _Call] = {}
        self._waiting: deque[int] = deque()
        self._ended: list[EndedEpisode] = []
        self._start_missing()

    def begin(
        self, rows: Mapping[int, dict[str, Any]], *, first: bool = False, judge: bool = False
    ) -> None:
        """Adds episodes, by number, to the end of the queue, or to its front if `first` is set.

        judge: calls of the judge; each row is its argument (`judgement.load_judge`).
        """
        for number, row in rows.items():
            self._calls[number] = _Call(row, is_judge=judge)
        self._waiting = deque([*rows, *self._waiting] if first else [*self._waiting, *rows])
        self._start_missing()

    @property
    def num_under_way(self) -> int:
        """Number of episodes that are waiting or running."""
        return len(self._calls)

    def start_waiting(self, enter: Callable[[int], dict[str, str]]) -> None:
        """Starts waiting episodes, in the order of the queue, where a process has room.

        A ready process runs at most concurrency // num_processes episodes, and at least 1. An
        episode that must run alone gets a process without others. enter(number): arguments of its
        environment; called when the episode starts.
        """
        room = max(1, self._concurrency // self._num_processes)
        for process in self._processes:
            while self._waiting and process.ready and len(process.running) < room:
                number = self._waiting[0]
                alone = self._calls[number].alone
                if process.running and (
                    alone or any(self._calls[n].alone for n in process.running)
                ):
                    break
                self._waiting.popleft()
                process.running[number] = time.monotonic() + self._seconds + process.grace_seconds
                call = {"run": number, "seconds": self._seconds, "row": self._calls[number].row}
                if self._calls[number].is_judge:
                    call["judge"] = True
                process.send(call | enter(number))

    def advance(
        self, seconds: float, *, wake: int, faults: Callable[[], Mapping[int, str]]
    ) -> list[EndedEpisode]:
        """Waits for messages of the processes and returns the episodes that have ended.

        Waits at most `seconds`, or until the file descriptor `wake` is readable; the list may be
        empty. A process that has ended, sent something invalid or exceeded a limit is killed; see
        `_lose_process`. faults(): episodes to end, with causes. It is called after the processes
        are read, so that an episode that fails because it is ended reports this cause. ConfigError
        or RewardError if the environment cannot be loaded.
        """
        poll = select.poll()
        for process in self._processes:
            poll.register(process, select.POLLIN | (select.POLLOUT if process.has_unsent else 0))
        poll.register(wake, select.POLLIN)
        poll.poll(max(0.0, seconds * 1000))
        read = []
        for process in self._processes:
            read.append((process, *process.read()))
        for number, cause in faults().items():
            self._fail(number, cause)
        for process, messages, end in read:
            for message in messages:
                if not process.accepts(message):
                    end = wrote_to_channel(message)
                    break
                self._record(process, message)
            if end is not None:
                self._lose_process(process, end)
            elif process.seconds_left <= 0 and not process.ready:
                self._lose_process(process, f"did not end within {_START_SECONDS:g} s")
            elif process.seconds_left <= 0:
                limit = f"actor.rollout.episode.seconds ({self._seconds:g} s)"
                self._lose_process(process, f"kept its worker process busy for longer than {limit}")
        ended = self._ended
        self._ended = []
        return ended

    def close(self) -> None:
        """Kills all processes. May be called repeatedly."""
        self._kill(list(self._processes))

    def _fail(self, number: int, cause: str) -> None:
        """Cancels an episode if it is running, and records the cause of its failure.

        It ends when its process reports that; the first recorded cause counts.
        """
        for process in self._processes:
            if number in process.running:
                process.send({"cancel": number})
                self._calls[number].causes.append(cause)

    def _start_missing(self) -> None:
        while len(self._processes) < self._num_processes:
            process = self._kind(
                self._term,
                self._judge,
                certificate_path=self._certificate_path,
                limits=self._limits,
            )
            self._processes.append(process)

    def _kill(self, processes: list[_Process]) -> None:
        for process in processes:
            process.kill()
            self._processes.remove(process)

    def _record(self, process: _Process, message: dict[str, Any]) -> None:
        """Handles a message of a process that `accepts` has accepted.

        "ended" ends the episode, "forked" fails the one that forked, and "ready" marks the process
        as ready. Raises ConfigError for "refused" (an unsuitable environment) and RewardError for
        "broken" (its module raised an error).
        """
        name = self._term.function
        if "ended" in message:
            process.running.pop(message["ended"], None)
            self._end_episode(
                message["ended"],
                message.get("scores"),
                message.get("failed", ""),
                message.get("parts", {}),
            )
        elif "forked" in message:
            self._blame_fork(process, message["forked"])
        elif "refused" in message:
            raise ConfigError(message["refused"])
        elif "broken" in message:
            raise RewardError(
                f"environment {name!r}: its module raised {message['broken'][1].rstrip()}\n"
                f"expected a module that can be imported; fix it"
            )
        else:
            process.ready = True

    def _blame_fork(self, process: _Process, number: object) -> None:
        """Fails the running episode `number`, whose forked child returned to the event loop.

        The child has exited on its own. Logs a warning instead if no such episode runs in the
        process.
        """
        cause = (
            "forked, and its child went on as well (end the child with os._exit(0), or start a "
            "program with asyncio.create_subprocess_exec)"
        )
        if isinstance(number, int) and number in process.running:
            self._fail(number, cause)
        else:
            logger.warning("environment %r %s", self._term.function, cause)

    def _end_episode(
        self,
        number: int,
        scores: dict[str, Any] | None,
        cause: str,
        parts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Adds an episode to self._ended; does nothing if it has ended before.

        A cause recorded by `_fail` replaces `cause`. With a cause, the scores are dropped, and the
        text gets the environment's name, the row and the traceback.
        """
        call = self._calls.pop(number, None)
        if call is None:
            return
        cause = call.causes[0] if call.causes else cause
        if cause:
            first, _, trace = cause.partition("\n")
            cause = (
                f"{self._expectation(call, first)}\n"
                f"row: {_shorten(json.dumps(call.row))}\n{trace.rstrip()}"
            )
        self._ended.append(EndedEpisode(number, None if cause else scores, cause, dict(parts)))

    def _expectation(self, call: _Call, cause: str) -> str:
        """Returns what went wrong with a call, and what was expected of its function."""
        if call.is_judge and self._judge is not None:
            return (
                f"judge {self._judge.function!r} {cause}; expected a list with a finite number, a "
                f'dict with "score" or None for each episode of the group; fix the judge'
            )
        return (
            f"environment {self._term.function!r} {cause}; expected a finite number, a dict "
            f'with "score" or None; fix the environment'
        )

    def _lose_process(self, process: _Process, what: str) -> None:
        """Kills a process, handles its episodes, and starts a new process.

        Its episode fails with the cause `what` and the stack if it was the only one or had to run
        alone. Otherwise each is queued again, to run alone. RewardError if the process was not
        ready: the environment's module could not be imported.
        """
        stack = process.stack()
        where = stack and f"\nIt was there (innermost call first):\n{stack}"
        self._kill([process])
        if not process.ready:
            raise RewardError(
                f"environment {self._term.function!r}: importing its module {what}; expected a "
                f"module that can be imported on its own; run `python -c` on it to see why{where}"
            )
        numbers = list(process.running)
        for number in numbers:
            if len(numbers) == 1 or self._calls[number].alone:
                self._end_episode(number, None, what + where)
            else:
                self._calls[number].alone = True
                self._waiting.append(number)
        if len(numbers) > 1:
            logger.warning("%d episodes are run again, as one %s", len(numbers), what)
        self._start_missing()


def _shorten(text: str) -> str:
    if len(text) <= _ROW_LETTERS:
        return text
    return f"{text[:_ROW_LETTERS]} ..."
