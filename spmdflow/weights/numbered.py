"""Where a loader puts every element of a model, found by loading numbers instead of weights.

Each element of the model's tensors gets a number of its own. The engine's own loader stores these
numbers in the engine's tensors, and what lies where is read back: fused, sharded, transposed,
padded and expert weights alike, without knowing the family. Numbers are loaded digit by digit, so
that the engine's precision holds them exactly. Other numbers are loaded a second time: a loader
that computes (scales, averages, quantises) gives numbers that do not belong together, and is
refused. In host memory the numbers take eight bytes for each element of the largest group of
tensors, and a few copies of them.

The result is a `ShardTable` of boxes, as the written tables are. Pure: knows no engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import WeightSyncError
from spmdflow.weights.table import LocalTensor, Piece, ShardTable

Load = Callable[[Mapping[str, Tensor]], None]
"""Loads some of the model's tensors, by name, into the engine's."""

_DIGIT_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float64: 48}
"""Bits of an integer that a type holds exactly."""
_PRIME = (1 << 31) - 1
_FACTOR = 1_220_703_125
"""Numbers of the second load: number * _FACTOR modulo _PRIME, which puts them in another order."""
_MOST_PIECES = 1 << 16
"""Of one tensor of the engine; a loader with more follows no order that boxes describe."""


def derive_table(
    local_tensors: Mapping[str, Tensor], groups: Sequence[Mapping[str, Sequence[int]]], load: Load
) -> ShardTable:
    """Return which boxes of the model's tensors are where in the engine's.

    local_tensors: the engine's, by name; their values are lost, and zeros afterwards. groups:
    shapes by name of the model's tensors, such as those of a layer; those of one group are loaded
    together. load: the engine's loader. WeightSyncError if an element of the engine is not one
    element of the model, unchanged, or if a group has too many elements (2**31).
    """
    for tensor in local_tensors.values():
        tensor.zero_()
    pieces: dict[str, list[Piece]] = {name: [] for name in local_tensors}
    for shapes in groups:
        numbering = Numbering.of(shapes)
        for name, numbers in _read_numbers(local_tensors, numbering, load):
            pieces[name] += numbering.pieces(name, numbers)
    table = {}
    for name, tensor in local_tensors.items():
        table[name] = LocalTensor(tuple(tensor.shape), tuple(pieces[name]))
    return table


@dataclass(frozen=True)
class Numbering:
    """Numbers of the elements of some tensors: 1 and up, in row-major order.

    One number between two tensors is not used, so that no run of numbers goes over from one to the
    next.
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    firsts: tuple[int, ...]
    """The number of each tensor's first element."""
    last: int
    """The largest number."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> Numbering:
        """Number the tensors of these shapes in their order."""
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        firsts = []
        number = 1
        for shape in sizes.values():
            firsts.append(number)
            number += prod(shape) + 1
        return cls(sizes, tuple(sizes), tuple(firsts), number - 2)

    def pieces(self, name: str, numbers: Tensor) -> list[Piece]:
        """Return which boxes of the numbered tensors another tensor has, by its numbers.

        numbers: int64 in host memory; 0 where it has no element of them. WeightSyncError with its
        name if they are too many boxes.
        """
        return _Region(name, numbers, self).pieces()

    def tensor_at(self, number: int) -> tuple[str, int]:
        """Return the tensor with this number, and the row-major index of its element."""
        index = bisect_right(self.firsts, number) - 1
        return self.names[index], number - self.firsts[index]

    def tensors(self, of_number: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return all tensors, whose elements are of_number(their numbers)."""
        result = {}
        for name, first in zip(self.names, self.firsts, strict=True):
            shape = self.shapes[name]
            numbers = torch.arange(first, first + prod(shape))
            result[name] = of_number(numbers).reshape(shape)
        return result


