"""`Wire`: what carries the messages of a plan. Knows no weights.

Inside a job they go over its process groups. To another program, which has a world of its own,
they go over a gloo group that the two make for themselves: it is in nobody's list of groups, so
neither program's groups notice it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.reshard import Message, ReshardPlan
from spmdflow.parallel.group import GroupTable

_PAUSE_SECONDS = 1e-3
"""Between two looks at a wait that something else may end."""


class Wire(Protocol):
    """One rank's end."""

    def start(self, message: Message, values: Tensor) -> list[dist.Work]:
        """Send values (1-D, contiguous) if this rank is the message's source, else fill them."""


class GroupWire:
    """The process groups of a job."""

    def __init__(self, groups: GroupTable, plan: ReshardPlan, *, rank: int) -> None:
        """groups: has those of the plan that have several ranks."""
        self._groups, self._rank = groups, rank
        self._scope = next((group for group in plan.groups if rank in group), (rank,))

    def start(self, message: Message, values: Tensor) -> list[dist.Work]:
        """A broadcast where a group of just these ranks exists, else point to point."""
        group = self._groups.get_or_none(message.ranks)
        if group is not None:
            work = dist.broadcast(values, src=message.source, group=group, async_op=True)
            return [_started(work)]
        group = self._groups.get(self._scope)
        if message.source != self._rank:
            return [_started(dist.irecv(values, message.source, group=group))]
        return [
            _started(dist.isend(values, destination, group=group))
            for destination in message.destinations
        ]


class SocketWire:
    """A gloo group over ranks of two programs; tensors are in host memory."""

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], *, rank: int, address: str, seconds: float
    ) -> None:
        """Meet the others, who give the same ranks; address: this host's, as they reach it.

        seconds: limit of every wait. WeightSyncError if they have not come by then.
        """
        self._ranks, self._rank = list(ranks), rank
        gloo: Any = dist.ProcessGroupGloo  # its methods are in no stub
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=seconds)
        try:
            self._group = gloo(store, self._ranks.index(rank), len(self._ranks), options)
        except RuntimeError as err:
            raise self._apart(f"no meeting within {seconds:g} s at {address}") from err

    def start(self, message: Message, values: Tensor) -> list[dist.Work]:
        """Point to point."""
        place = self._ranks.index
        if message.source != self._rank:
            return [self._group.recv([values], place(message.source), 0)]
        return [self._group.send([values], place(each), 0) for each in message.destinations]

    def share(
        self, values: Tensor, source: int, *, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """The source's values on every rank, in place; collective.

        meanwhile: called again and again until it is done; what it raises ends the wait.
        WeightSyncError if the other side is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        work = self._group.broadcast([values], options)
        while meanwhile is not None and not work.is_completed():
            meanwhile()
            time.sleep(_PAUSE_SECONDS)
        try:
            work.wait()
        except RuntimeError as err:
            raise self._apart(f"nothing from rank {source}") from err

    def _apart(self, what: str) -> WeightSyncError:
        return WeightSyncError(
            f"weights between two programs: got {what} on rank {self._rank} of {self._ranks}, "
            f"expected all of them; look at the log of the other program, restart it and this run"
        )


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to another; nothing is sent. OSError if there is no way."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
