"""A pool of worker processes that run one reward function, or several, on many samples.

Results are in the order of the samples. Each process has all functions. If a function raises,
returns no score, takes too long or ends its process, the error reports the sample, the cause and
the location in the function. A lost process is replaced, and the other samples continue.
"""

from __future__ import annotations

import json
import logging
import math
import select
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from spmdflow.config.data_source import SOURCE_COLUMN
from spmdflow.config.reward import RewardTerm, reward_terms
from spmdflow.config.schema import RewardConfig
from spmdflow.errors import ConfigError, RewardError
from spmdflow.rewards.process import RewardProcess, wrote_to_channel

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2  # a process that ends without closing its socket is noticed within this
_LOG_EVERY = 100
_EXCERPT_LETTERS = 200
_OUTCOMES = {"raise": "", "zero": "scored 0", "drop": "dropped"}


Result = dict[str, Any]
"""Scores and further numbers of a sample by name, and "answer" as text or None."""


@dataclass(frozen=True)
class Judgement:
    """Result of one call of `RewardPool.score`."""

    results: list[Result]
    """One per sample, in order."""
    first_failure: str = ""
    """Why the first failed sample failed; empty if none did."""


class RewardPool:
    """Worker processes of one rank. They start at construction and end at `close` or with the rank.

    function: like the setting reward.function; a term `model` is ignored, because the caller adds
    it. Raises ConfigError if a function cannot be found, and RewardError if its module cannot be
    imported within start_seconds. Thread-safe: calls of `score` take turns, `close` aborts them.
    """

    def __init__(
        self,
        function: object,
        num_processes: int = 1,
        *,
        sample_seconds: float = 10.0,
        on_error: str = "raise",
        start_seconds: float = 120.0,
        concurrency: int = 64,
        retries: int = 0,
        source_column: str = SOURCE_COLUMN,
    ) -> None:
        """on_error: raise, zero or drop; the last two record a failure and continue.

        concurrency: calls of async functions at once, over all processes. retries: how often a call
        that raised is repeated. source_column: field of a row that chooses the entry of a table.
        """
        assert on_error in ("raise", "zero", "drop"), on_error
        terms = reward_terms("reward.function", function)
        self._terms: list[RewardTerm] = [term for term in terms if not term.is_model]
        assert self._terms, function
        self._definitions = [""] * len(self._terms)
        self._num_processes = num_processes
        self._sample_seconds = sample_seconds
        self._start_seconds = start_seconds
        self._concurrency = max(1, concurrency // num_processes)
        self._retries = retries
        self._source_column = source_column
        self._strict = on_error == "raise"
        self._outcome = _OUTCOMES[on_error]
        self._processes: list[RewardProcess] = []
        self._closed = False
        self._using = threading.RLock()
        self._num_errors = 0
        self._causes: set[tuple[str, str]] = set()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._start_missing()
            while not all(process.ready for process in self._processes):
                self._advance(CallQueue((), 1, strict=False))
            on_failure.pop_all()

    @classmethod
    def from_config(cls, cfg: RewardConfig) -> RewardPool:
        """A pool with the settings of the reward section, which must have a function."""
        return cls(
            cfg.function,
            cfg.num_processes,
            sample_seconds=cfg.sample_seconds,
            on_error=cfg.on_error,
            concurrency=cfg.concurrency,
            retries=cfg.retries,
            source_column=cfg.source_column,
        )

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[dict[str, Any]],
        *,
        row_ids: Sequence[int] | None = None,
    ) -> Judgement:
        """Score samples; return one {"score": float, ...} each, in order. There may be no samples.

        With several functions the score is the weighted sum, and each function's score is reported
        under the name of its term. A function in a table scores only rows of its source.
        RewardError for a row that no function scores. on_error=raise: RewardError for the first
        failed sample. zero, drop: a function that failed scores 0, and every sample has "errors",
        the number of functions that failed (0 if none). The three sequences must have the same
        length. Blocks until all processes have answered; processes that have ended are replaced
        first.
        row_ids: identify samples in messages.
        """
        assert len(prompts) == len(responses) == len(rows), (len(prompts), len(responses))
        if row_ids is None:
            ids = [""] * len(rows)
        else:
            ids = [f" {number}" for number in row_ids]
        samples = list(zip(prompts, responses, rows, ids, strict=True))
        calls = self._calls_of(samples)
        work = CallQueue(
            [call for group in calls for call in group], self._num_processes, strict=self._strict
        )
        with self._using:
            self._replace_ended()
            try:
                while not work.finished:
                    self._refuse_after_close()
                    self._hand_out(work, samples)
                    self._advance(work)
            finally:
                self._kill([process for process in self._processes if process.pending])
            return self._collect(work, samples, calls)

    def _calls_of(self, samples: Sequence[Any]) -> list[list[int]]:
        """Return the numbers of each sample's calls: sample * number of functions + function.

        RewardError for a row that no function scores, because no table has its source.
        """
        width = len(self._terms)
        calls = []
        for sample, (_, _, row, row_id) in enumerate(samples):
            source = row.get(self._source_column)
            numbers = []
            for function, term in enumerate(self._terms):
                if term.scores_rows_of(source):
                    numbers.append(sample * width + function)
            if not numbers:
                known = sorted({str(term.source) for term in self._terms})
                raise RewardError(
                    f"reward.function: row{row_id} has {self._source_column}={source!r}, but the "
                    f"tables have {', '.join(known)}; add this source to a table, give the rows of "
                    f"the file this column, or set reward.source_column to the one that they have\n"
                    f"row: {_shorten(json.dumps(row))}"
                )
            calls.append(numbers)
        return calls

    def close(self) -> None:
        """Kill all worker processes. Repeated calls do nothing."""
        self._closed = True
        with self._using:
            self._kill(list(self._processes))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_missing(self) -> None:
        while len(self._processes) < self._num_processes:
            self._processes.append(
                RewardProcess(
                    [(term.function, dict(term.arguments)) for term in self._terms],
                    start_seconds=self._start_seconds,
                    sample_seconds=self._sample_seconds,
                    concurrency=self._concurrency,
                    retries=self._retries,
                )
            )

    def _replace_ended(self) -> None:
        """Replace processes that ended between two calls, with a warning for each.

        No sample counts as failed. RewardError if the pool was closed.
        """
        self._refuse_after_close()
        ended = []
        for process in self._processes:
            if process.ended:
                ended.append(process)
        for process in ended:
            logger.warning("reward worker process %s ended while idle; replaced", process.pid)
        self._kill(ended)
        self._start_missing()

    def _refuse_after_close(self) -> None:
        """Raise RewardError if `close` was called, as when the run ends."""
        if self._closed:
            got = "the end of its run while it scored"
            do = "see why the run ended"
            raise RewardError.of("reward.function", got, "to finish before", do)

    def _kill(self, processes: list[RewardProcess]) -> None:
        for process in processes:
            process.kill()
            self._processes.remove(process)

    def _hand_out(self, work: CallQueue, samples: Sequence[Any]) -> None:
        """Send a chunk of waiting calls to each process that wants some.

        A call's number is sample * number of functions + function. A sample's texts are sent once,
        with the numbers of its functions.
        """
        for process in self._processes:
            if numbers := work.next_chunk(process.num_wanted):
                calls: dict[int, list[int]] = {}  # sample -> functions: its texts are sent once
                for number in numbers:
                    sample, function = divmod(number, len(self._terms))
                    calls.setdefault(sample, []).append(function)
                process.give(numbers, [(calls[sample], *samples[sample][:3]) for sample in calls])

    def _advance(self, work: CallQueue) -> None:
        """Wait until a process answers, ends or runs out of time, at most 0.2 s, and act on it.

        Messages are recorded in `work`. A process that ended, sent what it may not send, or
        exceeded its time is killed and replaced. Errors as in `_record` and `_replace`.
        """
        self._wait()
        for process in list(self._processes):
            messages, end = process.advance()
            for message in messages:
                if not process.accepts(message):
                    end = wrote_to_channel(message)
                    break
                self._record(process, message, work)
            if end is not None:
                self._replace(process, end, work)
            elif process.seconds_left() <= 0 and process.ready:
                limit = f"reward.sample_seconds ({self._sample_seconds:g} s)"
                self._replace(process, f"ran longer than {limit}", work)
            elif process.seconds_left() <= 0:
                self._replace(process, f"did not end within {self._start_seconds:g} s", work)

    def _wait(self) -> None:
        """Block until a process can be read or written, or one's time is over, at most 0.2 s."""
        poll = select.poll()
        for process in self._processes:
            poll.register(process, select.POLLIN | (select.POLLOUT if process.has_unsent else 0))
        seconds = min([_LOOK_SECONDS, *(process.seconds_left() for process in self._processes)])
        poll.poll(max(0.0, seconds * 1000))

    def _record(self, process: RewardProcess, message: dict[str, Any], work: CallQueue) -> None:
        """Apply a message of a process: a result, a failure, or "ready".

        Results and failures belong to the process's oldest pending call. Raises ConfigError or
        RewardError if the function cannot be used at all: it is refused, its module raised, or it
        forked and both processes returned.
        """
        if "scores" in message:
            work.scores[process.pending.popleft()] = message["scores"]
        elif "failed" in message:
            work.fail(process.pending.popleft(), message["failed"])
        elif "concurrent" in message:
            process.is_concurrent = True
        elif "batch" in message:  # a call for many samples has begun
            return
        elif "forked" in message:
            number = message["forked"]
            raise RewardError(
                f"reward.function {self._terms[number].function!r} forked, and its child returned "
                f"as well; expected one return for each sample; end the child with os._exit(0), or "
                f"start it with subprocess\nfunction: {self._definitions[number]}"
            )
        elif "refused" in message:
            raise ConfigError(message["refused"])
        elif "broken" in message:
            name, text = message["broken"]
            raise RewardError(
                f"reward.function {name!r}: its module raised {text.rstrip()}\n"
                f"expected a module that can be imported; fix it"
            )
        else:
            process.ready = True
            self._definitions = message["ready"]

    def _replace(self, process: RewardProcess, what: str, work: CallQueue) -> None:
        """Kill a process and start a new one; its running call failed, the others are requeued.

        RewardError if it was still importing the module of a function.
        what: the cause, a phrase such as "ran longer than ...".
        """
        stack = process.stack()
        where = stack and f"\nIt was there (innermost call first):\n{stack}"
        self._kill([process])
        if not process.ready:
            names = ", ".join(repr(term.function) for term in self._terms)
            raise RewardError(
                f"reward.function {names}: importing its module {what}; expected a module that can "
                f"be imported on its own; run `python -c` on it to see why{where}"
            )
        if process.pending:
            work.fail(process.pending.popleft(), what + where)
            work.requeue(list(process.pending))
        self._start_missing()

    def _collect(
        self, work: CallQueue, samples: Sequence[Any], calls: Sequence[Sequence[int]]
    ) -> Judgement:
        """Return the combined result of each sample, and report the failures in the order of calls.

        A failed call raises RewardError if on_error is raise; otherwise it scores 0 with one error.
        calls: numbers of each sample's calls.
        """
        first_failure = ""
        for number in sorted(work.failures):
            text = self._report(number, work.failures[number], samples)
            first_failure = first_failure or text
        if not self._strict:
            for result in work.scores.values():
                result["errors"] = 0.0
            work.scores |= {number: {"score": 0.0, "errors": 1.0} for number in work.failures}
        results = []
        for numbers in calls:
            by_term = {number % len(self._terms): work.scores[number] for number in numbers}
            results.append(combine_terms(self._terms, by_term))
        return Judgement(results=results, first_failure=first_failure)

    def _report(self, number: int, cause: str, samples: Sequence[Any]) -> str:
        """Return the text of a failed call; raise it as RewardError if on_error is raise.

        Otherwise counts the error and logs the first one of each kind (function and first line of
        the cause), and one in a hundred of the others.
        number: of the call.
        """
        sample, function = divmod(number, len(self._terms))
        text = self._describe(cause, samples[sample], function)
        if self._strict:
            raise RewardError(text)
        self._num_errors += 1
        kind = (self._terms[function].function, cause.partition("\n")[0])
        if self._num_errors % _LOG_EVERY == 1 or kind not in self._causes:
            logger.warning("reward error %d, %s: %s", self._num_errors, self._outcome, text)
        if len(self._causes) < _LOG_EVERY:
            self._causes.add(kind)
        return text

    def _describe(self, cause: str, sample: Sequence[Any], function: int) -> str:
        """Return the error text of a failed sample: cause, excerpts, the function's place, trace.

        It does not depend on the sample's rank or process, so it is the same in every run.
        sample: (prompt, response, row, row id).
        """
        what, _, trace = cause.partition("\n")
        prompt, response, row, row_id = sample
        if self._strict:
            instead = ", or set reward.on_error=drop to omit such samples"
        else:
            instead = ""
        text = (
            f"reward.function {self._terms[function].function!r} {what}; expected a finite number "
            f'or a dict with "score" within {self._sample_seconds:g} s; fix the function{instead}\n'
            f"prompt: {_shorten(prompt)!r}\nresponse: {_shorten(response)!r}\n"
            f"row{row_id}: {_shorten(json.dumps(row))}\nfunction: {self._definitions[function]}"
        )
        if trace:
            return f"{text}\n{trace.rstrip()}"
        return text


