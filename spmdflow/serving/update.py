"""What an update of a server's weights contains: positions and values of each box that changed.

    mirror (rank)  ->  BoxUpdate of each box  ->  messages  ->  staged (server)  ->  live weights

A box is sent as a delta: the flat positions inside the box (int32) and the new values, in the
generator's precision. If more than a third of its elements changed, or of those of its tensor, the
whole box is sent.

    bytes = sum over boxes of   k (4 + b)   if k <= n / 3 and K <= N / 3,   otherwise   n b

with n elements in the box and N in the tensor, of which k and K changed, and b bytes each. Pure
functions on tensors; no sockets.

Costs on one core for N elements of two bytes: 2 to 4 ns each to compare them, and 4 bytes of memory
for each that changed, at most 4 N / 3 (twice that while they are joined).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import WeightSyncError

FULL_ABOVE = 3
"""The whole box is sent if more than one in so many of its elements changed. At 2 bytes an element,
a delta of exactly a third has as many bytes as the box."""
POSITION_BYTES = 4
MESSAGE_BYTES = 64 << 20
"""The most bytes of a message, unless a single box has more."""
FULL_BOX = -1
"""Number of positions that means: all of the box."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_POSITION = 2**31 - 1
_SLICE = 1 << 18
"""Elements that are compared at a time: they stay in the processor's cache."""
_WRITTEN = 1 << 22
"""Positions that are written at a time; each needs 8 bytes per dimension meanwhile."""


@dataclass(frozen=True)
class BoxUpdate:
    """New values of one of the receiver's boxes."""

    index: int
    """Of the box in the receiver's list."""
    values: Tensor
    """(k,) or, for the whole box, (n,)."""
    positions: Tensor | None = None
    """(k,) int32, ascending, flat inside the box. None: the whole box."""

    @property
    def num_bytes(self) -> int:
        """Bytes of values and positions."""
        size = self.values.nbytes
        if self.positions is not None:
            size += self.positions.nbytes
        return size

    @property
    def facts(self) -> tuple[int, int, int]:
        """(index, number of positions or FULL_BOX, number of values), as plain data."""
        count = FULL_BOX if self.positions is None else len(self.positions)
        return self.index, count, len(self.values)


@dataclass(frozen=True)
class TensorChanges:
    """Which elements of a tensor have new values."""

    count: int
    positions: Tensor | None
    """(count,) flat, ascending; int32, or int64 for a tensor that needs it. None: too many, so that
    everything is sent."""


def find_changes(old: Tensor, new: Tensor) -> TensorChanges:
    """Return the elements at which two tensors in host memory differ in any bit.

    Compares slices. Once more than a third differ, it counts only, which takes a quarter of the
    time.
    """
    parts: list[npt.NDArray[Any]] = []
    count = 0
    kind = _position_type(old.numel())
    for start, differs in _compare_slices(old, new):
        if is_too_many(count, old.numel()):
            count += int(np.count_nonzero(differs))
            continue
        positions = np.flatnonzero(differs) + start
        parts.append(positions.astype(kind))
        count += len(positions)
    if is_too_many(count, old.numel()):
        return TensorChanges(count, None)
    parts.append(np.zeros(0, dtype=kind))
    return TensorChanges(count, torch.from_numpy(np.concatenate(parts)))


def join_changes(changes: Iterable[TensorChanges], num_elements: int) -> TensorChanges:
    """Return the elements of a tensor that changed in any of some versions.

    Takes a byte and 2 ns for each element of the tensor, and 5 to 20 ns for each that changed. An
    element that has its old value again counts too.
    """
    is_changed = np.zeros(num_elements, dtype=np.bool_)
    for each in changes:
        if each.positions is None:
            return each
        is_changed[each.positions.numpy()] = True
    count = int(np.count_nonzero(is_changed))
    if is_too_many(count, num_elements):
        return TensorChanges(count, None)
    positions = np.flatnonzero(is_changed).astype(_position_type(num_elements))
    return TensorChanges(count, torch.from_numpy(positions))


