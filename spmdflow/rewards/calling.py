"""How a worker process calls reward functions: one sample or a list, plain or `async def`, again.

| form | called |
|---|---|
| fn(prompt, response, row) | for one sample |
| fn(prompts, responses, rows) | for the samples of a chunk at once; returns one result for each |
| async def, either form | many at once in one event loop (`Concurrent`) |

A call that raises is repeated up to `retries` times, after 0.5, 1, 2, ... s, all within the limit
of the call. This module imports no torch; it runs in the worker process.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Answer = dict[str, Any]
"""{"scores": ...} or {"failed": why}."""
Sample = Sequence[Any]
"""(prompt, response, row)."""
Chunk = Sequence[Sequence[Any]]
"""([function numbers], prompt, response, row) of each sample."""
Interpret = Callable[[Any], Answer]
"""Turns what a function returned for one sample into an answer."""
Describe = Callable[[BaseException], str]
_BATCHED = ("prompts", "responses", "rows")
_FIRST_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class CallLimits:
    """What the settings allow a call."""

    seconds: float
    """reward.sample_seconds."""
    retries: int = 0
    concurrency: int = 1
    """Calls of async functions at once in this process."""


@dataclass(frozen=True)
class RewardCaller:
    """Calls one function."""

    function: Callable[..., Any]
    interpret: Interpret
    describe: Describe
    """"TYPE: message" of an exception, and its traceback in the user's code."""
    limits: CallLimits

    @property
    def is_async(self) -> bool:
        """Whether it is an `async def`."""
        return is_async(self.function)

    @property
    def is_batched(self) -> bool:
        """Whether it takes the samples of a chunk at once."""
        return is_batched(self.function)

    def call(self, samples: Sequence[Sample]) -> list[Answer]:
        """Return the answers of a plain function for these samples, one if it is not batched."""
        for attempt in range(self.limits.retries + 1):
            if attempt:
                time.sleep(_wait_seconds(attempt))
            try:
                return self._answers(self.function(*self._arguments(samples)), samples)
            except BaseException as err:
                failure = err
        return [{"failed": "raised " + self.describe(failure)}] * len(samples)

    async def call_async(self, samples: Sequence[Sample]) -> list[Answer]:
        """The same of an `async def`, within the limit of seconds."""
        limit = asyncio.timeout(self.limits.seconds)
        try:
            async with limit:
                return await self._call_repeatedly(samples)
        except TimeoutError as err:
            where = _describe_wait(err.__cause__)
            cause = f"ran longer than reward.sample_seconds ({self.limits.seconds:g} s){where}"
            return [{"failed": cause}] * len(samples)

    async def _call_repeatedly(self, samples: Sequence[Sample]) -> list[Answer]:
        """Await the function until it does not raise, at most retries + 1 times."""
        for attempt in range(self.limits.retries + 1):
            if attempt:
                await asyncio.sleep(_wait_seconds(attempt))
            try:
                return self._answers(await self.function(*self._arguments(samples)), samples)
            except asyncio.CancelledError:  # the limit
                raise
            except BaseException as err:
                failure = err
        return [{"failed": "raised " + self.describe(failure)}] * len(samples)

    def _arguments(self, samples: Sequence[Sample]) -> tuple[Any, ...]:
        """Return the arguments of a call; rows are copies, which the function may change."""
        if self.is_batched:
            prompts = [prompt for prompt, _, _ in samples]
            responses = [response for _, response, _ in samples]
            return prompts, responses, [copy.deepcopy(row) for _, _, row in samples]
        ((prompt, response, row),) = samples
        return prompt, response, copy.deepcopy(row)

    def _answers(self, value: Any, samples: Sequence[Sample]) -> list[Answer]:
        """Return the answer for each sample from what the function returned."""
        if not self.is_batched:
            return [self.interpret(value)]
        try:
            results = list(value)
        except TypeError:
            results = []
        if len(results) != len(samples):
            got = f"returned {len(results)} results" if results else f"returned {value!r:.60}"
            return [{"failed": f"{got} for {len(samples)} samples"}] * len(samples)
        return [self.interpret(result) for result in results]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, behind partials, or the __call__ of an object is an `async def`."""
    while isinstance(function, partial):
        function = function.func
    is_coroutine = inspect.iscoroutinefunction
    return is_coroutine(function) or is_coroutine(type(function).__call__)


def is_batched(function: Callable[..., Any]) -> bool:
    """Whether its first parameters are prompts, responses, rows."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # a builtin without a signature
        return False
    return tuple(names[: len(_BATCHED)]) == _BATCHED


