"""The transport of `--inproc`: one process, no threads, no sockets; every order runs at once.

An exception in an operation reaches the script as it is, and `breakpoint()` works anywhere.
Orders submitted by an `on_done` run when that one returns, in the order of their submission,
as they do with sockets.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType

from spmdflow.runtime.executor import Operation, find_operation
from spmdflow.runtime.order import Order, Pending, too_early

logger = logging.getLogger(__name__)


class ImmediateTransport:
    """What transports without threads share: what is posted runs at once, and in order."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False
        self.stop_requested = False
        """Set by `stop_on_sigterm`; the script reads it between steps."""

    def post(self, function: Callable[[], None]) -> None:
        """Run function after everything submitted before."""
        self._queue.append(function)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._queue:
                self._queue.popleft()()
        finally:
            self._is_running = False
            self._queue.clear()

    def close(self) -> None:
        """Nothing is left to end."""


class InprocTransport(ImmediateTransport):
    """Runs the commands of rank 0 in the caller."""

    world_size = 1

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        super().__init__()
        self._operations = operations

    def submit(self, order: Order) -> Pending:
        """Run an order; what it raises is raised here."""
        pending = Pending(order.label, _never_done)
        self.post(partial(self._run_order, order, pending))
        return pending

    def node_of(self, rank: int) -> int:
        """All on this machine."""
        return 0

    def _run_order(self, order: Order, pending: Pending) -> None:
        replies = {}
        for rank, payload in order.commands.items():
            assert rank == 0, (order.label, rank)
            operation = find_operation(self._operations, order.label, payload.get("operation"))
            replies[rank] = operation(payload, order.number)
        if order.on_done:
            order.on_done(replies)
        pending.resolve(replies)


@contextlib.contextmanager
def stop_on_sigterm(transport: InprocTransport) -> Iterator[None]:
    """Meanwhile SIGTERM asks the script to save and end after its step, as it does under torchrun.

    Only a main thread may handle signals; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        logger.warning("received SIGTERM: the run is saved and ends after this step")
        transport.stop_requested = True

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _never_done(pending: Pending) -> None:
    """Waiting cannot help where everything runs at once."""
    raise too_early(pending)