def _read_numbers(
    local_tensors: Mapping[str, Tensor], numbering: Numbering, load: Load
) -> Iterator[tuple[str, Tensor]]:
    """Load the numbers; yield (name, numbers) of each engine's tensor that has some of them.

    numbers: int64 in host memory, 0 where nothing was loaded. The tensors are zeros again
    afterwards.
    """
    if numbering.last >= _PRIME:
        raise WeightSyncError.of(
            f"weights of {numbering.names[0]} and others of its layer",
            f"{numbering.last} elements",
            f"fewer than {_PRIME}, so that each has a number",
            "choose another generator for this model",
        )
    first = _load_digits(local_tensors, load, numbering, numbering.last, lambda number: number)
    second = _load_digits(local_tensors, load, numbering, _PRIME, _in_other_order)
    for name, numbers in first.items():
        if int(numbers.max()) > numbering.last:
            raise _computes(name)
        if name not in second or not torch.equal(second[name], _in_other_order(numbers)):
            raise _computes(name)
        yield name, numbers


def _in_other_order(numbers: Tensor) -> Tensor:
    """Other numbers below _PRIME, one for each; 0 stays 0."""
    return numbers * _FACTOR % _PRIME


def _load_digits(
    local_tensors: Mapping[str, Tensor],
    load: Load,
    numbering: Numbering,
    most: int,
    of_number: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return of_number(number), at most `most`, of what each engine's tensor has after loading.

    Each load stores one digit plus 1, so that what was not loaded stays 0.
    """
    bits = min(_digit_bits(name, tensor) for name, tensor in local_tensors.items()) - 1
    base = (1 << bits) - 1
    values: dict[str, Tensor] = {}
    loaded: dict[str, Tensor] = {}
    factor = 1
    while factor <= most:
        load(numbering.tensors(partial(_stored_digit, of_number, factor, base)))
        for name, tensor in local_tensors.items():
            if factor == 1 and bool(tensor.any()):
                loaded[name] = (tensor != 0).cpu()
                values[name] = torch.zeros(tensor.shape, dtype=torch.int64)
            if name not in loaded:
                continue
            digits = tensor.detach().to("cpu", torch.float64)
            tensor.zero_()
            is_digit = (digits == digits.round()) & (digits >= 0) & (digits <= base)
            if not bool(is_digit.all()) or not torch.equal(digits > 0, loaded[name]):
                raise _computes(name)
            values[name] += torch.where(loaded[name], (digits.long() - 1) * factor, 0)
        factor *= base
    return values


def _stored_digit(
    of_number: Callable[[Tensor], Tensor], factor: int, base: int, numbers: Tensor
) -> Tensor:
    """One digit of of_number(numbers), plus 1."""
    return of_number(numbers) // factor % base + 1


def _digit_bits(name: str, tensor: Tensor) -> int:
    bits = _DIGIT_BITS.get(tensor.dtype)
    if bits is None:
        raise WeightSyncError.of(
            f"weights of {name}",
            f"elements of {tensor.dtype}",
            f"one of {', '.join(map(str, _DIGIT_BITS))}",
            "choose another precision for the generator",
        )
    return bits


def _computes(name: str) -> WeightSyncError:
    return WeightSyncError.of(
        f"weights of {name}",
        "a loader that computes it from the folder's values",
        "one that only copies, so that updates can be copied to the same elements",
        "choose another generator for this model",
    )


class _Strides(NamedTuple):
    """Numbers of a box: first + the sum of index * stride over its axes."""

    first: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Region:
    """The numbers that one tensor of the engine has."""

    name: str
    numbers: Tensor
    numbering: Numbering

    def pieces(self) -> list[Piece]:
        """Cut the tensor into boxes that are boxes of the model's tensors, without padding."""
        pieces: list[Piece] = []
        waiting = [Box.of_shape(self.numbers.shape)]
        while waiting:
            box = waiting.pop()
            part = self.numbers[box.slices()]
            if not bool(part.any()):
                continue
            piece = self._piece(box, part)
            if piece is not None:
                pieces.append(piece)
            else:
                waiting += reversed(_split(box, part))
            if len(pieces) + len(waiting) > _MOST_PIECES:
                raise WeightSyncError.of(
                    f"weights of {self.name}",
                    f"more than {_MOST_PIECES} pieces",
                    "boxes of the model's tensors",
                    "choose another generator for this model",
                )
        return pieces

    def _piece(self, box: Box, part: Tensor) -> Piece | None:
        """The piece at a box, if its numbers are those of a box of one tensor of the model."""
        numbers = _strides_of(part)
        if numbers is None or numbers.first == 0:
            return None
        name, element = self.numbering.tensor_at(numbers.first)
        shape = self.numbering.shapes[name]
        axes = _axes_of(part.shape, numbers.strides, element, shape)
        if axes is None:
            return None
        bounds = []
        for start, axis in zip(_unravel(element, shape), axes, strict=True):
            extent = 1 if axis is None else part.shape[axis]
            bounds.append((start, start + extent))
        return Piece(name, Box(tuple(bounds)), box, axes)


def _strides_of(part: Tensor) -> _Strides | None:
    """The first number and the stride along each axis, if they describe all numbers of the part."""
    first = int(part.flatten()[0])
    strides = []
    expected = torch.full_like(part, first)
    for axis, extent in enumerate(part.shape):
        stride = 0
        if extent > 1:
            stride = int(part.select(axis, 1).flatten()[0]) - first
            shape = [1] * part.ndim
            shape[axis] = extent
            expected += (torch.arange(extent) * stride).view(shape)
        strides.append(stride)
    if not torch.equal(part, expected):
        return None
    return _Strides(first, tuple(strides))


def _axes_of(
    extents: Sequence[int], own_strides: Sequence[int], element: int, shape: Sequence[int]
) -> tuple[int | None, ...] | None:
    """Return, for each axis of a model's tensor, the engine's axis along which it runs.

    None for an axis of which the box has one element. None instead of the tuple if the box is no
    box of that tensor.
    extents, own_strides: of the engine's axes. element: the tensor's first one, row-major.
    """
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = _unravel(element, shape)
    axes: list[int | None] = [None] * len(shape)
    for own, (extent, own_stride) in enumerate(zip(extents, own_strides, strict=True)):
        if extent == 1:
            continue
        for axis, stride in enumerate(strides):
            fits = start[axis] + extent <= shape[axis]
            if stride == own_stride and fits and axes[axis] is None:
                axes[axis] = own
                break
        else:
            return None
    return tuple(axes)


def _unravel(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the element with this row-major number."""
    index = []
    for size in reversed(shape):
        element, position = divmod(element, size)
        index.append(position)
    return tuple(reversed(index))


def _split(box: Box, part: Tensor) -> list[Box]:
    """Cut a box where the stride along an axis changes.

    If the first line along each axis has one stride, the box is cut into slices of its first axis
    that has several elements.
    """
    for axis in range(part.ndim):
        line = part
        for other in reversed(range(part.ndim)):
            if other != axis:
                line = line.select(other, 0)
        cuts = _runs(line.tolist())
        if len(cuts) > 1:
            return [_cut(box, axis, start, stop) for start, stop in cuts]
    axis = next(axis for axis, extent in enumerate(part.shape) if extent > 1)
    return [_cut(box, axis, index, index + 1) for index in range(part.shape[axis])]


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of the longest runs whose values rise by the same stride, from left to right.

    Zeros are runs of their own.
    """
    runs = []
    start = 0
    while start < len(values):
        stop = start + 1
        if values[start] == 0:
            while stop < len(values) and values[stop] == 0:
                stop += 1
        elif stop < len(values) and values[stop] != 0:
            stride = values[stop] - values[start]
            while stop < len(values) and values[stop] - values[stop - 1] == stride:
                stop += 1
        runs.append((start, stop))
        start = stop
    return runs


def _cut(box: Box, axis: int, start: int, stop: int) -> Box:
    bounds = list(box.bounds)
    origin = bounds[axis][0]
    bounds[axis] = (origin + start, origin + stop)
    return Box(tuple(bounds))
