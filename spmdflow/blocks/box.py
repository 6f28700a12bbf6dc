"""`Box`: a product of half-open ranges, and operations on boxes. Integers only.

`describe_boxes` turns the boxes of one rank into an array, so that thousands of ranks can exchange
theirs in one collective. `own_boxes` divides boxes that several ranks hold, so that every element
has one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

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
        """The box of a complete tensor of that shape."""
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
        """Return the slices that select this box in a tensor that holds the box `outer`.

        None: the complete tensor.
        """
        if outer is None:
            origins = [0] * len(self.bounds)
        else:
            origins = [low for low, _ in outer.bounds]
        return tuple(
            slice(start - origin, stop - origin)
            for (start, stop), origin in zip(self.bounds, origins, strict=True)
        )

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return not other.size or all(
            start <= low and high <= stop
            for (start, stop), (low, high) in zip(self.bounds, other.bounds, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the common elements as a box, or None if there are none."""
        common = []
        for (start, stop), (low, high) in zip(self.bounds, other.bounds, strict=True):
            first = max(start, low)
            last = min(stop, high)
            if first >= last:
                return None
            common.append((first, last))
        return Box(tuple(common))

    def subtract(self, other: Box) -> list[Box]:
        """Return this box without the elements of `other`, as disjoint, non-empty boxes.

        At most two per dimension. [] if nothing remains.
        """
        common = self.intersect(other)
        if common is None:
            if self.size:
                return [self]
            return []
        rest = []
        bounds = list(self.bounds)
        for dim, (first, last) in enumerate(common.bounds):
            start, stop = bounds[dim]
            for part in ((start, first), (last, stop)):
                if part[0] < part[1]:
                    rest.append(Box((*bounds[:dim], part, *bounds[dim + 1 :])))
            bounds[dim] = (first, last)
        return rest

    def cut(self, dim: int, index: int) -> tuple[Box, Box]:
        """Cut this box in two along dimension dim: indices below index, and indices from it on."""
        start, stop = self.bounds[dim]
        assert start <= index <= stop, f"box {self.bounds}: cannot cut dimension {dim} at {index}"
        before = self.bounds[:dim]
        after = self.bounds[dim + 1 :]
        return Box((*before, (start, index), *after)), Box((*before, (index, stop), *after))


def subtract_all(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """Return the elements in `boxes` that are in none of `others`; disjoint if `boxes` are."""
    rest = list(boxes)
    for other in others:
        rest = [part for box in rest for part in box.subtract(other)]
    return rest


def make_disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Return disjoint, non-empty boxes with the same elements as `boxes`, which may overlap.

    Of an overlap, the first box has the elements.
    """
    parts: list[Box] = []
    for box in boxes:
        parts += subtract_all([box] if box.size else [], parts)
    return parts


def merge_neighbours(boxes: Iterable[Box]) -> list[Box]:
    """Join boxes that together form a box, until no two can be joined. Returns them sorted.

    boxes: disjoint, with the same number of dimensions.
    """
    joined = sorted(boxes)
    num_dims = len(joined[0].bounds) if joined else 0
    before = len(joined) + 1
    while len(joined) < before:
        before = len(joined)
        for dim in reversed(range(num_dims)):
            joined = _merge_along_dim(joined, dim)
    return sorted(joined)


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes of the elements start .. stop - 1 of a tensor in row-major order.

    At most 2 * ndim - 1 boxes, in that order; [] for an empty range. In a matrix they are a part of
    a row, complete rows, and a part of a row.
    """
    assert 0 <= start <= stop <= prod(shape), f"range {start}:{stop} of shape {tuple(shape)}"
    if start == stop:
        return []
    if not shape:
        return [Box(())]
    inner = prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _prepend_index(first, flat_range(shape[1:], head, tail))
    boxes = _prepend_index(first, flat_range(shape[1:], head, inner)) if head else []
    full_rows = Box(((first + bool(head), last), *((0, size) for size in shape[1:])))
    if full_rows.size:
        boxes.append(full_rows)
    return boxes + (_prepend_index(last, flat_range(shape[1:], 0, tail)) if tail else [])


def _prepend_index(index: int, boxes: list[Box]) -> list[Box]:
    """Return the boxes with a new first dimension, in which they cover only `index`."""
    result = []
    for box in boxes:
        result.append(Box(((index, index + 1), *box.bounds)))
    return result


def _merge_along_dim(boxes: list[Box], dim: int) -> list[Box]:
    """Join boxes that are adjacent along dim and equal in every other dimension.

    Returns them sorted by the other dimensions, then by dim.
    """

    def others_first(box: Box) -> tuple[Bounds, tuple[int, int]]:
        return (*box.bounds[:dim], *box.bounds[dim + 1 :]), box.bounds[dim]

    joined: list[Box] = []
    for box in sorted(boxes, key=others_first):
        others, (start, stop) = others_first(box)
        if joined and others_first(joined[-1])[0] == others and joined[-1].bounds[dim][1] == start:
            low = joined.pop().bounds[dim][0]
            box = Box((*box.bounds[:dim], (low, stop), *box.bounds[dim + 1 :]))
        joined.append(box)
    return joined


Description = npt.NDArray[np.int64]
"""(boxes, 2 + 2 * _DIMS): hash of the tensor's name, number of dimensions, starts, stops; unused
dimensions are (0, 1)."""
_DIMS = 5


def describe_boxes(boxes: Iterable[tuple[str, Box]]) -> Description:
    """Encode the (name, box) pairs of one rank as an int64 array, one row each, in their order.

    A row is an 8-byte hash of the name, the number of dimensions (at most 5), 5 starts and 5 stops.
    Unused dimensions are (0, 1).
    """
    rows = []
    for name, box in boxes:
        num_dims = len(box.bounds)
        assert num_dims <= _DIMS, (name, box)
        starts, stops = zip(*box.bounds, *[(0, 1)] * (_DIMS - num_dims), strict=True)
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        rows.append((key, num_dims, *starts, *stops))
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2 + 2 * _DIMS)


