"""`SharedStorage`: one copy of the weights for training and generation (paper section 5.3).

A generation shard is made of the D training shards of a micro-dp group. Each rank keeps one *row*
per member: a flat tensor that holds the member's training shard as Megatron stores it. Its own
row is what training reads and writes; the others are filled for generation.

    flat     all rows in one tensor (D, S), S the longest; peers' rows stay allocated
    blocks   rows apart: the own one is Megatron's buffer, those of peers have no memory while the
             model trains

Knows flat tensors, where in them a parameter lies, and one process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.parallel.group import all_gather_plain

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
        self,
        ranks: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        stage: int,
        is_flat: bool,
    ) -> None:
        """ranks: the micro-dp group, ascending; group: its process group, None if alone."""
        self._ranks = ranks
        self._group = group
        self._stage = stage
        self._is_flat = is_flat
        self.own = ranks.index(rank)
        self.rows: list[Row] = []
        self.values: list[Tensor] = []
        """Flat tensors by member; a peer's may be without memory."""

    def adopt(self, ddp: Any, names: Mapping[Tensor, str]) -> None:
        """Move a Megatron DDP model's parameters into this rank's row, before its optimizer exists.

        With the distributed optimizer the row is laid out as Megatron's own buffer, which then
        is the row; otherwise parameter after parameter.
        """
        (buffer,) = ddp.buffers  # one dtype, no experts
        places = dict[str, Place]()
        size = 0
        if buffer.param_data is None:
            for parameter, name in names.items():
                places[name] = (size, tuple(parameter.shape))
                size = size + parameter.numel()
        else:
            index = buffer.param_index_map.items()
            places = {}
            for p, (start, _, _) in index:
                places[names[p]] = (start, tuple(p.shape))
            size = buffer.param_data.numel()
        like = next(iter(names))
        self.lay_out(places, size, own=buffer.param_data, dtype=like.dtype, device=like.device)
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

        places, size: of this rank's row. own: its tensor, if rows are apart and it exists already.
        """
        row = Row(self._stage, size, places)
        self.rows = [row] if self._group is None else all_gather_plain(row, self._group)
        if self._is_flat:
            longest = max(row.size for row in self.rows)
            self._all = torch.zeros(len(self.rows), longest, dtype=dtype, device=device)
            self.values = [row[: facts.size] for row, facts in zip(self._all, self.rows)]
        else:
            self.values = [
                own
                if own is not None and member == self.own
                else torch.empty(row.size, dtype=dtype, device=device)
                for member, row in enumerate(self.rows)
            ]

    def view(self, member: int, name: str) -> Tensor:
        """A parameter of a member, in place; its memory may come and go."""
        start, shape = self.rows[member].places[name]
        return self.values[member][start : start + torch.Size(shape).numel()].view(shape)

    def fill(self, *, gathers: bool | None = None) -> int:
        """Bring the peers' rows here; returns the bytes received. Collective over the group.

        gathers: flat rows, padding included, by one all-gather in place; None: unless on gloo. Else
        every member broadcasts its row, in place: on gloo faster than a gather, and no temporary.
        """
        if self._group is None:
            return 0
        if gathers is None:
            gathers = dist.get_backend(self._group) != "gloo"
        if gathers and self._is_flat:
            dist.all_gather_into_tensor(self._all.view(-1), self._all[self.own], group=self._group)
            return (len(self.rows) - 1) * self._all[0].nbytes
        for values in self.values:
            if values.untyped_storage().nbytes() == 0:
                values.untyped_storage().resize_(values.nbytes)
        works = []
        for rank, values in zip(self._ranks, self.values, strict=True):
            works.append(dist.broadcast(values, src=rank, group=self._group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        return sum(values.nbytes for values in self.values) - self.values[self.own].nbytes

    def free(self) -> bool:
        """Free the memory of the peers' rows if possible; True: they must be filled again."""
        if self._group is None or self._is_flat:
            return False
        for member, values in enumerate(self.values):
            if member != self.own:
                values.untyped_storage().resize_(0)
        return True

    def _repoint(self, names: Mapping[Tensor, str], buffer: Any) -> None:
        """Parameters, and Megatron's buffer and buckets, read and write the own row."""
        row = self.values[self.own]
        old = buffer.param_data
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
