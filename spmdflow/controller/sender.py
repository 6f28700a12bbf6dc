"""Numbers orders, sends them, and keeps the records of the running step. Script thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmdflow.controller.result import CallRecord, RowResult
from spmdflow.errors import MessageError
from spmdflow.runtime.failure import script_line
from spmdflow.runtime.order import Order, Pending, Replies, Transport


@dataclass(frozen=True)
class CallSettings:
    """Limits and the seed that calls need."""

    seed: int
    call_seconds: float
    ranks: tuple[int, ...]
    """Every rank of the run, the controller's first."""


class Sender:
    """The compute lane's orders, in the order of the script."""

    def __init__(self, transport: Transport, settings: CallSettings) -> None:
        self.transport, self.settings = transport, settings
        self.step = 0
        self.phase = "train"
        self.records: list[CallRecord] = []
        self._last_number = 0
        self._freed: deque[int] = deque()
        self._unsent: dict[int, list[int]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the run."""
        return self.settings.ranks

    def next_number(self) -> int:
        """The number of the next call or result."""
        self._last_number += 1
        return self._last_number

    def free(self, result: int) -> None:
        """A result lost its last reference; ranks hear of it with the next command."""
        self._freed.append(result)

    def submit(
        self,
        label: str,
        commands: Mapping[int, dict[str, Any]],
        on_done: Callable[[Replies], None] | None = None,
        *,
        answering: tuple[int, ...] = (),
        seconds: float | None = None,
        number: int | None = None,
    ) -> Pending:
        """Send one numbered command to each rank of `commands`; metrics of answering count.

        seconds: the limit of each command, by default that of calls. number: of the result that
        the command makes, if it makes one. MessageError: nothing was sent.
        """
        number = number or self.next_number()
        self._add_freed(commands)
        limit = self.settings.call_seconds if seconds is None else seconds
        order = Order(
            number,
            "compute",
            label,
            commands,
            limit,
            on_done,
            phase=self.phase,
            line=script_line(),
        )
        try:
            pending = self.transport.submit(order)
        except MessageError:  # the script may go on
            for rank, command in commands.items():
                self._unsent.setdefault(rank, []).extend(command.pop("free", []))
            raise
        self.records.append(CallRecord(number, label, self.phase, pending, answering))
        return pending

    def wait_for(self, result: RowResult) -> None:
        """Block until the call that makes the result has replied."""
        for record in self.records:
            if record.number == result.number:
                record.pending.result()

    def _add_freed(self, commands: Mapping[int, dict[str, Any]]) -> None:
        """Frees ride on this command; ranks that it does not reach keep their list for later."""
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        if freed:
            for rank in self.ranks:
                self._unsent.setdefault(rank, []).extend(freed)
        for rank, command in commands.items():
            if rank in self._unsent:
                command["free"] = self._unsent.pop(rank)