def chunk_answers(
    callers: Sequence[RewardCaller],
    chunk: Chunk,
    before_batch: Callable[[], None],
) -> Iterable[tuple[int, Answer]]:
    """Yield (number of the function, answer) for each call of a chunk, in the order of the calls.

    Batched functions are called first, once for all of their samples; before_batch is called
    before each of these calls.
    """
    batched: dict[int, Any] = {}
    for number, caller in enumerate(callers):
        samples = [sample for numbers, *sample in chunk if number in numbers]
        if caller.is_batched and samples:
            before_batch()
            batched[number] = iter(caller.call(samples))
    for numbers, *sample in chunk:
        for number in numbers:
            if number in batched:
                yield number, next(batched[number])
            else:
                (answer,) = callers[number].call([sample])
                yield number, answer


class Concurrent:
    """Serves chunks of calls in an event loop; at most limits.concurrency calls run at once.

    Answers are sent in the order of the calls. A plain function of another term is called between
    the others, and blocks them meanwhile.
    """

    def __init__(
        self,
        callers: Sequence[RewardCaller],
        limits: CallLimits,
        send: Callable[[int, Answer], None],
    ) -> None:
        """send gets the number of the function and its answer."""
        self._callers = callers
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._send = send
        self._answers: asyncio.Queue[tuple[int, Awaitable[Answer]] | None] = asyncio.Queue()

    async def serve(self, chunks: Iterable[Chunk]) -> None:
        """Answer all calls of the chunks, which are read in a thread; return after the last one."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            for chunk in chunks:
                loop.call_soon_threadsafe(self._start, chunk)
            loop.call_soon_threadsafe(self._answers.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        while (item := await self._answers.get()) is not None:
            number, answer = item
            self._send(number, await answer)

    def _start(self, chunk: Chunk) -> None:
        """Start a task for each call of a chunk, and one for each batched function."""
        batches: dict[int, asyncio.Task[list[Answer]]] = {}
        for number, caller in enumerate(self._callers):
            samples = [sample for numbers, *sample in chunk if number in numbers]
            if caller.is_batched and samples:
                batches[number] = asyncio.create_task(self._run(caller, samples))
        positions = dict.fromkeys(batches, 0)
        for numbers, *sample in chunk:
            for number in numbers:
                if number in batches:
                    task = _item_of(batches[number], positions[number])
                    positions[number] += 1
                else:
                    task = _item_of(
                        asyncio.create_task(self._run(self._callers[number], [sample])), 0
                    )
                self._answers.put_nowait((number, task))

    async def _run(self, caller: RewardCaller, samples: Sequence[Sample]) -> list[Answer]:
        """Call a function when one of the slots is free."""
        async with self._slots:
            if caller.is_async:
                return await caller.call_async(samples)
            return caller.call(samples)


async def _item_of(task: asyncio.Task[list[Answer]], position: int) -> Answer:
    """Return one answer of a batch."""
    return (await task)[position]


def _wait_seconds(attempt: int) -> float:
    """Seconds before the given repetition: 0.5, 1, 2, ..."""
    return _FIRST_WAIT_SECONDS * 2.0 ** (attempt - 1)


def _describe_wait(err: BaseException | None) -> str:
    """Return the lines where a cancelled coroutine waited, innermost first; "" if unknown."""
    if err is None:
        return ""
    lines = []
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        if frame.filename != __file__ and "/asyncio/" not in frame.filename:
            lines.append(f'  File "{frame.filename}", line {frame.lineno} in {frame.name}')
    return "\nIt was there (innermost call first):\n" + "\n".join(lines) if lines else ""
