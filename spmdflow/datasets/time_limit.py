"""A limit of CPU time for foreign code that runs in this thread, such as chat templates.

A template is a program that may never end. Python can only stop it by an exception that another
thread raises in it, so a daemon thread watches the CPU time of threads that run one. Code inside
one long C operation (`"a" * 10**12`) is not stopped before that operation ends.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_EVERY_SECONDS = 0.5
_AGAIN_SECONDS = 1.0
"""CPU time between two attempts to stop the same function."""


class OutOfTime(Exception):
    """The code ran longer than its limit."""


class TimeLimit:
    """Runs functions and stops those that take too much CPU time. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: CPU time of the thread that runs the function, so other load does not count."""
        self.seconds = seconds
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        """Thread -> its CPU time at which its function is stopped."""
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Call the function and return its result; OutOfTime if it took more than `seconds`.

        CPU time of this thread counts. The first call starts a daemon thread, which raises
        OutOfTime in the thread of a function that is too slow. Calls must not be nested in one
        thread.
        """
        thread = threading.get_ident()
        with self._lock:
            self._ends[thread] = time.thread_time() + self.seconds
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="template-time-limit", daemon=True
                )
                self._thread.start()
        try:
            return function()
        finally:
            with self._lock:  # a stop at this very moment is raised here
                self._ends.pop(thread, None)

    def _watch(self) -> None:
        """Loop of the daemon thread: every 0.5 s, raise OutOfTime in threads past their limit.

        It is raised again after each further second of CPU time, as long as the function goes on.
        """
        while True:
            time.sleep(_LOOK_EVERY_SECONDS)
            with self._lock:
                late = []
                for thread, end in self._ends.items():
                    if _used_by(thread) > end:
                        late.append(thread)
                for thread in late:  # repeated, because a finalizer may swallow the exception
                    self._ends[thread] = _used_by(thread) + _AGAIN_SECONDS
                    _raise_in(thread)


def _used_by(thread: int) -> float:
    """CPU time in seconds of a thread that is in `call`."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))
