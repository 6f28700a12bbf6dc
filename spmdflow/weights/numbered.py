"""Where a loader puts every element of a model, found by loading numbers instead of weights.

Each element of a layer's tensors gets a number of its own. The engine's own loader stores these
numbers in the engine's tensors, and what lies where is read back: fused, sharded, transposed,
padded and expert weights alike, without knowing the family. Numbers are loaded digit by digit, so
that the engine's precision holds them exactly. Other numbers are loaded a second time: a loader
that computes (scales, averages, quantises) gives numbers that do not belong together, and is
refused.

Of layers with the same tensors one is numbered. The others are expected to lie as it does, which
is checked: all weights are loaded twice with codes, which depend on the tensor and on the element,
and every element of the engine is compared with the code that the table expects there.

All of it runs where the engine's tensors are, and takes there, besides a layer in the engine's
precision, four bytes for each of its elements.

The result is a `ShardTable` of boxes, as the written tables are. Pure: knows no engine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import WeightSyncError
from spmdflow.weights.codes import (
    CPU,
    EXACT_BITS,
    ORDER_FACTOR,
    Load,
    Shapes,
    fill_by_index,
    narrowest_type,
    table_agrees,
)
from spmdflow.weights.table import LocalTensor, Piece, ShardTable

LayerPieces = Mapping[str, Sequence[Piece]]
"""Pieces of one layer of the model, by the engine's tensor that has them."""

_LAYER = re.compile(r"^(.*?\.(\d+))\.")
"""The part of a name that the tensors of a layer share; it ends with the layer's number."""
_NUMBER_BITS = 32
_MOST_NUMBERS = (1 << 31) - 1
_MOST_PIECES = 1 << 16
"""Of one tensor of the engine; a loader with more follows no order that boxes describe."""


def derive_table(local_tensors: Mapping[str, Tensor], shapes: Shapes, load: Load) -> ShardTable:
    """Return which boxes of the model's tensors are where in the engine's.

    local_tensors: the engine's, by name; their values are lost, and zeros afterwards. shapes: of
    the model's tensors; those of a layer are loaded together, and all that are in no layer. load:
    the engine's loader. WeightSyncError if an element of the engine is not one element of the
    model, unchanged, or if a layer has too many elements (2**31).
    """
    for tensor in local_tensors.values():
        tensor.zero_()
    layers = _by_layer(shapes)
    numbered, expected = _number_one_of_each_kind(local_tensors, layers, load)
    table = _table_of(local_tensors, numbered | expected)
    if expected and not table_agrees(local_tensors, table, layers, load):
        for layer in expected:
            numbered[layer] = _number(local_tensors, layers[layer], load)
        table = _table_of(local_tensors, numbered)
    return table


def _number_one_of_each_kind(
    local_tensors: Mapping[str, Tensor], layers: Mapping[str, Shapes], load: Load
) -> tuple[dict[str, LayerPieces], dict[str, LayerPieces]]:
    """Return the pieces of the layers that were numbered, and those expected of the others.

    Layers are of one kind if they have the same tensors in the same shapes.
    """
    first_of_kind: dict[object, str] = {}
    numbered: dict[str, LayerPieces] = {}
    expected = {}
    for layer, shapes in layers.items():
        kind = tuple((name.removeprefix(layer), tuple(shape)) for name, shape in shapes.items())
        if kind in first_of_kind:
            first = first_of_kind[kind]
            moved = _move_to_layer(numbered[first], first, layer, local_tensors)
            if moved is not None:
                expected[layer] = moved
                continue
        numbered[layer] = _number(local_tensors, shapes, load)
        if numbered[layer]:  # a stage of a pipeline does not have all layers
            first_of_kind[kind] = layer
    return numbered, expected


def _move_to_layer(
    pieces_of_layer: LayerPieces, layer: str, other: str, local_tensors: Mapping[str, Tensor]
) -> LayerPieces | None:
    """Return the pieces of a layer with the names of another one.

    None if the engine has no tensors of the same shapes with the other's number in their names.
    """
    number = layer.rpartition(".")[2]
    other_number = other.rpartition(".")[2]
    moved = {}
    for name, pieces in pieces_of_layer.items():
        match = _LAYER.match(name)
        if match is None or match[2] != number:
            return None
        moved_name = name[: match.start(2)] + other_number + name[match.end(2) :]
        local = local_tensors.get(moved_name)
        if local is None or local.shape != local_tensors[name].shape:
            return None
        moved[moved_name] = [
            replace(piece, name=other + piece.name.removeprefix(layer)) for piece in pieces
        ]
    return moved


def _by_layer(shapes: Shapes) -> dict[str, Shapes]:
    """Shapes of each layer's tensors, by the part of the name that they share; "": all others."""
    layers: dict[str, dict[str, Sequence[int]]] = defaultdict(dict)
    for name, shape in shapes.items():
        match = _LAYER.match(name)
        layers[match[1] if match else ""][name] = shape
    return dict(layers)


