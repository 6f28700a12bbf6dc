"""A limit of processor time for code of others that runs in this thread, such as chat templates.

A template is a program that may never end. Python has no other way to stop one than an exception
that another thread raises in it, so a daemon thread looks at the processor time of those that run.
Code that is inside one long operation of C (`"a" * 10**12`) is not stopped before that ends.
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
"""Of processor time, from one stop to the next."""


class OutOfTime(Exception):
    """The code ran longer than its limit."""


class TimeLimit:
    """Runs functions and stops those that take too much processor time. Safe from all threads."""

    def __init__(self, seconds: float) -> None:
        """seconds: of the thread that runs the function; other load does not count."""
        self.seconds = seconds
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        """Thread -> its processor time at which its function is stopped."""
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> T:
        """The function's result; OutOfTime if it was stopped. Not to be nested."""
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
            with self._lock:  # a stop that comes at this very moment is raised here
                self._ends.pop(thread, None)

    def _watch(self) -> None:
        """Stop the functions that are out of time, for as long as the process lives."""
        while True:
            time.sleep(_LOOK_EVERY_SECONDS)
            with self._lock:
                late = []
                for thread, end in self._ends.items():
                    if _used_by(thread) > end:
                        late.append(thread)
                for thread in late:  # again, while it runs: a finalizer would swallow the stop
                    self._ends[thread] = _used_by(thread) + _AGAIN_SECONDS
                    _raise_in(thread)


def _used_by(thread: int) -> float:
    """Processor time of a thread that is inside of `call`, in seconds."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))
