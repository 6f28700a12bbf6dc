"""Early methods: run before their call's turn, each in a thread, as soon as its rows have arrived.

Every wait has a limit. If the rows do not arrive within the limit of a call, the thread gives up,
and the call does all the work at its turn. Every wait ends with the session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from spmdflow.data.store import RowCondition
from spmdflow.errors import DeadlineError
from spmdflow.runtime.failure import UNWIND_SECONDS


class Begun(Future[Any]):
    """The future result of an early method."""

    def __init__(self, label: str, arrival: RowCondition, seconds: float) -> None:
        super().__init__()
        self._label, self._arrival, self._seconds = label, arrival, seconds
        self.add_done_callback(lambda _: arrival.wake())

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it, by default for the limit of a call; raises what it raised."""
        seconds = self._seconds if timeout is None else timeout
        if not self._arrival.wait_until(self.done, seconds):
            got = f"no result after {seconds:g} s"
            expected = "one within the limit of a call"
            do = "give it a limit of its own, or raise run.call_seconds"
            raise DeadlineError.of(self._label, got, expected, do)
        return super().result()


class EarlyMethods:
    """Those of one rank that have begun, by the number of their call."""

    def __init__(self, arrival: RowCondition, seconds: float) -> None:
        """seconds: the limit of a call."""
        self._arrival, self._seconds = arrival, seconds
        self._begun: dict[int, Begun] = {}
        self._threads: list[threading.Thread] = []

    def begin(
        self, number: int, label: str, wait: Callable[[], bool], run: Callable[[], Any]
    ) -> None:
        """Start a thread: wait(), False or DeadlineError if rows do not come, then run()."""
        begun = self._begun[number] = Begun(label, self._arrival, self._seconds)
        thread = threading.Thread(
            target=self._run, args=(number, begun, wait, run), name=f"early-{number}", daemon=True
        )
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def take(self, number: int) -> Begun | None:
        """The future of a call's early method, at the call's turn; None: no early method runs."""
        return self._begun.pop(number, None)

    def end(self) -> None:
        """The session is over, workers are closed: wait until no thread is left."""
        self._arrival.end(RuntimeError("early method: the session has ended"))
        for thread in self._threads:
            thread.join(UNWIND_SECONDS)
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            where = f"early methods of the calls {left}"
            got = f"threads that still run {UNWIND_SECONDS:g} s after the run"
            expected = "them to end when close() of their worker has been called"
            do = "give what they wait for a limit"
            raise DeadlineError.of(where, got, expected, do)

    def _run(
        self, number: int, begun: Begun, wait: Callable[[], bool], run: Callable[[], Any]
    ) -> None:
        try:
            try:
                came = wait()
            except DeadlineError:
                came = False
            if not came and self.take(number) is not None:
                return  # rows are late: the call waits for them at its turn
            begun.set_result(run())  # or its turn has come, and with it its rows
        except BaseException as err:
            begun.set_exception(err)