def _shorten(text: str) -> str:
    """Return the first and last 100 characters of a text, with " ... " between.

    A text of at most 200 characters is returned unchanged.
    """
    half = _EXCERPT_LETTERS // 2
    if len(text) <= _EXCERPT_LETTERS:
        return text
    return f"{text[:half]} ... {text[-half:]}"


_MAX_CHUNK = 64


class CallQueue:
    """Tracks which calls (function x sample) are waiting, answered or failed."""

    def __init__(self, calls: Sequence[int], num_workers: int, *, strict: bool) -> None:
        """calls: their numbers, ascending. strict: calls after a failed one need not run."""
        self.scores: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, str] = {}
        """Call number -> cause of the failure, with the traceback if there is one."""
        self._calls = calls
        self._waiting = deque(calls)
        self._num_workers = num_workers
        self._strict = strict

    @property
    def finished(self) -> bool:
        """Whether all calls whose result matters have ended.

        In strict mode these are the calls before the first failed one.
        """
        if self._strict and self.failures:
            first = min(self.failures)
            return all(number in self.scores for number in self._calls if number < first)
        return len(self.scores) + len(self.failures) == len(self._calls)

    def next_chunk(self, most: float = math.inf) -> list[int]:
        """Take the next call numbers for a worker from the queue; [] if none is waiting.

        Takes an even share of half of what waits, so that chunks shrink towards the end; at most
        64, and at most `most`.
        """
        share = -(-len(self._waiting) // (2 * self._num_workers))
        size = int(min(_MAX_CHUNK, most, share))
        return [self._waiting.popleft() for _ in range(size)]

    def fail(self, number: int, cause: str) -> None:
        """Record a failed call. In strict mode, waiting calls after it are dropped."""
        self.failures[number] = cause
        self._drop_unneeded()

    def requeue(self, numbers: Sequence[int]) -> None:
        """Put the calls of a lost worker back at the front of the queue."""
        self._waiting.extendleft(reversed(numbers))
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        if self._strict and self.failures:
            first = min(self.failures)
            self._waiting = deque(number for number in self._waiting if number < first)


def combine_terms(all_terms: Sequence[RewardTerm], results: Mapping[int, Result]) -> Result:
    """Combine the results of functions for one sample into {"score": weighted sum, ...}.

    Each named term's score is under its name. Further numbers of the first term keep their names
    unless a term has that name; those of the other terms are prefixed with their term's name
    (format_length). "errors" add up, and the first "answer" counts.
    results: index of the term -> its result, for the terms that score the sample.
    """
    names = {term.name for term in all_terms}
    total: Result = {"score": 0.0}
    for number, result in sorted(results.items()):
        term = all_terms[number]
        total["score"] += term.weight * result["score"]
        for key, value in result.items():
            if key == "errors":
                total[key] = total.get(key, 0.0) + value
            elif key == "answer":
                total.setdefault(key, value)
            elif key != "score":
                is_prefixed = term.name != all_terms[0].name or key in names
                total[f"{term.name}_{key}" if is_prefixed else key] = value
        if term.name:
            total[term.name] = result["score"]
    return total
