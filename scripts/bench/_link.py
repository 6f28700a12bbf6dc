"""Plain collectives and messages of a number of bytes: what a transition is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def seconds_of(work: Callable[[], object], group: dist.ProcessGroup) -> float:
    """From the moment when all ranks of the group begin until the last is done."""
    dist.barrier(group)
    start = time.perf_counter()
    work()
    spent = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=group)
    return float(spent)


def all_gather(num_bytes: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """A plain all-gather by which each rank receives that many bytes, into memory that is there."""
    peers = dist.get_world_size(group) - 1
    own = torch.ones(num_bytes // 4 // peers)
    output = torch.zeros(own.numel() * (peers + 1))
    return lambda: dist.all_gather_into_tensor(output, own, group=group)


def messages(
    rank: int, edges: Sequence[tuple[int, int, int]], group: dist.ProcessGroup
) -> Callable[[], object]:
    """One message for each (source, destination, bytes), all at once, from and to ready memory."""
    mine = [edge for edge in edges if rank in edge[:2]]
    values = [torch.ones(num_bytes // 4) for _, _, num_bytes in mine]

    def exchange() -> None:
        works = [
            dist.isend(tensor, destination, group=group)
            if source == rank
            else dist.irecv(tensor, source, group=group)
            for tensor, (source, destination, _) in zip(values, mine, strict=True)
        ]
        for work in works:
            assert work is not None
            work.wait()

    return exchange
