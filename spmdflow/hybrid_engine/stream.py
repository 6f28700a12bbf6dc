"""`WeightStream`: boxes of weights from the ranks that hold them to the ranks that need them.

Planned once, on integers: for every tensor `redistribute` says what is missing where and who
sends it. Run after every update: bucket by bucket, so that what is under way is bounded. Nothing
that a rank holds is sent to it; copies inside a rank convert layout and precision. Works inside
one pool and between two. Knows no engine and no generator. DESIGN section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import redistribute
from spmdflow.blocks.source import NodeOf
from spmdflow.errors import WeightSyncError
from spmdflow.weights.move import Block, BlockReader

BUCKET_BYTES = 64 << 20
"""Bytes that reach one rank in one bucket; one tensor may be more."""

Boxes = Mapping[str, Sequence[Box]]
"""Boxes by Hugging Face name that one rank holds or needs."""
Parcel = tuple[str, Box]


@dataclass
class Bucket:
    """Tensors that travel together; the same on every rank."""

    names: list[str] = field(default_factory=list)
    edges: dict[tuple[int, int], list[Parcel]] = field(default_factory=dict)
    """What goes from a source to a destination, in the order of the message."""

    def received(self, rank: int) -> int:
        """Elements that reach a rank."""
        return sum(
            box.size
            for (_, destination), parcels in self.edges.items()
            for _, box in parcels
            if destination == rank
        )


def plan_buckets(
    have: Mapping[int, Boxes],
    need: Mapping[int, Boxes],
    *,
    max_elements: int,
    node_of: NodeOf | None = None,
) -> list[Bucket]:
    """Buckets of all tensors of need, in the order of their names' first appearance.

    A bucket ends before the tensor with which some rank would receive more than max_elements.
    PlanError if nobody holds an element that is needed.
    """
    buckets = [Bucket()]
    loads: dict[int, int] = {}
    for name in dict.fromkeys(name for boxes in need.values() for name in boxes):
        plan = redistribute(
            {rank: boxes.get(name, ()) for rank, boxes in have.items()},
            {rank: boxes[name] for rank, boxes in need.items() if name in boxes},
            node_of=node_of,
        )
        adds: dict[int, int] = {}
        for edge in plan.edges:
            adds[edge.destination] = adds.get(edge.destination, 0) + edge.box.size
        if any(loads.get(rank, 0) + size > max_elements for rank, size in adds.items()):
            buckets.append(Bucket())
            loads = {}
        buckets[-1].names.append(name)
        for edge in plan.edges:
            parcels = buckets[-1].edges.setdefault((edge.source, edge.destination), [])
            parcels.append((name, edge.box))
        for rank, size in adds.items():
            loads[rank] = loads.get(rank, 0) + size
    return [bucket for bucket in buckets if bucket.names]


class WeightStream:
    """The planned way of a model's weights, as one rank runs it."""

    def __init__(
        self,
        have: Mapping[int, Boxes],
        need: Mapping[int, Boxes],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        seconds: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """have, need: equal on every rank of group. dtype: what travels (the receivers').

        group holds every rank of have and need; None if there is one rank only.
        """
        self._rank, self._group, self._dtype = rank, group, dtype
        self._limit = timedelta(seconds=seconds)
        max_elements = max(1, bucket_bytes // dtype.itemsize)
        self.buckets = plan_buckets(have, need, max_elements=max_elements)

    def received_bytes(self, rank: int) -> int:
        """Planned bytes that reach a rank in one run."""
        return sum(bucket.received(rank) for bucket in self.buckets) * self._dtype.itemsize

    @property
    def peak_bytes(self) -> int:
        """Planned most bytes that are under way to or from this rank at once."""
        return max((self._in_flight(bucket) for bucket in self.buckets), default=0)

    def run(self, source: Iterable[Block], target: Iterable[Block]) -> int:
        """Write every box of target; source and target are this rank's live views (or none).

        Returns the bytes received. All ranks of the group run together. WeightSyncError if a
        box of the target is left unwritten, or a message does not come in time.
        """
        held, wanted = list(source), _by_name(target)
        reader, received = BlockReader(held), 0
        by_name = _by_name(held)
        for bucket in self.buckets:
            arrived = self._exchange(bucket, reader)
            received += sum(values.nbytes for _, values, _ in arrived)
            landed = _by_name(arrived)
            for name in bucket.names:
                for view, box in wanted.get(name, ()):
                    _write(name, view, box, [*by_name.get(name, ()), *landed.get(name, ())])
        return received

    def _exchange(self, bucket: Bucket, reader: BlockReader) -> list[Block]:
        """Send and receive this rank's edges; what arrived, as blocks."""
        incoming, works, kept = [], [], []
        for (source, destination), parcels in bucket.edges.items():
            if destination == self._rank:
                message = self._empty(parcels)
                incoming.append((message, parcels))
                works.append((dist.irecv(message, source, group=self._group), source))
            elif source == self._rank:
                message = self._packed(parcels, reader)
                kept.append(message)  # until it is sent
                works.append((dist.isend(message, destination, group=self._group), destination))
        for work, peer in works:
            self._wait(work, peer, bucket)
        return [block for message, parcels in incoming for block in _unpacked(message, parcels)]

    def _packed(self, parcels: Sequence[Parcel], reader: BlockReader) -> Tensor:
        parts = [
            reader.read(name, box).detach().to(self._dtype).reshape(-1) for name, box in parcels
        ]
        return torch.cat(parts)

    def _empty(self, parcels: Sequence[Parcel]) -> Tensor:
        size = sum(box.size for _, box in parcels)
        device = torch.device("cpu")
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        return torch.empty(size, dtype=self._dtype, device=device)

    def _wait(self, work: dist.Work | None, peer: int, bucket: Bucket) -> None:
        assert work is not None, "this rank is not in the group"
        try:
            work.wait(self._limit)
        except RuntimeError as err:
            raise WeightSyncError(
                f"weights {bucket.names[0]} to {bucket.names[-1]}: rank {self._rank} got no "
                f"message through with rank {peer}, expected it within "
                f"{self._limit.total_seconds():g} s; look at the log of rank {peer}"
            ) from err

    def _in_flight(self, bucket: Bucket) -> int:
        touching = [
            box.size
            for edge, parcels in bucket.edges.items()
            for _, box in parcels
            if self._rank in edge
        ]
        return sum(touching) * self._dtype.itemsize


def boxes_of(blocks: Iterable[Block]) -> dict[str, list[Box]]:
    """The boxes of some blocks, by name."""
    found: dict[str, list[Box]] = {}
    for name, _, box in blocks:
        found.setdefault(name, []).append(box)
    return found


def _by_name(blocks: Iterable[Block]) -> dict[str, list[tuple[Tensor, Box]]]:
    found: dict[str, list[tuple[Tensor, Box]]] = {}
    for name, values, box in blocks:
        found.setdefault(name, []).append((values, box))
    return found


def _unpacked(message: Tensor, parcels: Sequence[Parcel]) -> Iterator[Block]:
    start = 0
    for name, box in parcels:
        yield name, message[start : start + box.size].view(box.shape), box
        start += box.size


def _write(name: str, view: Tensor, box: Box, sources: Iterable[tuple[Tensor, Box]]) -> None:
    """Fill a view from what lies here and what arrived; overlaps have equal values."""
    done: list[Box] = []
    with torch.no_grad():
        for values, held in sources:
            common = box.intersect(held)
            if common is not None and common not in done:
                view[common.slices(box)].copy_(values[common.slices(held)])
                done.append(common)
    missing = subtract_all([box], done)
    if missing:
        raise WeightSyncError(
            f"weights {name}: got no values of {missing[0].bounds}, expected all of {box.bounds}; "
            f"the plan and the ranks' blocks disagree: report this message"
        )
