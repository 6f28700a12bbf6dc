"""Signals that ask a run to save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

STOP_SIGNALS: dict[int, str] = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
}
"""Signals that ask a run to save and stop, in words."""


class Signals:
    """`STOP_SIGNALS` during a session: held back from every thread, read by the comm thread.

    They are blocked, so threads started later inherit that and `sigtimedwait` takes them. Threads
    that libraries started before (gloo's) do not block them; for those a handler is set, whose
    wakeup descriptor is written by the interpreter's C code in whichever thread is hit, even while
    the main thread sits in a collective. A signal that was ignored before stays so: nohup ignores
    SIGHUP, and a shell's background job SIGINT.
    A context manager for the main thread; `take` belongs to the comm thread.
    """

    def __enter__(self) -> Signals:
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._taken = {each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        self._old_handlers: dict[int, Any] = {}
        for number in self._taken:
            self._old_handlers[number] = signal.signal(number, _ignore)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def take(self) -> set[int]:
        """Which of them arrived since the last call."""
        arrived: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            arrived.update(os.read(self.descriptor, 4096))
        while (pending := signal.sigtimedwait(self._taken, 0)) is not None:
            arrived.add(pending.si_signo)
        return arrived & self._taken

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        os.close(self._writer)
        os.close(self.descriptor)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Keeps the default action (sudden death) away; `take` reports the signal."""