def positions_in_box(positions: Tensor, shape: Sequence[int], box: Box) -> tuple[Tensor, Tensor]:
    """Return those positions that lie in a box: flat in the tensor, and flat inside the box.

    positions: (k,), flat in the tensor of this shape, ascending. Both results are ascending, (j,),
    of the same dtype. Costs two binary searches for a box of consecutive elements, such as rows,
    and about 16 ns for each position of a matrix for another one, such as columns.
    """
    if box.shape == tuple(shape):
        return positions, positions
    if not box.size:
        return positions[:0], positions[:0]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = 0
    last = 0
    for stride, (start, stop) in zip(strides, box.bounds, strict=True):
        first += start * stride
        last += (stop - 1) * stride
    ends = torch.tensor([first, last + 1], dtype=positions.dtype)
    low, high = torch.searchsorted(positions, ends).tolist()
    near = positions[low:high]
    if last - first + 1 == box.size:
        return near, near - first
    found = [near[:0].numpy()]
    flat = [near[:0].numpy()]
    for begin in range(0, len(near), _SLICE):
        part = near[begin : begin + _SLICE].numpy()
        is_inside, own = _locate_in_box(part, shape, box)
        chosen = np.flatnonzero(is_inside)
        found.append(part.take(chosen))
        flat.append(own.take(chosen))
    return torch.from_numpy(np.concatenate(found)), torch.from_numpy(np.concatenate(flat))


def is_too_many(num_changed: int, num_elements: int) -> bool:
    """Whether more than a third of the elements changed."""
    return num_changed * FULL_ABOVE > num_elements


def is_sent_whole(num_changed: int, num_elements: int) -> bool:
    """Whether a box with so many changed elements is sent as a whole.

    This also holds if one element changed in a box for whose positions 32 bits are too few.
    """
    needs_more_bits = num_changed > 0 and num_elements > _MOST_POSITION
    return needs_more_bits or is_too_many(num_changed, num_elements)


def planned_bytes(num_changed: int, num_elements: int, element_bytes: int) -> int:
    """Bytes of the update of a box, unless more than a third of its tensor changed.

    See the formula of this module.
    """
    if is_sent_whole(num_changed, num_elements):
        return num_elements * element_bytes
    return num_changed * (POSITION_BYTES + element_bytes)


def update_of_box(index: int, tensor: Tensor, box: Box, positions: Tensor | None) -> BoxUpdate:
    """Return the update of a box. The result may share memory with the tensor.

    tensor: the whole tensor with its new values, contiguous. positions: (k,), of all elements of
    the tensor that changed, flat, ascending. None: everything is sent.
    """
    if positions is not None:
        inside, own = positions_in_box(positions, tensor.shape, box)
        if not is_sent_whole(len(own), box.size):
            return BoxUpdate(index, tensor.view(-1).index_select(0, inside), own.int())
    return BoxUpdate(index, tensor[box.slices()].reshape(-1))


def apply_update(view: Tensor, values: Tensor, positions: Tensor | None) -> None:
    """Write an update into the live view of its box, in place.

    values: on any device, in the precision of the view. positions: see `BoxUpdate`. WeightSyncError
    for a position outside the box, before anything is written.
    """
    if positions is None:
        view.copy_(values.view(view.shape))
        return
    _check_positions(positions, view.numel())
    for start in range(0, len(positions), _WRITTEN):
        part = slice(start, start + _WRITTEN)
        index = positions[part].long().to(view.device)
        new = values[part].to(view.device)
        if view.is_contiguous():
            view.view(-1).index_copy_(0, index, new)
        else:
            view.index_put_(torch.unravel_index(index, view.shape), new)


def cut_into_messages(updates: Sequence[BoxUpdate]) -> list[list[BoxUpdate]]:
    """Return the updates in runs of at most MESSAGE_BYTES; a larger update is alone."""
    messages: list[list[BoxUpdate]] = []
    size = 0
    for update in updates:
        if not messages or size + update.num_bytes > MESSAGE_BYTES:
            messages.append([])
            size = 0
        messages[-1].append(update)
        size += update.num_bytes
    return messages


