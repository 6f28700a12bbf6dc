"""The ranks that divide the tokens of rows among them (context parallelism), and their messages.

workers.context_parallel says what they compute, and explains the kinds of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

ULYSSES = "ulysses"
GATHER = "gather"
RING = "ring"
"""Kinds of attention, values of engine.context_attention."""


@dataclass(frozen=True)
class RingMessage:
    """A tensor on its way to another rank, and one on its way from another rank."""

    sent: Tensor
    """Must not be freed or changed before `wait`."""
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return the received tensor, which kernels that are started from now on may read."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass
class ContextGroup:
    """The ranks that divide rows among them, and their messages."""

    rank: int
    """Position in the group."""
    process_group: dist.ProcessGroup
    attention: str = ULYSSES
    """ULYSSES, GATHER or RING."""
    num_bytes: int = 0
    """What this rank has sent to the others for attention."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.process_group.size()

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send parts[r] (c, ...) to rank r; return what all ranks have sent, in their order."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.process_group)
        self.num_bytes += parts.nbytes // self.size * (self.size - 1)
        return received

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the tensors (n, ...) of all ranks, in their order: (c n, ...)."""
        gathered = own.new_empty(len(own) * self.size, *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=self.process_group)
        self.num_bytes += own.nbytes * (self.size - 1)
        return gathered

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of their part number `rank`: (c n, ...) -> (n, ...).

        Summed in float32, which NCCL's reduce-scatter would not do.
        """
        received = self.all_to_all(parts.unflatten(0, (self.size, -1)))
        return received.float().sum(0).to(parts.dtype)

    def start_shift(self, own: Tensor, distance: int) -> RingMessage:
        """Start to send a tensor to rank + distance and to receive one from rank - distance.

        Both are modulo c. The tensors of all ranks have the same shape; all ranks call this
        together.
        """
        own = own.contiguous()
        received = torch.empty_like(own)
        target = (self.rank + distance) % self.size
        source = (self.rank - distance) % self.size
        group = self.process_group
        operations = [
            dist.P2POp(dist.isend, own, group=group, group_peer=target),
            dist.P2POp(dist.irecv, received, group=group, group_peer=source),
        ]
        self.num_bytes += own.nbytes
        return RingMessage(own, received, dist.batch_isend_irecv(operations))

    @property
    def has_two_chunks(self) -> bool:
        """Whether a rank has a chunk from the front of a row and one from the back (zigzag)."""
        return self.attention != ULYSSES

    @property
    def multiple(self) -> int:
        """The number of tokens of a row must be a multiple of this."""
        return self.size * (2 if self.has_two_chunks else 1)

    def columns(self, length: int, rank: int) -> Tensor:
        """(length / c,) int64: which tokens of a row of this length a rank has, ascending."""
        chunk = length // self.multiple
        assert chunk * self.multiple == length, (length, self.multiple)
        firsts = (rank, 2 * self.size - 1 - rank) if self.has_two_chunks else (rank,)
        return torch.cat([torch.arange(chunk) + first * chunk for first in firsts])