def _table_of(local_tensors: Mapping[str, Tensor], layers: Mapping[str, LayerPieces]) -> ShardTable:
    """Return the table with the pieces of all layers."""
    pieces: dict[str, list[Piece]] = {name: [] for name in local_tensors}
    for layer in layers.values():
        for name, some in layer.items():
            pieces[name] += some
    return {
        name: LocalTensor(tuple(tensor.shape), tuple(pieces[name]))
        for name, tensor in local_tensors.items()
    }


def _number(local_tensors: Mapping[str, Tensor], shapes: Shapes, load: Load) -> LayerPieces:
    """Return where tensors of these shapes are, by loading their numbers."""
    numbering = Numbering.of(shapes)
    result = {}
    for name, numbers in _read_numbers(local_tensors, numbering, load):
        result[name] = numbering.pieces(name, numbers)
    return result


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

        numbers: int32 or int64; 0 where it has no element of them. WeightSyncError with its name if
        they are too many boxes.
        """
        return _Region(name, numbers, self).pieces()

    def tensor_at(self, number: int) -> tuple[str, int]:
        """Return the tensor with this number, and the row-major index of its element."""
        index = bisect_right(self.firsts, number) - 1
        return self.names[index], number - self.firsts[index]

    def tensors(
        self,
        of_number: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype = torch.int32,
        device: torch.device = CPU,
    ) -> dict[str, Tensor]:
        """Return all tensors, whose elements are of_number(their numbers, int32)."""

        def of_index(first: int, index: Tensor) -> Tensor:
            return of_number(index + first)

        result = {}
        for name, first in zip(self.names, self.firsts, strict=True):
            numbers = partial(of_index, first)
            result[name] = fill_by_index(self.shapes[name], numbers, dtype=dtype, device=device)
        return result


def _read_numbers(
    local_tensors: Mapping[str, Tensor], numbering: Numbering, load: Load
) -> Iterator[tuple[str, Tensor]]:
    """Load the numbers; yield (name, numbers) of each engine's tensor that has some of them.

    numbers: int32, 0 where nothing was loaded. The tensors are zeros again afterwards.
    """
    if numbering.last >= _MOST_NUMBERS:
        raise WeightSyncError.of(
            f"weights of {numbering.names[0]} and others of its layer",
            f"{numbering.last} elements",
            f"fewer than {_MOST_NUMBERS}, so that each has a number",
            "choose another generator for this model",
        )
    num_bits = numbering.last.bit_length()
    first = _load_digits(local_tensors, load, numbering, num_bits, lambda number: number)
    if not first:
        return
    second = _load_digits(local_tensors, load, numbering, _NUMBER_BITS, _in_other_order)
    for name, numbers in first.items():
        if int(numbers.max()) > numbering.last:
            raise _computes(name)
        if name not in second or not torch.equal(second[name], _in_other_order(numbers)):
            raise _computes(name)
        yield name, numbers


def _in_other_order(numbers: Tensor) -> Tensor:
    """Other numbers modulo 2**32, one for each; 0 stays 0."""
    return numbers * ORDER_FACTOR


def _load_digits(
    local_tensors: Mapping[str, Tensor],
    load: Load,
    numbering: Numbering,
    num_bits: int,
    of_number: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return of_number(number), of num_bits bits, of what each engine's tensor has after loading.

    Each load stores one digit plus 1, so that what was not loaded stays 0. {}: nothing was loaded.
    """
    digit_bits = min(_digit_bits(name, tensor) for name, tensor in local_tensors.items()) - 1
    dtype = narrowest_type(local_tensors)
    device = next(iter(local_tensors.values())).device
    most = 1 << digit_bits
    values: dict[str, Tensor] = {}
    loaded: dict[str, Tensor] = {}
    for shift in range(0, num_bits, digit_bits):
        digit = partial(_stored_digit, of_number, shift, most - 1)
        load(numbering.tensors(digit, dtype=dtype, device=device))
        for name, tensor in local_tensors.items():
            if shift == 0 and bool(tensor.any()):
                loaded[name] = tensor != 0
                values[name] = torch.zeros(tensor.shape, dtype=torch.int32, device=device)
            if name not in loaded:
                continue
            is_digit = (tensor == tensor.round()) & (tensor >= 0) & (tensor <= most)
            if not bool(is_digit.all()) or not torch.equal(tensor > 0, loaded[name]):
                raise _computes(name)
            digits = (tensor.detach().to(torch.int32) - 1).clamp_(min=0)
            values[name] += digits << shift
            tensor.zero_()
        if not loaded:
            break
    return values


def _stored_digit(
    of_number: Callable[[Tensor], Tensor], shift: int, mask: int, numbers: Tensor
) -> Tensor:
    """One digit of of_number(numbers), plus 1."""
    return ((of_number(numbers) >> shift) & mask) + 1


def _digit_bits(name: str, tensor: Tensor) -> int:
    bits = EXACT_BITS.get(tensor.dtype)
    if bits is None:
        raise WeightSyncError.of(
            f"weights of {name}",
            f"elements of {tensor.dtype}",
            f"one of {', '.join(map(str, EXACT_BITS))}",
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
            steps = torch.arange(extent, dtype=part.dtype, device=part.device)
            expected += (steps * stride).view(shape)
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
