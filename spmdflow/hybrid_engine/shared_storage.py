"""`SharedStorage`: one copy of the weights for training and generation (paper section 5.3).

A generation shard is made of the D training shards of a micro-dp group. Each rank keeps one *row*
per member: a flat tensor that holds the member's training shard as Megatron stores it. Its own
row is what training reads and writes; the others are filled for generation.

    flat     all rows in one tensor (D, S), S the longest; addresses never change
    blocks   rows apart; those of peers have no memory while the model trains

Knows flat tensors, where in them a parameter lies, and one process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Place = tuple[int, tuple[int, ...]]
"""(first element in the row, shape) of a parameter."""


@dataclass(frozen=True)
class Row:
    """What the others must know of a member's row."""

    stage: int
    """Training pipeline stage of the member."""
    size: int
    """Elements."""
    places: Mapping[str, Place]
    """By Megatron's local names."""


class SharedStorage:
    """Rows of one micro-dp group on one of its ranks. `adopt` comes first, once."""

    def __init__(
        self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None, *, stage: int
    ) -> None:
        """ranks: the micro-dp group, ascending; group: its process group, None if alone."""
        self._ranks, self._group, self._stage = ranks, group, stage
        self.own = ranks.index(rank)
        self.rows: list[Row] = []
        self.values: list[Tensor] = []
        """Flat tensors by member; a peer's may be without memory."""

    def adopt(self, ddp: Any, names: Mapping[Tensor, str]) -> None:
        """Give the parameters of a Megatron DDP model their row (its buffers exist, no optimizer).

        With the distributed optimizer the row is laid out as Megatron's own buffer, which then
        is the row; otherwise parameter after parameter.
        """
        (buffer,) = ddp.buffers  # one dtype, no experts
        if buffer.param_data is None:
            places, size = _consecutive(names)
        else:
            index = buffer.param_index_map.items()
            places = {names[p]: (start, tuple(p.shape)) for p, (start, _, _) in index}
            size = buffer.param_data.numel()
        example = next(iter(names))
        self.lay_out(
            places, size, own=buffer.param_data, dtype=example.dtype, device=example.device
        )
        self._repoint(names, buffer)

    def lay_out(
        self,
        places: Mapping[str, Place],
        size: int,
        *,
        own: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the rows. Collective over the group.

        places, size: of this rank's row. own: it, where rows are apart and it exists already.
        """
        self._exchange(Row(self._stage, size, places))
        self.values = self._allocate(dtype, device, own)

    def view(self, member: int, name: str) -> Tensor:
        """A parameter of a member, in place; its memory may come and go."""
        start, shape = self.rows[member].places[name]
        return self.values[member][start : start + torch.Size(shape).numel()].view(shape)

    def fill(self) -> int:
        """Bring the peers' rows here; returns the bytes received. Collective over the group."""
        raise NotImplementedError

    def free(self) -> bool:
        """Give the memory of the peers' rows back if possible; True: they must be filled again."""
        raise NotImplementedError

    @property
    def planned_bytes(self) -> int:
        """Bytes that `fill` receives."""
        others = [row.size for member, row in enumerate(self.rows) if member != self.own]
        return sum(others) * self.values[self.own].element_size()

    def _allocate(
        self, dtype: torch.dtype, device: torch.device, own: Tensor | None
    ) -> list[Tensor]:
        raise NotImplementedError

    def _exchange(self, row: Row) -> None:
        found: list[Any] = [row] * len(self._ranks)
        if self._group is not None:
            dist.all_gather_object(found, row, group=self._group)
        self.rows = found

    def _repoint(self, names: Mapping[Tensor, str], buffer: Any) -> None:
        """Parameters, and Megatron's buffer and buckets, read and write the own row."""
        row, old = self.values[self.own], buffer.param_data
        for parameter, name in names.items():
            view = self.view(self.own, name)
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view
        if old is None or old.data_ptr() == row.data_ptr():
            return
        for bucket in buffer.buckets:
            start = (bucket.param_data.data_ptr() - old.data_ptr()) // old.element_size()
            bucket.param_data = row[start : start + bucket.param_data.numel()]
        buffer.param_data = row

    def _broadcast(self) -> None:
        """Every member sends its row, in place: on gloo faster than a gather, and no temporary."""
        assert self._group is not None
        works = [
            dist.broadcast(values, src=rank, group=self._group, async_op=True)
            for rank, values in zip(self._ranks, self.values, strict=True)
        ]
        for work in works:
            assert work is not None
            work.wait()


class FlatStorage(SharedStorage):
    """All rows in one tensor; peers' rows stay allocated, so addresses are fixed."""

    def _allocate(
        self, dtype: torch.dtype, device: torch.device, own: Tensor | None
    ) -> list[Tensor]:
        longest = max(row.size for row in self.rows)
        self._all = torch.zeros(len(self.rows), longest, dtype=dtype, device=device)
        return [values[: row.size] for values, row in zip(self._all, self.rows, strict=True)]

    def fill(self) -> int:
        """One in-place all-gather (NCCL) or a broadcast a row (gloo)."""
        if self._group is None:
            return 0
        if dist.get_backend(self._group) == "nccl":
            return self.gather()
        self._broadcast()
        return self.planned_bytes

    def gather(self) -> int:
        """The in-place all-gather, whatever the backend; rows move with their padding."""
        if self._group is None:
            return 0
        dist.all_gather_into_tensor(self._all.view(-1), self._all[self.own], group=self._group)
        return (len(self.rows) - 1) * self._all[0].nbytes

    def free(self) -> bool:
        """Nothing is freed, and nothing need be filled again."""
        return False


class BlockStorage(SharedStorage):
    """The own row is Megatron's buffer; peers' rows have memory while the model generates."""

    def _allocate(
        self, dtype: torch.dtype, device: torch.device, own: Tensor | None
    ) -> list[Tensor]:
        values = []
        for member, row in enumerate(self.rows):
            if member == self.own and own is not None:
                values.append(own)
            else:
                values.append(torch.empty(row.size, dtype=dtype, device=device))
        return values

    def fill(self) -> int:
        """Allocate the peers' rows and receive them."""
        if self._group is None:
            return 0
        for values in self.values:
            if values.untyped_storage().nbytes() == 0:
                values.untyped_storage().resize_(values.nbytes)
        self._broadcast()
        return self.planned_bytes

    def free(self) -> bool:
        """Give the peers' rows back."""
        if self._group is None:
            return False
        for member, values in enumerate(self.values):
            if member != self.own:
                values.untyped_storage().resize_(0)
        return True


def _consecutive(names: Mapping[Tensor, str]) -> tuple[dict[str, Place], int]:
    places: dict[str, Place] = {}
    size = 0
    for parameter, name in names.items():
        places[name] = (size, tuple(parameter.shape))
        size += parameter.numel()
    return places, size
