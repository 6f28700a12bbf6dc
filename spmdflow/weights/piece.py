"""`Piece`: a box of a Hugging Face tensor and the equal box of a local tensor. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from spmdflow.blocks.box import Box, merged, subtract_all


@dataclass(frozen=True)
class Piece:
    """The elements `box` of the tensor `name` lie at `local` in the local tensor."""

    name: str
    """Hugging Face name."""
    box: Box
    local: Box
    """Of the same shape as box."""

    def __post_init__(self) -> None:
        assert self.box.shape == self.local.shape, self

    def part(self, box: Box) -> Piece:
        """The piece of those elements; box lies in this piece's."""
        assert self.box.contains(box), (self, box)
        moved = [
            (low + start - origin, low + stop - origin)
            for (low, _), (origin, _), (start, stop) in zip(
                self.local.bounds, self.box.bounds, box.bounds, strict=True
            )
        ]
        return Piece(self.name, box, Box(tuple(moved)))


@dataclass(frozen=True)
class LocalTensor:
    """A tensor that an engine holds; elements outside its pieces are padding, kept at zero."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return prod(self.shape)

    @property
    def padding(self) -> int:
        """Elements that belong to no Hugging Face tensor."""
        return self.size - sum(piece.local.size for piece in self.pieces)


ShardTable = Mapping[str, LocalTensor]
"""Local tensors by the engine's own parameter names, in the order of the model."""


def stack(parts: Iterable[tuple[str, Box]], *, num_rows: int = 0) -> LocalTensor:
    """Boxes laid beneath one another, in order; num_rows pads the end. Empty boxes vanish.

    All boxes have the same shape but for dimension 0.
    """
    pieces: list[Piece] = []
    inner: tuple[int, ...] = ()
    row = 0
    for name, box in parts:
        height, *rest = box.shape
        inner = tuple(rest)
        local = Box(((row, row + height), *((0, size) for size in inner)))
        if box.size:
            pieces.append(Piece(name, box, local))
        row += height
    return LocalTensor((max(row, num_rows), *inner), tuple(pieces))


def rows_of(shape: Sequence[int], start: int, stop: int) -> Box:
    """Rows start .. stop - 1 of a tensor of that shape, cut to the rows that there are."""
    start, stop = min(start, shape[0]), min(stop, shape[0])
    return Box(((start, stop), *((0, size) for size in shape[1:])))


def columns_of(shape: Sequence[int], start: int, stop: int) -> Box:
    """Columns start .. stop - 1 of a matrix of that shape."""
    return Box(((0, shape[0]), (start, stop)))


def pieces_by_name(table: ShardTable) -> dict[str, list[Box]]:
    """Boxes by Hugging Face name of what a rank holds; a tied copy makes one appear twice."""
    found: dict[str, list[Box]] = {}
    for tensor in table.values():
        for piece in tensor.pieces:
            found.setdefault(piece.name, []).append(piece.box)
    return found


def owned(tables: Sequence[ShardTable]) -> list[ShardTable]:
    """The tables with only the pieces that each rank owns: every element once over all of them.

    The first holder in the order of tables owns what several hold (norms, replicated kv heads, a
    tied copy). So hashes add up, and files hold each element once.
    """
    taken: dict[str, list[Box]] = {}
    result: list[ShardTable] = []
    for table in tables:
        mine: dict[str, LocalTensor] = {}
        for name, tensor in table.items():
            pieces = tuple(part for piece in tensor.pieces for part in _untaken(piece, taken))
            mine[name] = replace(tensor, pieces=pieces)
        result.append(mine)
    return result


def _untaken(piece: Piece, taken: dict[str, list[Box]]) -> list[Piece]:
    """The parts of a piece that nobody owns yet; they are taken now."""
    boxes = taken.setdefault(piece.name, [])
    rest = subtract_all([piece.box], boxes)
    boxes[:] = merged([*boxes, *rest])
    return [piece.part(box) for box in rest]
