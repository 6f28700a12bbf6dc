"""One thread waits for many descriptors and can be woken by others. epoll and an eventfd."""

from __future__ import annotations

import contextlib
import os
import select
import threading


class Waiter:
    """`wait` belongs to one thread; `wake` may be called by any, also after `close`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._guard = threading.Lock()  # a closed descriptor's number may belong to a file
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when descriptor is readable."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Undo `watch`. Both work from any thread, also while another one waits."""
        self._epoll.unregister(descriptor)

    def wait(self, seconds: float) -> list[int]:
        """The watched descriptors that are readable, at the latest after seconds."""
        ready = [descriptor for descriptor, _ in self._epoll.poll(seconds)]
        if self._wake in ready:
            ready.remove(self._wake)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return ready

    def wake(self) -> None:
        """Let the running or next `wait` return at once."""
        with self._guard:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        with self._guard:
            self._epoll.close()
            os.close(self._wake)
            self._wake = -1
