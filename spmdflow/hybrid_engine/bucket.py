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
"""What is sent of a tensor; tensors that ranks have and need alike share one object."""


@dataclass(frozen=True)
class Part:
    """A box of a Hugging Face tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Message:
    """`source` sends the same parts to every destination."""

    source: int
    destinations: tuple[int, ...]
    """Ascending; the source is not among them."""
    parts: tuple[Part, ...]
    relayed: bool = False
    """As `Bucket.relayed`."""

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
    """By tensor, in the order of the model."""
    relayed: bool = False
    """Sources send what they received in an earlier bucket; else what they train."""

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """In the order in which every rank starts them."""
        return self.messages_of(self.moves)

    def messages_of(self, moves: Iterable[tuple[str, Iterable[Move]]]) -> tuple[Message, ...]:
        """Those of some of the moves."""
        parts: dict[tuple[int, tuple[int, ...]], list[Part]] = {}
        for name, some in moves:
            for move in some:
                parts.setdefault((move.source, move.destinations), []).append(Part(name, move.box))
        return tuple(Message(*key, tuple(parts[key]), self.relayed) for key in sorted(parts))


@dataclass(frozen=True)
class Chunk:
    """Moves of a tensor that go in one bucket."""

    moves: Moves
    load: np.ndarray
    """(2, ranks) int64: elements that each rank packs, and that reach it."""


Named = list[tuple[str, Chunk]]
"""Chunks with their tensor's name."""


class TensorPlan(NamedTuple):
    """What is sent and kept of a tensor."""

    chunks: list[Chunk]
    relayed: list[Chunk]
    """After all of the others."""
    kept: dict[int, Boxes]


def chunks_of(moves: Sequence[Move], places: Mapping[int, int], limit: int) -> list[Chunk]:
    """Moves in few chunks. In none does a rank pack or receive more than a quarter of limit (in
    elements; or one row), so that buckets fill up; destinations take turns. places: rank -> column
    of `Chunk.load`."""
    most = max(1, limit // 4)
    sent: dict[int, list[Move]] = {}
    for move in sorted(moves):
        sent.setdefault(move.source, []).extend(_pieces(move, most))
    turns = [
        ((number + source) % len(pieces), piece)
        for source, pieces in sent.items()
        for number, piece in enumerate(pieces)
    ]
    found: list[tuple[list[Move], np.ndarray]] = []
    known: dict[tuple[int, ...], np.ndarray] = {}
    for _, piece in sorted(turns):
        source = places[piece.source]
        size = piece.box.size
        ranks = piece.destinations
        if ranks not in known:
            known[ranks] = np.array([places[rank] for rank in ranks])
        reached = known[ranks]
        loads = (max(load[0, source], load[1, reached].max()) for _, load in found)
        fits = (at for at, before in enumerate(loads) if not before or before + size <= most)
        at = next(fits, len(found))
        if at == len(found):
            found.append(([], np.zeros((2, len(places)), dtype=np.int64)))
        chunk, load = found[at]
        chunk.append(piece)
        load[0, source] += size
        load[1, reached] += size
    return [Chunk(tuple(chunk), load) for chunk, load in found]


def _pieces(move: Move, most: int) -> Iterator[Move]:
    """Whole rows of a move, of at most so many elements (or one row)."""
    if move.box.size <= most or not move.box.bounds:
        yield move
        return
    (first, last), *inner = move.box.bounds
    height = max(1, most * (last - first) // move.box.size)
    for start in range(first, last, height):
        box = Box(((start, min(start + height, last)), *inner))
        yield Move(move.source, box, move.destinations)


def pack_buckets(tensors: Mapping[str, TensorPlan], limit: int) -> Iterator[Bucket]:
    """Buckets in the order of the model; what is relayed follows once a bucket is full of it."""
    chunks = ((name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks)
    waiting: Named = []
    for some in _filled(chunks, limit):
        yield _bucket(some)
        arrived = []
        for name, chunk in some:
            if chunk is tensors[name].chunks[-1]:
                arrived.append(name)
        waiting += [(name, chunk) for name in arrived for chunk in tensors[name].relayed]
        *full, waiting = [*_filled(waiting, limit)] or [[]]
        yield from (_bucket(some, relayed=True) for some in full)
    if waiting:
        yield _bucket(waiting, relayed=True)


def _bucket(some: Named, *, relayed: bool = False) -> Bucket:
    return Bucket(tuple((name, chunk.moves) for name, chunk in some), relayed)


def _filled(chunks: Iterable[tuple[str, Chunk]], limit: int) -> Iterator[Named]:
    """Runs of chunks of which no rank packs or receives over limit elements; at least one each."""
    some: Named = []
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
