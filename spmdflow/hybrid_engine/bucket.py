"""`Bucket`: weights that are in flight at the same time, and how a plan is packed into buckets.

No rank packs or receives more than a limit per bucket (a single row of a tensor that is larger
than the limit goes alone). Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spmdflow.blocks.box import Box
from spmdflow.blocks.plan import Boxes, Move

Moves = tuple[Move, ...]
"""The moves of a tensor. Tensors with the same distribution over ranks share one object."""


@dataclass(frozen=True)
class BoxPart:
    """A box of a Hugging Face tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Message:
    """`source` sends the same parts to every destination."""

    source: int
    destinations: tuple[int, ...]
    """Ascending, without the source."""
    parts: tuple[BoxPart, ...]
    relayed: bool = False
    """See `Bucket.relayed`."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Source and destinations, ascending: the group of a broadcast."""
        return tuple(sorted((self.source, *self.destinations)))

    @property
    def num_elements(self) -> int:
        """Elements that each destination receives."""
        return sum(part.box.size for part in self.parts)


@dataclass(frozen=True)
class Bucket:
    """Moves that may be in flight at the same time."""

    moves: tuple[tuple[str, Moves], ...]
    """(tensor name, its moves), in the order of the model."""
    relayed: bool = False
    """True: sources forward boxes from an earlier bucket. False: they send their own weights."""

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages, in the order in which every rank starts them."""
        return self.messages_of(self.moves)

    def messages_of(self, moves: Iterable[tuple[str, Iterable[Move]]]) -> tuple[Message, ...]:
        """Returns the messages of some moves, in the order in which every rank starts them.

        Moves with equal source and destinations become parts of one message, in the given order.
        The messages are sorted by (source, destinations).
        """
        parts: dict[tuple[int, tuple[int, ...]], list[BoxPart]] = {}
        for name, some in moves:
            for move in some:
                parts.setdefault((move.source, move.destinations), []).append(
                    BoxPart(name, move.box)
                )
        return tuple(Message(*key, tuple(parts[key]), self.relayed) for key in sorted(parts))


@dataclass(frozen=True)
class Chunk:
    """Moves of a tensor that are in the same bucket."""

    moves: Moves
    load: np.ndarray
    """(2, ranks) int64: elements that each rank packs, and that it receives."""


NamedChunks = list[tuple[str, Chunk]]
"""Chunks with their tensor's name."""


class TensorPlan(NamedTuple):
    """The moves of a tensor, and the boxes that stay on their rank."""

    chunks: list[Chunk]
    relayed: list[Chunk]
    """Sent after all others."""
    local: dict[int, Boxes]
    """By rank: boxes that it both has and needs."""


def chunk_moves(
    moves: Sequence[Move], column_of_rank: Mapping[int, int], limit: int
) -> list[Chunk]:
    """Groups the moves of a tensor into few chunks, and returns them.

    Moves are first cut into complete rows. Each piece goes into the first chunk where no rank then
    packs or receives more than limit / 4 elements (or one row), so that buckets fill up. The pieces
    of the sources are mixed, so that a chunk has several sources and destinations. column_of_rank:
    column of `Chunk.load` for each rank.
    """
    most = max(1, limit // 4)
    sent: dict[int, list[Move]] = {}
    for move in sorted(moves):
        sent.setdefault(move.source, []).extend(_cut_rows(move, most))
    ordered_pieces = [
        ((number + source) % len(pieces), piece)
        for source, pieces in sent.items()
        for number, piece in enumerate(pieces)
    ]
    chunks: list[tuple[list[Move], np.ndarray]] = []
    columns_of_ranks: dict[tuple[int, ...], np.ndarray] = {}
    for _, piece in sorted(ordered_pieces):
        source = column_of_rank[piece.source]
        size = piece.box.size
        ranks = piece.destinations
        if ranks not in columns_of_ranks:
            columns_of_ranks[ranks] = np.array([column_of_rank[rank] for rank in ranks])
        receivers = columns_of_ranks[ranks]
        loads = (max(load[0, source], load[1, receivers].max()) for _, load in chunks)
        fits = (index for index, before in enumerate(loads) if not before or before + size <= most)
        index = next(fits, len(chunks))
        if index == len(chunks):
            chunks.append(([], np.zeros((2, len(column_of_rank)), dtype=np.int64)))
        chunk, load = chunks[index]
        chunk.append(piece)
        load[0, source] += size
        load[1, receivers] += size
    return [Chunk(tuple(chunk), load) for chunk, load in chunks]


def _cut_rows(move: Move, max_elements: int) -> Iterator[Move]:
    """Cuts a move along dimension 0 into moves of at most `max_elements` elements, or one row.

    A move that is small enough, or of a scalar, is yielded as it is.
    """
    if move.box.size <= max_elements or not move.box.bounds:
        yield move
        return
    (first, last), *inner = move.box.bounds
    height = max(1, max_elements * (last - first) // move.box.size)
    for start in range(first, last, height):
        box = Box(((start, min(start + height, last)), *inner))
        yield Move(move.source, box, move.destinations)


def pack_buckets(tensors: Mapping[str, TensorPlan], limit: int) -> Iterator[Bucket]:
    """Packs the chunks of all tensors into buckets, and yields these in the order of `tensors`.

    Per bucket, no rank packs or receives more than `limit` elements, unless a single chunk does. A
    tensor's relayed moves wait until the bucket with its last chunk has been yielded. They follow
    in buckets of their own, once they fill one, or at the end.
    """
    chunks = ((name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks)
    waiting: NamedChunks = []
    for some in _fill_buckets(chunks, limit):
        yield _make_bucket(some)
        arrived = []
        for name, chunk in some:
            if chunk is tensors[name].chunks[-1]:
                arrived.append(name)
        waiting += [(name, chunk) for name in arrived for chunk in tensors[name].relayed]
        *full, waiting = [*_fill_buckets(waiting, limit)] or [[]]
        yield from (_make_bucket(some, relayed=True) for some in full)
    if waiting:
        yield _make_bucket(waiting, relayed=True)


def _make_bucket(some: NamedChunks, *, relayed: bool = False) -> Bucket:
    return Bucket(tuple((name, chunk.moves) for name, chunk in some), relayed)


def _fill_buckets(chunks: Iterable[tuple[str, Chunk]], limit: int) -> Iterator[NamedChunks]:
    """Yields runs of consecutive chunks for one bucket each.

    In a run no rank packs or receives more than `limit` elements in total; a single chunk may
    exceed it.
    """
    some: NamedChunks = []
    load: Any = 0
    for name, chunk in chunks:
        if some and (load + chunk.load).max() > limit:
            yield some
            some = []
            load = 0
        some.append((name, chunk))
        load = load + chunk.load
    if some:
        yield some
