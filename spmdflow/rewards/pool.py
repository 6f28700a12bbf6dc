"""A pool of worker processes that run one reward function on many samples.

The order of samples is kept. A sample that raises, returns nonsense, takes too long or takes its
process down is named with its cause; a lost process is replaced and the rest goes on.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from spmdflow.config.schema import RewardConfig
from spmdflow.errors import ConfigError, RewardError
from spmdflow.rewards.process import RewardProcess
from spmdflow.rewards.work import Work

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2  # a process that ends without closing its socket is noticed within this
_LOG_EVERY = 100
_EXCERPT_LETTERS = 200


class RewardPool:
    """Worker processes of one rank; started at construction, gone at `close` or with the rank.

    ConfigError if the function cannot be found; RewardError if its module cannot be imported
    within start_seconds. One `score` at a time; from any thread.
    """

    def __init__(
        self,
        function_name: str,
        num_processes: int = 1,
        *,
        sample_seconds: float = 10.0,
        on_error: str = "raise",
        start_seconds: float = 120.0,
    ) -> None:
        assert on_error in ("raise", "zero"), on_error
        self._name, self._num_processes = function_name, num_processes
        self._sample_seconds, self._start_seconds = sample_seconds, start_seconds
        self._strict = on_error == "raise"
        self._processes: list[RewardProcess] = []
        self._closed = False
        self._num_errors = 0
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._fill()
            while not all(process.ready for process in self._processes):
                self._advance(Work(0, 1, strict=False))
            on_failure.pop_all()

    @classmethod
    def from_config(cls, cfg: RewardConfig) -> RewardPool:
        """A pool with the settings of the reward section."""
        assert cfg.function is not None
        return cls(
            cfg.function,
            cfg.num_processes,
            sample_seconds=cfg.sample_seconds,
            on_error=cfg.on_error,
        )

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, Any]]
    ) -> list[dict[str, float]]:
        """For each sample {"score": float, ...}, in order. Lengths must agree; may be 0.

        on_error=raise: RewardError for the first failed sample. zero: a failed sample scores 0,
        and every sample has "errors", 0 or 1.
        """
        assert not self._closed, "score after close"
        assert len(prompts) == len(responses) == len(rows), (len(prompts), len(responses))
        samples = list(zip(prompts, responses, rows))
        work = Work(len(samples), self._num_processes, strict=self._strict)
        self._replace_ended()
        try:
            while not work.finished:
                self._hand_out(work, samples)
                self._advance(work)
        finally:
            self._drop([process for process in self._processes if process.pending])
        return self._answers(work, samples)

    def close(self) -> None:
        """Kill all worker processes; harmless when repeated."""
        self._closed = True
        self._drop(list(self._processes))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while len(self._processes) < self._num_processes:
            self._processes.append(
                RewardProcess(
                    self._name,
                    start_seconds=self._start_seconds,
                    sample_seconds=self._sample_seconds,
                )
            )

    def _replace_ended(self) -> None:
        """Make up for processes that went between two calls: no sample is to blame."""
        ended = [process for process in self._processes if process.ended]
        for process in ended:
            logger.warning("reward worker process %s ended while idle; replaced", process.pid)
        self._drop(ended)
        self._fill()

    def _drop(self, processes: list[RewardProcess]) -> None:
        for process in processes:
            process.kill()
            self._processes.remove(process)

    def _hand_out(self, work: Work, samples: Sequence[Any]) -> None:
        for process in self._processes:
            if process.idle and (numbers := work.next_chunk()):
                process.give(numbers, [samples[number] for number in numbers])

    def _advance(self, work: Work) -> None:
        """Wait for any process to say something, end or run out of time; take note of it."""
        self._wait()
        for process in list(self._processes):
            messages, end = process.advance()
            for message in messages:
                self._take(process, message, work)
            if end is not None:
                self._lose(process, f"ended its worker process ({end})", work)
            elif process.seconds_left() <= 0:
                self._lose(process, self._late(process), work)

    def _wait(self) -> None:
        poll = select.poll()
        for process in self._processes:
            poll.register(process, select.POLLIN | (select.POLLOUT if process.has_unsent else 0))
        seconds = min([_LOOK_SECONDS, *(process.seconds_left() for process in self._processes)])
        poll.poll(max(0.0, seconds * 1000))

    def _take(self, process: RewardProcess, message: dict[str, Any], work: Work) -> None:
        if "scores" in message:
            work.scores[process.pending.popleft()] = message["scores"]
        elif "failed" in message:
            work.fail(process.pending.popleft(), message["failed"])
        elif "refused" in message:
            raise ConfigError(message["refused"])
        elif "broken" in message:
            raise RewardError(
                f"reward.function {self._name!r}: its module raised {message['broken'].rstrip()}\n"
                f"expected a module that can be imported; mend it"
            )
        else:
            process.ready = True

    def _late(self, process: RewardProcess) -> str:
        if not process.ready:
            return f"did not end within {self._start_seconds:g} s"
        return f"ran longer than reward.sample_seconds ({self._sample_seconds:g} s)"

    def _lose(self, process: RewardProcess, cause: str, work: Work) -> None:
        """Blame the sample that the process was at, put the others back, start another."""
        self._drop([process])
        if not process.ready:
            raise RewardError(
                f"reward.function {self._name!r}: importing its module {cause}; expected a module "
                f"that can be imported by itself; run `python -c` on it to see why"
            )
        if process.pending:
            work.fail(process.pending.popleft(), cause)
            work.give_back(list(process.pending))
        self._fill()

    def _answers(self, work: Work, samples: Sequence[Any]) -> list[dict[str, float]]:
        for number in sorted(work.failures):
            text = self._describe(work.failures[number], samples[number])
            if self._strict:
                raise RewardError(text)
            self._num_errors += 1
            if self._num_errors % _LOG_EVERY == 1:
                logger.warning("reward error %d, scored 0: %s", self._num_errors, text)
        if self._strict:
            return [work.scores[number] for number in range(len(samples))]
        failed = {number: {"score": 0.0, "errors": 1.0} for number in work.failures}
        return [
            failed.get(number) or work.scores[number] | {"errors": 0.0}
            for number in range(len(samples))
        ]

    def _describe(self, cause: str, sample: Sequence[Any]) -> str:
        """The same text whichever rank and process the sample was on."""
        what, _, trace = cause.partition("\n")
        text = (
            f"reward.function {self._name!r} {what}; expected a finite number or a dict with "
            f'"score" within {self._sample_seconds:g} s; mend the function, or set '
            f"reward.on_error=zero to score such samples 0\n"
            f"prompt: {_excerpt(sample[0])}\nresponse: {_excerpt(sample[1])}"
        )
        return f"{text}\n{trace.rstrip()}" if trace else text


def _excerpt(text: str) -> str:
    half = _EXCERPT_LETTERS // 2
    shown = text if len(text) <= _EXCERPT_LETTERS else f"{text[:half]} ... {text[-half:]}"
    return repr(shown)
