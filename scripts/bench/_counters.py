"""What a piece of work asks of torch, counted outside of it: bytes on the wire, bytes allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_WRAPPED = ("broadcast", "batch_isend_irecv", "all_gather_into_tensor")


class WireCounter:
    """Counts what torch.distributed is asked to move, for this rank, while it is entered.

    Work that is moved by another function is not counted, so compare with what was planned.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0

    def __enter__(self) -> WireCounter:
        self._own = {name: getattr(dist, name) for name in _WRAPPED}
        for name, function in self._own.items():
            setattr(dist, name, self._counting(getattr(self, f"_{name}"), function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._own.items():
            setattr(dist, name, function)

    def _counting(self, count: Callable[..., None], function: Callable[..., Any]) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            return function(*args, **kwargs)

        return counted

    def _broadcast(self, tensor: torch.Tensor, src: int, group: Any, **_: Any) -> None:
        if src == dist.get_rank():
            self.sent += tensor.nbytes * (dist.get_world_size(group) - 1)
        else:
            self.received += tensor.nbytes

    def _batch_isend_irecv(self, messages: list[dist.P2POp]) -> None:
        self.sent += sum(each.tensor.nbytes for each in messages if each.op is dist.isend)
        self.received += sum(each.tensor.nbytes for each in messages if each.op is dist.irecv)

    def _all_gather_into_tensor(
        self, output: torch.Tensor, values: torch.Tensor, group: Any, **_: Any
    ) -> None:
        self.sent += values.nbytes * (dist.get_world_size(group) - 1)
        self.received += output.nbytes - values.nbytes


def peak_allocated(work: Callable[[], Any]) -> tuple[int, int]:
    """(most, last) bytes that work has allocated on the CPU and not yet freed, by the allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    most = now = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most, now
