"""SIGTERM and SIGINT during a session: held back from every thread, read by the comm thread.

SIGTERM is blocked, so threads started later inherit that and `sigtimedwait` takes it. Threads
that libraries started before (gloo's) do not block it; for those a handler is set, whose wakeup
descriptor is written by the interpreter's C code in whichever thread is hit, even while the main
thread sits in a collective. SIGINT keeps its KeyboardInterrupt in the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Context manager for the main thread; `take` belongs to the comm thread."""

    def __enter__(self) -> Signals:
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._old_handler: Any = signal.signal(signal.SIGTERM, _ignore)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def take(self) -> set[int]:
        """Which of SIGTERM and SIGINT arrived since the last call."""
        taken: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            taken.update(os.read(self.descriptor, 4096))
        while (pending := signal.sigtimedwait({signal.SIGTERM}, 0)) is not None:
            taken.add(pending.si_signo)
        return taken & {signal.SIGTERM, signal.SIGINT}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGTERM, self._old_handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        os.close(self._writer)
        os.close(self.descriptor)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Keeps the default action (sudden death) away; `take` reports the signal."""
