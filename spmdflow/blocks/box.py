"""`Box`: a product of half-open ranges, and what can be done with boxes. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, order=True)
class Box:
    """Indices i with start <= i < stop in every dimension; without dimensions: one scalar.

    Boxes sort by their bounds, first dimension first.
    """

    bounds: Bounds

    def __post_init__(self) -> None:
        for start, stop in self.bounds:
            assert 0 <= start <= stop, f"box {self.bounds}: expected 0 <= start <= stop"

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Box:
        """The whole of a tensor of that shape."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def slices(self, outer: Box | None = None) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds `outer` (default: the full tensor)."""
        origins = [0] * len(self.bounds) if outer is None else [low for low, _ in outer.bounds]
        return tuple(
            slice(start - origin, stop - origin)
            for (start, stop), origin in zip(self.bounds, origins, strict=True)
        )

    def contains(self, other: Box) -> bool:
        """Whether every element of other is in this box."""
        return not other.size or all(
            start <= low and high <= stop
            for (start, stop), (low, high) in zip(self.bounds, other.bounds, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common elements as a box; None if there are none."""
        common = []
        for (start, stop), (low, high) in zip(self.bounds, other.bounds, strict=True):
            first, last = max(start, low), min(stop, high)
            if first >= last:
                return None
            common.append((first, last))
        return Box(tuple(common))

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes of what is here and not in other, at most two a dimension."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.size else []
        rest, bounds = [], list(self.bounds)
        for dim, (first, last) in enumerate(common.bounds):
            start, stop = bounds[dim]
            for part in ((start, first), (last, stop)):
                if part[0] < part[1]:
                    rest.append(Box((*bounds[:dim], part, *bounds[dim + 1 :])))
            bounds[dim] = (first, last)
        return rest

    def cut(self, dim: int, index: int) -> tuple[Box, Box]:
        """The part below index along dim, and the part from it on."""
        start, stop = self.bounds[dim]
        assert start <= index <= stop, f"box {self.bounds}: cannot cut dimension {dim} at {index}"
        before, after = self.bounds[:dim], self.bounds[dim + 1 :]
        return Box((*before, (start, index), *after)), Box((*before, (index, stop), *after))


def subtract_all(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """What is in boxes and in none of the others; disjoint if boxes are."""
    rest = list(boxes)
    for other in others:
        rest = [part for box in rest for part in box.subtract(other)]
    return rest


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint, non-empty boxes with the same elements."""
    found: list[Box] = []
    for box in boxes:
        found += subtract_all([box] if box.size else [], found)
    return found


def merged(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in as few boxes as joining neighbours gives; sorted. boxes: disjoint."""
    found = sorted(boxes)
    num_dims = len(found[0].bounds) if found else 0
    before = len(found) + 1
    while len(found) < before:
        before = len(found)
        for dim in reversed(range(num_dims)):
            found = _merged_along(found, dim)
    return sorted(found)


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes of the row-major elements start .. stop - 1 of a tensor; at most 2 * ndim - 1.

    A flat optimizer shard of a matrix is a part of a row, whole rows, and a part of a row.
    """
    assert 0 <= start <= stop <= prod(shape), f"range {start}:{stop} of shape {tuple(shape)}"
    if start == stop:
        return []
    if not shape:
        return [Box(())]
    inner = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        return _at(first, flat_range(shape[1:], head, tail))
    boxes = _at(first, flat_range(shape[1:], head, inner)) if head else []
    whole = Box(((first + bool(head), last), *((0, size) for size in shape[1:])))
    if whole.size:
        boxes.append(whole)
    return boxes + (_at(last, flat_range(shape[1:], 0, tail)) if tail else [])


def _at(index: int, boxes: list[Box]) -> list[Box]:
    return [Box(((index, index + 1), *box.bounds)) for box in boxes]


def _merged_along(boxes: list[Box], dim: int) -> list[Box]:
    """Join boxes that touch along dim and agree in every other dimension."""

    def others_first(box: Box) -> tuple[Bounds, tuple[int, int]]:
        return (*box.bounds[:dim], *box.bounds[dim + 1 :]), box.bounds[dim]

    found: list[Box] = []
    for box in sorted(boxes, key=others_first):
        others, (start, stop) = others_first(box)
        if found and others_first(found[-1])[0] == others and found[-1].bounds[dim][1] == start:
            low = found.pop().bounds[dim][0]
            box = Box((*box.bounds[:dim], (low, stop), *box.bounds[dim + 1 :]))
        found.append(box)
    return found
