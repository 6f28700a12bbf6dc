"""The systems of the paper's Table 2, moving real tensors, one object a rank.

Settings of the benchmark and of the test that holds `cost` to what happens, not of users: weights
without a model. Each keeps exactly what its `Cost` counts:

    training --gather--> the height of the transition --cut--> generation --release--> training

| system | gather | cut |
|---|---|---|
| ds_chat, hybridflow_v | the whole model, from everyone or from the replica | keep vLLM's shard |
| hybridflow copy, two_copies | vLLM's shard, by the planner | |
| hybridflow flat, blocks | peers' rows, in place | |
| shared | nothing | |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench._cost import Case, Cost
from spmdflow.hybrid_engine.reshard import ReshardPlan
from spmdflow.hybrid_engine.shared_storage import SharedStorage
from spmdflow.hybrid_engine.stream import ALONE_BYTES, GroupWire, WeightStream
from spmdflow.parallel.group import GroupTable
from spmdflow.weights.move import Block, Blocks, Read, blocks, fill
from spmdflow.weights.ranks import vllm_tables
from spmdflow.weights.table import ShardTable


@dataclass(frozen=True)
class Seat:
    """Where a system runs."""

    rank: int
    """Global rank."""
    groups: GroupTable
    """Has `groups_of` the cost."""
    dtype: torch.dtype
    device: torch.device
    seconds: float
    """Limit of one message."""
    alone_bytes: int = ALONE_BYTES
    """See WeightStream."""


class System:
    """What one rank of one system holds and does; here: what needs no transition (shared)."""

    def __init__(self, case: Case, cost: Cost, seat: Seat) -> None:
        """All ranks of the case build it together; weights are zero until `load`."""
        self.case = case
        self.cost = cost
        self.seat = seat
        self._table = cost.have.get(seat.rank, {})
        self.training = self._trained()
        """Local tensors by the trainer's names."""

    def load(self, read: Read) -> None:
        """Write the training weights."""
        fill(self.training, self._table, read)

    def transition(self) -> int:
        """Ready to generate; bytes that this rank received."""
        received = self.gather()
        self.cut()
        return received

    def gather(self) -> int:
        """Bring the weights here. Collective."""
        return 0

    def cut(self) -> None:
        """Free what generation does not read."""

    def generation(self) -> Iterable[Block]:
        """What generation reads on this rank, after `gather` or `cut`."""
        return blocks(self.training, self._table)

    def release(self) -> None:
        """Free what training does not read."""

    def _trained(self) -> dict[str, Tensor]:
        return self._empty(self._table)

    def _empty(self, table: ShardTable) -> dict[str, Tensor]:
        seat = self.seat
        return {
            name: torch.zeros(tensor.shape, dtype=seat.dtype, device=seat.device)
            for name, tensor in table.items()
        }


class Streamed(System):
    """A second copy in the layout of the cost's `need`, by its plan (hybridflow copy, two_copies).

    Its memory is given back for training only where the cost says so.
    """

    def __init__(self, case: Case, cost: Cost, seat: Seat) -> None:
        """The second copy is made at once."""
        super().__init__(case, cost, seat)
        assert isinstance(cost.plan, ReshardPlan)
        self._stream = WeightStream(
            cost.plan,
            rank=seat.rank,
            wire=GroupWire(seat.groups, cost.plan, rank=seat.rank),
            dtype=seat.dtype,
            device=seat.device,
            seconds=seat.seconds,
            alone_bytes=seat.alone_bytes,
        )
        self._held_table = self._needed = cost.need.get(seat.rank, {})
        self._held = self._empty(self._needed)
        self.release()

    def gather(self) -> int:
        """Kept and sent boxes into the second copy."""
        _resize(self._held.values(), full=True)
        source = blocks(self.training, self._table)
        return self._stream.run(source, blocks(self._held, self._held_table))

    def generation(self) -> Iterable[Block]:
        """The second copy."""
        return blocks(self._held, self._held_table)

    def release(self) -> None:
        """A pool of its own keeps its weights."""
        if self.cost.system != "two_copies":
            _resize(self._held.values(), full=False)


class Gathered(Streamed):
    """The whole model on every rank, of which generation then takes its shard."""

    def cut(self) -> None:
        """vLLM's shard out of the whole model, which goes."""
        table = vllm_tables(self.case.arch, self.case.layout)[self.seat.rank]
        shard = self._empty(table)
        fill(shard, table, Blocks(self.generation()).read)
        self._held = shard
        self._held_table = table

    def release(self) -> None:
        """The shard goes; the next gather begins with whole tensors again."""
        self._held = self._empty(self._needed)
        self._held_table = self._needed
        super().release()


class OneCopy(System):
    """Training shards in the rows of a storage that generation reads (hybridflow flat, blocks)."""

    def gather(self) -> int:
        """Peers' rows; flat as the cost has it: by an all-gather or by broadcasts."""
        return self._storage.fill(gathers=self.case.gathers_rows)

    def generation(self) -> Iterator[Block]:
        """The own row and the peers'."""
        for member, peer in enumerate(self._ranks):
            table = self.cost.have[peer]
            views = {name: self._storage.view(member, name) for name in table}
            yield from blocks(views, table)

    def release(self) -> None:
        """Peers' rows go, unless addresses are fixed."""
        self._storage.free()

    def _trained(self) -> dict[str, Tensor]:
        layout = self.case.layout
        rank = self.seat.rank
        self._ranks = ranks = layout.axis_group(rank, "micro_dp")
        group = self.seat.groups.get(ranks) if len(ranks) > 1 else None
        is_flat = self.cost.mode == "flat"
        stage = layout.coordinate(rank).pp
        self._storage = SharedStorage(ranks, rank, group, stage=stage, is_flat=is_flat)
        starts, size = self.case.buffer_places(self._table)
        dtype = self.seat.dtype
        device = self.seat.device
        own = None if self.cost.mode == "flat" else torch.zeros(size, dtype=dtype, device=device)
        places = {name: (start, self._table[name].shape) for name, start in starts.items()}
        self._storage.allocate_rows(places, size, own=own, dtype=dtype, device=device)
        self._storage.free()
        return {name: self._storage.view(self._storage.own, name) for name in self._table}


_SYSTEMS: dict[str, type[System]] = {
    "ds_chat": Gathered,
    "hybridflow_v": Gathered,
    "hybridflow flat": OneCopy,
    "hybridflow blocks": OneCopy,
    "hybridflow copy": Streamed,
    "two_copies": Streamed,
    "shared": System,
}


def system_of(case: Case, cost: Cost, seat: Seat) -> System:
    """The system of a cost of the case. Collective over the ranks of the case."""
    return _SYSTEMS[f"{cost.system} {cost.mode}".strip()](case, cost, seat)


def groups_of(cost: Cost) -> list[tuple[int, ...]]:
    """The process groups that the system needs."""
    return [] if cost.plan is None else [group for group in cost.plan.groups if len(group) > 1]


def _resize(tensors: Iterable[Tensor], *, full: bool) -> None:
    """Give tensors their memory, or take it."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        size = tensor.nbytes if full else 0
        if storage.nbytes() != size:  # torch would allocate once more for the same size
            storage.resize_(size)
