"""`Replica`: the ranks that hold one copy of a generator's weights, and the groups over them.

All ranks of a replica generate the same rows together. Their groups are the trainer's: made by
GroupTable before, strided or contiguous, of some ranks of the world. Knows no generators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.errors import ProtocolError
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout


@dataclass(frozen=True)
class Replica:
    """A generation replica as one of its ranks sees it."""

    rank: int
    """Global rank."""
    ranks: tuple[int, ...]
    """Global ranks, ascending: tp fastest, then pp."""
    tp_ranks: tuple[int, ...]
    pp_ranks: tuple[int, ...]
    groups: GroupTable | None = None

    @classmethod
    def of(cls, layout: Layout, rank: int, groups: GroupTable) -> Replica:
        """The replica of a global rank under the layout's generation sizes."""
        ranks, tp_ranks, pp_ranks = (
            layout.axis_group(rank, axis) for axis in ("gen_replica", "gen_tp", "gen_pp")
        )
        return cls(rank, ranks, tp_ranks, pp_ranks, groups)

    @classmethod
    def alone(cls) -> Replica:
        """This rank by itself; needs no group."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(rank, (rank,), (rank,), (rank,))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def tp_size(self) -> int:
        """t_g."""
        return len(self.tp_ranks)

    @property
    def pp_size(self) -> int:
        """p_g."""
        return len(self.pp_ranks)

    @property
    def tp_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.tp_ranks.index(self.rank)

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.pp_ranks.index(self.rank)

    def group(self, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        """The group over some of the replica's ranks; ProtocolError if it was not made."""
        if self.groups is None:
            raise ProtocolError(
                f"replica: got ranks {ranks} without process groups, expected a GroupTable that "
                f"has them; build it with Replica.of(layout, rank, groups)"
            )
        return self.groups.get(ranks, backend=backend)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's values, by place in the replica; all have the same shape."""
        if self.size == 1:
            return [values]
        found = [torch.empty_like(values) for _ in self.ranks]
        backend = "nccl" if values.is_cuda else "gloo"
        dist.all_gather(found, values, group=self.group(self.ranks, backend))
        return found

    def check_equal(self, what: str, values: Tensor) -> None:
        """ProtocolError unless all ranks hold the same values (same shape everywhere)."""
        everyone = self.gather(values)
        others = [rank for rank, v in zip(self.ranks, everyone) if not torch.equal(v, everyone[0])]
        if others:
            raise ProtocolError(
                f"generate: got other {what} on ranks {others} than on rank {self.ranks[0]}, "
                f"expected the same on all ranks {self.ranks} of a generation replica; hand every "
                f"rank of a replica the same rows (transfer_mode 3D_ALL_MICRO_DP does) and the "
                f"same weights"
            )
