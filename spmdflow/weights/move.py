"""Values between local tensors and boxes. Pure torch, no processes.

fill(local, table, read)          boxes -> local tensors (loading, resharding, a checkpoint)
blocks(local, table)              local tensors -> live views by box (the inverse)
BlockReader(blocks).read          boxes out of such views: fill's third argument
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.errors import PlanError
from spmdflow.weights.cut import ShardTable

Read = Callable[[str, Box], Tensor]
"""(Hugging Face name, box) -> a tensor of the box's shape, of any dtype and device."""

Block = tuple[str, Tensor, Box]
"""(Hugging Face name, view of the live tensor, the box that it holds)."""


def fill(local_tensors: Mapping[str, Tensor], table: ShardTable, read: Read) -> None:
    """Write every piece of every local tensor in place, and zeros into the padding.

    local_tensors: at least those of the table, in its shapes; values are rounded to their dtype.
    """
    with torch.no_grad():
        for name, described in table.items():
            tensor = _local(local_tensors, name, described.shape)
            if described.padding:
                tensor.zero_()
            for piece in described.pieces:
                tensor[piece.local.slices()].copy_(read(piece.name, piece.box))


def blocks(local_tensors: Mapping[str, Tensor], table: ShardTable) -> Iterator[Block]:
    """Every piece as a view that shares storage with its local tensor, in the table's order."""
    for name, described in table.items():
        tensor = _local(local_tensors, name, described.shape).detach()
        for piece in described.pieces:
            yield piece.name, tensor[piece.local.slices()], piece.box


class BlockReader:
    """Reads boxes out of blocks that hold them together, of one rank or of several."""

    def __init__(self, some: Iterable[Block]) -> None:
        self._blocks: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, values, box in some:
            self._blocks.setdefault(name, []).append((values, box))

    def read(self, name: str, box: Box) -> Tensor:
        """The values of a box: a view if one block holds it, else a new tensor.

        PlanError if the blocks do not hold all of it.
        """
        pieces = self.pieces(name, box)
        if pieces[0][1] == box:
            return pieces[0][0]
        result = pieces[0][0].new_empty(box.shape)
        for values, held in pieces:
            result[held.slices(box)] = values
        return result

    def pieces(self, name: str, box: Box) -> list[tuple[Tensor, Box]]:
        """Live views that make up a box: one if a block holds it, else what each block has.

        PlanError if the blocks do not hold all of it.
        """
        whole = self.view(name, box)
        if whole is not None:
            return [(whole, box)]
        held = self._blocks.get(name, [])
        missing = subtract_all([box], [each for _, each in held])
        if missing:
            raise PlanError(
                f"tensor {name}: got no values of box {missing[0].bounds}, expected blocks that "
                f"hold all of {box.bounds}; add the rank that holds it"
            )
        shared = [(values, each, each.intersect(box)) for values, each in held]
        return [(v[part.slices(each)], part) for v, each, part in shared if part is not None]

    def view(self, name: str, box: Box) -> Tensor | None:
        """The live values of a box; None if no block holds it whole."""
        for values, whole in self._blocks.get(name, ()):
            if whole.contains(box):
                return values[box.slices(whole)]
        return None


class BlockWriter:
    """Writes boxes into blocks, wherever these hold an element (a tied copy included)."""

    def __init__(self, some: Iterable[Block]) -> None:
        self._blocks: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, values, box in some:
            self._blocks.setdefault(name, []).append((values, box))

    def view(self, name: str, box: Box) -> Tensor | None:
        """The live values of a box; None if no block holds it whole, or another shares in it."""
        held = [b for b in self._blocks.get(name, ()) if b[1].intersect(box) is not None]
        if len(held) != 1 or not held[0][1].contains(box):
            return None
        target, whole = held[0]
        return target[box.slices(whole)]

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Copy the values of a box in place, rounded; elements that no block holds are left out."""
        with torch.no_grad():
            for target, whole in self._blocks.get(name, ()):
                common = whole.intersect(box)
                if common is not None:
                    target[common.slices(whole)].copy_(values[common.slices(box)])


def _local(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        raise PlanError(
            f"local tensor {name}: got {None if tensor is None else tuple(tensor.shape)}, expected "
            f"shape {shape} as the table says; build the model with the table's sizes"
        )
    return tensor