def own_boxes(everyone: Sequence[Description], index: int) -> list[list[Box]]:
    """Return, for each box that everyone[index] describes, the parts of it that this rank owns.

    everyone: the description of each rank. Every element is owned by exactly one rank: a box that
    several ranks hold is divided evenly among them, and where different boxes overlap, the first
    holder owns the common part. Uses no communication.
    """
    rows = np.concatenate(everyone)
    first = sum(len(each) for each in everyone[:index])
    order = np.argsort(rows[:, 0], kind="stable")
    keys = rows[order, 0]
    mine = range(first, first + len(everyone[index]))
    starts = np.searchsorted(keys, rows[mine, 0], "left")
    stops = np.searchsorted(keys, rows[mine, 0], "right")
    result = []
    for number, start, stop in zip(mine, starts, stops, strict=True):
        result.append(_owned_parts(rows, order[start:stop], number))
    return result


def _owned_parts(rows: Description, same_name: npt.NDArray[Any], number: int) -> list[Box]:
    """Return the boxes that row `number` owns. same_name: all rows of its tensor, ascending.

    If all rows that overlap it are the same box, it owns one of equal parts. If some differ, it
    owns what no earlier row has. [] for an empty box.
    """
    starts = rows[:, 2 : 2 + _DIMS]
    stops = rows[:, 2 + _DIMS :]
    mine = _box(rows[number])
    meets = (starts[same_name] < stops[number]) & (starts[number] < stops[same_name])
    holders = same_name[meets.all(1)]
    if not mine.size or len(holders) <= 1:
        if mine.size:
            return [mine]
        return []
    if (rows[holders] == rows[number]).all():
        turn = int(rows[number, 0]) % len(holders)
        return _part(mine, int(np.searchsorted(holders, number)), len(holders), turn)
    return subtract_all([mine], [_box(rows[each]) for each in holders if each < number])


def _part(box: Box, number: int, count: int, turn: int) -> list[Box]:
    """Return part `number` of `count` equal parts, along the first dimension that is long enough.

    If no dimension has at least `count` indices, part `turn` is the complete box and the others are
    empty.
    """
    for dim, (start, stop) in enumerate(box.bounds):
        if stop - start >= count:
            low, high = (start + (stop - start) * each // count for each in (number, number + 1))
            return [Box((*box.bounds[:dim], (low, high), *box.bounds[dim + 1 :]))]
    if number == turn:
        return [box]
    return []


def _box(row: Description) -> Box:
    bounds = row[2:].reshape(2, _DIMS).T.tolist()[: row[1]]
    return Box(tuple((start, stop) for start, stop in bounds))