@dataclass(frozen=True)
class PackedMessage:
    """A message as it travels: two flat tensors."""

    positions: Tensor
    """(sum of k,) int32, of the deltas, one after the other."""
    values: Tensor
    """(sum of values,), of all updates."""

    @classmethod
    def of(cls, updates: Sequence[BoxUpdate], dtype: torch.dtype) -> PackedMessage:
        """Pack updates whose values have this dtype."""
        positions = [torch.zeros(0, dtype=torch.int32)]
        values = [torch.zeros(0, dtype=dtype)]
        for update in updates:
            values.append(update.values)
            if update.positions is not None:
                positions.append(update.positions)
        return cls(torch.cat(positions), torch.cat(values))

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.positions.nbytes + self.values.nbytes

    def split(self, facts: Sequence[Sequence[int]]) -> list[BoxUpdate]:
        """Return the updates, as views of the two tensors. facts: of each, in order."""
        result = []
        position = 0
        value = 0
        for index, num_positions, num_values in facts:
            positions = None
            if num_positions != FULL_BOX:
                positions = self.positions[position : position + num_positions]
                position += num_positions
            values = self.values[value : value + num_values]
            value += num_values
            result.append(BoxUpdate(index, values, positions))
        return result


def message_sizes(facts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of positions and of values of a message with these facts."""
    num_positions = sum(max(0, count) for _, count, _ in facts)
    num_values = sum(count for _, _, count in facts)
    return num_positions, num_values


def check_facts(messages: object, box_sizes: Sequence[int]) -> str | None:
    """Return what is wrong with the facts of messages that came from another program, or None.

    box_sizes: elements of each of the receiver's boxes. Each message is a list of (index, number of
    positions or FULL_BOX, number of values); a box is in one of them at most.
    """
    if not isinstance(messages, list):
        return f"messages of type {type(messages).__name__}"
    seen: set[int] = set()
    for message in messages:
        if not isinstance(message, list):
            return f"a message of type {type(message).__name__}"
        for facts in message:
            if not isinstance(facts, list) or [type(each) for each in facts] != [int] * 3:
                return f"{str(facts)[:60]!r} as the facts of a box"
            index, num_positions, num_values = facts
            if not 0 <= index < len(box_sizes):
                return f"box {index} of {len(box_sizes)}"
            size = box_sizes[index]
            expected = size if num_positions == FULL_BOX else num_positions
            if num_positions < FULL_BOX or num_positions > size or num_values != expected:
                return f"{num_values} values at {num_positions} positions of {size}"
            if index in seen:
                return f"box {index} twice"
            seen.add(index)
    return None


def _compare_slices(old: Tensor, new: Tensor) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yield the first position of each slice of two tensors, and which of its bits differ."""
    bits = _BITS[old.element_size()]
    ours = old.reshape(-1).view(bits).numpy()
    theirs = new.reshape(-1).view(bits).numpy()
    for start in range(0, len(ours), _SLICE):
        part = slice(start, start + _SLICE)
        yield start, ours[part] != theirs[part]


def _locate_in_box(
    positions: npt.NDArray[Any], shape: Sequence[int], box: Box
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """Return which positions of a tensor lie in a box, and the flat positions of these inside it.

    The second result has any value where the first is False.
    """
    remainder = positions
    is_inside = np.ones(len(positions), dtype=np.bool_)
    result = np.zeros_like(positions)
    stride = math.prod(shape)
    for size, (start, stop) in zip(shape, box.bounds, strict=True):
        stride //= size
        coordinate = remainder
        if stride > 1:
            coordinate = remainder // stride
            remainder = remainder - coordinate * stride
        if (start, stop) != (0, size):
            is_inside &= (coordinate >= start) & (coordinate < stop)
        result = result * (stop - start) + (coordinate - start)  # may wrap around outside the box
    return is_inside, result


def _position_type(num_elements: int) -> type[np.int32 | np.int64]:
    """The smallest type that holds all positions of a tensor."""
    if num_elements > _MOST_POSITION:
        return np.int64
    return np.int32


def _check_positions(positions: Tensor, num_elements: int) -> None:
    """WeightSyncError for a position outside a box: on a GPU it would end the process."""
    if not len(positions):
        return
    least, most = (int(each) for each in positions.aminmax())
    if least < 0 or most >= num_elements:
        raise WeightSyncError(
            f"weights: got positions {least} to {most} in an update of a box, expected 0 to "
            f"{num_elements - 1}; send it again"
        )
