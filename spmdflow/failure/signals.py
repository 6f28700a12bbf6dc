"""Signals that ask a run to save and stop, and how a session receives them."""

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
    """`STOP_SIGNALS` during a session: blocked in every thread, and read by the comm thread.

    Threads that start later inherit the mask, and `sigtimedwait` takes the signals. Threads that
    libraries started before (gloo's) do not block them. For those a handler is set, whose wakeup
    descriptor is written by the interpreter's C code in whichever thread receives the signal, even
    while the main thread is in a collective. A signal that was ignored before stays ignored: nohup
    ignores SIGHUP, and a background job of a shell ignores SIGINT.
    This is a context manager for the main thread. `take` belongs to the comm thread.
    """

    def __enter__(self) -> Signals:
        """Block the signals and set the handlers."""
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._taken = {each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        self._old_handlers: dict[int, Any] = {}
        for number in self._taken:
            self._old_handlers[number] = signal.signal(number, _ignore)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def take(self) -> set[int]:
        """Return the numbers of the signals that arrived since the last call, and consume them.

        Signals that were ignored before the session are not included. Does not wait.
        """
        arrived: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            arrived.update(os.read(self.descriptor, 4096))
        while (pending := signal.sigtimedwait(self._taken, 0)) is not None:
            arrived.add(pending.si_signo)
        return arrived & self._taken

    def __exit__(self, *_: object) -> None:
        """Restore the mask and the handlers of before."""
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        os.close(self._writer)
        os.close(self.descriptor)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replace the default action, which would end the process. `take` reports the signal."""
