"""Early methods: run before their call's turn, each in a thread, as soon as its rows have arrived.

The thread waits for the rows as long as the calls take that make them; it ends with the session.
At the turn of the call, waiting for the result counts against the limit of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from spmdflow.data.store import RowCondition
from spmdflow.errors import DeadlineError
from spmdflow.failure.cause import UNWIND_SECONDS


class EarlyResult(Future[Any]):
    """The future result of an early method."""

    def __init__(self, arrival: RowCondition) -> None:
        super().__init__()
        self._arrival = arrival
        self.add_done_callback(lambda _: arrival.wake())

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it, by default until the session ends; raises what it raised."""
        if not self._arrival.wait_until(self.done, timeout):
            raise TimeoutError(f"no result of the early method after {timeout} s")
        return super().result()


class EarlyMethods:
    """Those of one rank that have begun, by the number of their call."""

    def __init__(self, arrival: RowCondition) -> None:
        self._arrival = arrival
        self._results: dict[int, EarlyResult] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, number: int, wait: Callable[[], None], run: Callable[[], Any]) -> None:
        """Start a daemon thread that calls wait() until the rows are there, and then run().

        `take(number)` gives the future of its result. An exception of either function becomes the
        future's exception. Forgets threads that have ended.
        """
        result = EarlyResult(self._arrival)
        self._results[number] = result
        thread = threading.Thread(
            target=self._run, args=(result, wait, run), name=f"early-{number}", daemon=True
        )
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def take(self, number: int) -> EarlyResult | None:
        """The future of a call's early method, at the call's turn; None: no early method runs."""
        return self._results.pop(number, None)

    def end(self) -> None:
        """Let waits for rows raise RuntimeError, and join all threads; close workers before.

        DeadlineError with their names if threads have not ended UNWIND_SECONDS (10 s) after their
        join began.
        """
        self._arrival.end(RuntimeError("early method: the session has ended"))
        for thread in self._threads:
            thread.join(UNWIND_SECONDS)
        left = []
        for thread in self._threads:
            if thread.is_alive():
                left.append(thread.name)
        if left:
            where = f"early methods of the calls {left}"
            got = f"threads that still run {UNWIND_SECONDS:g} s after the run"
            expected = "them to end when close() of their worker has been called"
            do = "give what they wait for a limit"
            raise DeadlineError.of(where, got, expected, do)

    def _run(self, result: EarlyResult, wait: Callable[[], None], run: Callable[[], Any]) -> None:
        """Call wait(), then run(); set the future to the result or to any exception."""
        try:
            wait()
            result.set_result(run())
        except BaseException as err:
            result.set_exception(err)
