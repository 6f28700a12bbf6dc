"""What an update of a server's weights contains: positions and values of each box that changed.

    mirror (rank)  ->  BoxUpdate of each box  ->  messages  ->  staged (server)  ->  live weights

A box is sent as a delta: the flat positions inside the box (int32) and the new values, in the
generator's precision. If more than `WHOLE_ABOVE` of its elements changed, the whole box is sent.

    bytes = sum over changed boxes of   k (4 + b)   if k <= n / 3,   otherwise   n b

with n elements, of which k changed, and b bytes each. Pure functions on tensors; no sockets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdflow.blocks.box import Box

WHOLE_ABOVE = 1 / 3
"""The whole box is sent if a larger part of its elements changed. At 2 bytes an element, a delta of
exactly a third has as many bytes as the box."""
POSITION_BYTES = 4
MESSAGE_BYTES = 64 << 20
"""The most bytes of a message, unless a single box has more."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WHOLE = -1
"""Number of positions that stands for a whole box."""


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
        """(index, number of positions or WHOLE, number of values), as plain data."""
        count = WHOLE if self.positions is None else len(self.positions)
        return self.index, count, len(self.values)


def changed_positions(old: Tensor, new: Tensor) -> Tensor:
    """Return the flat positions (k,) int64, ascending, at which two tensors differ in any bit."""
    bits = _BITS[old.element_size()]
    differs = old.reshape(-1).view(bits) != new.reshape(-1).view(bits)
    return differs.nonzero().squeeze(-1)


def positions_in_box(positions: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Return the flat positions inside a box of those elements of a tensor that lie in it.

    positions: (k,) int64, flat in the whole tensor of this shape, ascending. The result is
    ascending, (j,) int64.
    """
    if box.shape == tuple(shape):
        return positions
    result = torch.zeros_like(positions)
    inside = torch.ones_like(positions, dtype=torch.bool)
    remainder = positions
    stride = math.prod(shape)
    for size, (start, stop) in zip(shape, box.bounds, strict=True):
        stride //= size
        coordinate = remainder.div(stride, rounding_mode="floor")
        remainder = remainder - coordinate * stride
        inside &= (coordinate >= start) & (coordinate < stop)
        result = result * (stop - start) + (coordinate - start)
    return result[inside]


def is_sent_whole(num_changed: int, num_elements: int) -> bool:
    """Whether a box with so many changed elements is sent as a whole."""
    return num_changed > num_elements * WHOLE_ABOVE


def planned_bytes(num_changed: int, num_elements: int, element_bytes: int) -> int:
    """Bytes of the update of one box; the formula of this module."""
    if is_sent_whole(num_changed, num_elements):
        return num_elements * element_bytes
    return num_changed * (POSITION_BYTES + element_bytes)


def update_of_box(index: int, tensor: Tensor, box: Box, positions: Tensor | None) -> BoxUpdate:
    """Return the update of a box. The result may share memory with the tensor.

    tensor: the whole tensor with its new values. positions: (k,) int64, of all elements of the
    tensor that changed, flat. None: everything is sent.
    """
    values = tensor[box.slices()]
    if positions is None:
        return BoxUpdate(index, values.reshape(-1))
    own = positions_in_box(positions, tensor.shape, box)
    if is_sent_whole(len(own), box.size):
        return BoxUpdate(index, values.reshape(-1))
    return BoxUpdate(index, values.reshape(-1)[own], own.int())


def apply_update(view: Tensor, values: Tensor, positions: Tensor | None) -> None:
    """Write an update into the live view of its box, in place.

    values: on any device, in the precision of the view. positions: see `BoxUpdate`.
    """
    if positions is None:
        view.copy_(values.view(view.shape))
        return
    index = torch.unravel_index(positions.long().to(view.device), view.shape)
    view.index_put_(index, values.to(view.device))


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
            if num_positions != WHOLE:
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
    positions or WHOLE, number of values).
    """
    if not isinstance(messages, list):
        return f"{type(messages).__name__}, expected a list of messages"
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
            expected = size if num_positions == WHOLE else num_positions
            if num_positions < WHOLE or num_positions > size or num_values != expected:
                return f"{num_values} values at {num_positions} positions of {size}"
    return None


def total_bytes(updates: Mapping[int, Sequence[BoxUpdate]]) -> int:
    """Bytes of the updates of several receivers."""
    return sum(update.num_bytes for some in updates.values() for update in some)
