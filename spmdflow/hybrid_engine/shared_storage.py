"""`SharedStorage`: one copy of the weights for training and generation (paper section 5.3).

A generation shard is made of the D training shards of a micro-dp group. Each rank has one *row* per
member: a flat tensor that holds the member's training shard as Megatron stores it. Training reads
and writes the rank's own row. The others are filled for generation.

    flat     all rows in one tensor (D, S), S the longest; peers' rows stay allocated
    blocks   separate rows: its own row is Megatron's buffer, those of peers have no memory while
             the model trains

Knows flat tensors, the offsets of parameters in them, and one process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.parallel.group import all_gather_plain

Location = tuple[int, tuple[int, ...]]
"""(first element in the row, shape) of a parameter."""


@dataclass(frozen=True)
class Row:
    """The facts about a member's row that the others must know."""

    stage: int
    """Training pipeline stage of the member."""
    size: int
    """Number of elements."""
    locations: Mapping[str, Location]
    """Locations of parameters, by Megatron's local names."""


class SharedStorage:
    """The rows of one micro-dp group on one of its ranks. Call `adopt` first, once."""

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
        """Flat tensor of each member. A peer's may have no memory."""

    def adopt(self, ddp: Any, names: Mapping[Tensor, str]) -> None:
        """Allocates all rows, and moves a Megatron DDP model's parameters into this rank's row.

        Called once, before the model's optimizer exists; all ranks of the group call it together.
        With the distributed optimizer, the row has the layout of Megatron's own buffer and, unless
        rows are flat, is that buffer. Otherwise parameters follow one another. names: Megatron's
        local name of each parameter.
        """
        (buffer,) = ddp.buffers  # one dtype, no experts
        locations = dict[str, Location]()
        size = 0
        if buffer.param_data is None:
            for parameter, name in names.items():
                locations[name] = (size, tuple(parameter.shape))
                size = size + parameter.numel()
        else:
            index = buffer.param_index_map.items()
            locations = {}
            for p, (start, _, _) in index:
                locations[names[p]] = (start, tuple(p.shape))
            size = buffer.param_data.numel()
        like = next(iter(names))
        self.allocate_rows(
            locations, size, own=buffer.param_data, dtype=like.dtype, device=like.device
        )
        self._repoint(names, buffer)

    def allocate_rows(
        self,
        locations: Mapping[str, Location],
        size: int,
        *,
        own: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Exchanges the facts of all rows and allocates the rows (collective over the group).

        Sets self.rows and self.values. Flat rows are views of one tensor (members, longest row) of
        zeros. Separate rows are new and uninitialized, except for this rank's if `own` is given.
        locations, size: of this rank's row.
        """
        row = Row(self._stage, size, locations)
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
        """A parameter of a member, in place. Its memory may be freed and reallocated."""
        start, shape = self.rows[member].locations[name]
        return self.values[member][start : start + torch.Size(shape).numel()].view(shape)

    def fill(self, *, gathers: bool | None = None) -> int:
        """Fetches the peers' rows and returns the bytes received (collective over the group).

        Reallocates freed rows first. Every member broadcasts its row in place. gathers: fetch flat
        rows with one in-place all-gather instead, including padding; None: unless on gloo, where
        broadcasts are faster and need no temporary. Separate rows are always broadcast. Returns 0
        without peers.
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
        """Frees the memory of the peers' rows. Returns whether they must be filled again.

        Does nothing and returns False for flat rows and without peers.
        """
        if self._group is None or self._is_flat:
            return False
        for member, values in enumerate(self.values):
            if member != self.own:
                values.untyped_storage().resize_(0)
        return True

    def _repoint(self, names: Mapping[Tensor, str], buffer: Any) -> None:
        """Makes the parameters, Megatron's buffer and its buckets use this rank's own row.

        The parameters' values are copied into the row, unless they are there already. A buffer
        without param_data is left alone.
        """
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
