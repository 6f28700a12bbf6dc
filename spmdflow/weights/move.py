"""Copies values between local tensors and boxes. Pure torch, no processes.

fill(local, table, read)          boxes -> local tensors (loading, resharding, a checkpoint)
blocks(local, table)              local tensors -> live views by box (the inverse)
Blocks(blocks).read               reads boxes from such views: fill's third argument

`Storages`: memory that is freed temporarily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.errors import PlanError
from spmdflow.parallel.device import CPU, own_device
from spmdflow.weights.table import ShardTable

_READ_ELEMENTS = 1 << 24

Read = Callable[[str, Box], Tensor]
"""(Hugging Face name, box) -> a tensor of the box's shape, of any dtype and device."""

Block = tuple[str, Tensor, Box]
"""(Hugging Face name, view of the live tensor, the box that it holds)."""


def fill(local_tensors: Mapping[str, Tensor], table: ShardTable, read: Read) -> None:
    """Write every piece of every local tensor in place, and zeros into the padding.

    read: gives the values of a box, which are rounded to the local tensor's dtype. local_tensors:
    at least those of the table; PlanError if one is missing or has another shape.
    """
    with torch.no_grad():
        for name, described in table.items():
            tensor = _find_local_tensor(local_tensors, name, described.shape)
            if described.padding:
                tensor.zero_()
            for piece in described.pieces:
                copy_box(piece.view(tensor), piece.name, piece.box, read)


def copy_box(target: Tensor, name: str, box: Box, read: Read) -> None:
    """Write the values of a box into target in place, rounded to target's dtype.

    Reads and copies at most about 2**24 elements at a time, in complete rows, because values for a
    device are first converted in host memory.
    """
    if target.ndim:
        rows = max(1, _READ_ELEMENTS * len(target) // max(1, target.numel()))
    else:
        rows = 1
    if len(box.bounds) == 0 or rows >= len(target):
        target.copy_(read(name, box))
        return
    (first, last), *others = box.bounds
    for start in range(first, last, rows):
        part = Box(((start, min(start + rows, last)), *others))
        target[part.slices(box)].copy_(read(name, part))


def blocks(local_tensors: Mapping[str, Tensor], table: ShardTable) -> Iterator[Block]:
    """Yield every piece as a view that shares storage with its local tensor, in the table's order.

    PlanError if a local tensor is missing or has another shape than in the table.
    """
    for name, described in table.items():
        tensor = _find_local_tensor(local_tensors, name, described.shape).detach()
        for piece in described.pieces:
            yield piece.name, piece.view(tensor), piece.box


def own_parts(pieces: Iterable[Block], own: Iterable[Iterable[Box]]) -> Iterator[Block]:
    """The parts of each block that this rank owns, by `blocks.box.own_boxes`."""
    for (name, view, box), parts in zip(pieces, own, strict=True):
        for part in parts:
            yield name, view[part.slices(box)], part


class Blocks:
    """Live views by name and box, of one rank or several, that can be read and written by box."""

    def __init__(self, some: Iterable[Block]) -> None:
        self._blocks: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, values, box in some:
            self._blocks.setdefault(name, []).append((values, box))

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values of a box: a live view if one block has them all, otherwise a copy.

        PlanError if the blocks together lack a part of the box.
        """
        pieces = self.pieces(name, box)
        if pieces[0][1] == box:
            return pieces[0][0]
        result = pieces[0][0].new_empty(box.shape)
        for values, piece_box in pieces:
            result[piece_box.slices(box)] = values
        return result

    def pieces(self, name: str, box: Box) -> list[tuple[Tensor, Box]]:
        """Return (live view, its box) pairs that cover a box, in the order of the blocks.

        One pair if a single block has all of it, otherwise one for each block with an element of
        it; these overlap where blocks do. PlanError if the blocks together lack a part of the box.
        """
        view = self.view(name, box)
        if view is not None:
            return [(view, box)]
        missing = subtract_all([box], [each for _, each in self._blocks.get(name, ())])
        if missing:
            got = f"no values of box {missing[0].bounds}"
            expected = f"blocks that hold all of {box.bounds}"
            raise PlanError.of(f"tensor {name}", got, expected, "add the rank that holds it")
        result = []
        for values, each, part in self._overlaps(name, box):
            result.append((values[part.slices(each)], part))
        return result

    def view(self, name: str, box: Box) -> Tensor | None:
        """A live view of a box; None if no single block holds all of it."""
        for values, block_box in self._blocks.get(name, ()):
            if block_box.contains(box):
                return values[box.slices(block_box)]
        return None

    def sole_view(self, name: str, box: Box) -> Tensor | None:
        """Like `view`, but also None if another block holds an element of the box."""
        if len(list(self._overlaps(name, box))) == 1:
            return self.view(name, box)
        return None

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Copy values, rounded, into every block with an element of the box, also tied copies."""
        with torch.no_grad():
            for target, block_box, common in self._overlaps(name, box):
                target[common.slices(block_box)].copy_(values[common.slices(box)])

    def _overlaps(self, name: str, box: Box) -> Iterator[tuple[Tensor, Box, Box]]:
        """Yield (values, their box, the common box) of each block that has an element of `box`."""
        for values, block_box in self._blocks.get(name, ()):
            common = block_box.intersect(box)
            if common is not None:
                yield values, block_box, common


def _find_local_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """The local tensor of that name; PlanError if it is missing or has another shape."""
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        got = None if tensor is None else tuple(tensor.shape)
        do = "build the model with the table's sizes"
        raise PlanError.of(f"local tensor {name}", got, f"shape {shape} as the table says", do)
    return tensor


class Storages:
    """The storages of some tensors, which are freed and reallocated together.

    Tensors keep a storage that is resized to 0 bytes: views, Python objects and aliases stay valid,
    but reading them is an error until the storage has its size back.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """A storage that several tensors share is counted once."""
        storages = {}
        for t in tensors:
            storages[t.untyped_storage()._cdata] = t.untyped_storage()
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._host: Sequence[Tensor] = ()
        self._is_on_host = False
        self._version: int | None = None
        """Version of the values in host memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def to_host(self, version: int | None = None) -> None:
        """Copy the values to a host buffer and free the memory. A second call does nothing.

        The buffer is reused. With a GPU it is pinned, so that the host does not wait for copies.
        version: version of the values; if the buffer still has that version, nothing is copied.
        None: they are always copied.
        """
        if self._is_on_host:
            return
        if version is None or version != self._version:
            self._copy_to_host()
        self.free()
        self._is_on_host = True
        self._version = version

    def _copy_to_host(self) -> None:
        """Copy all storages to the host buffer, which is allocated at first use."""
        if not self._host:
            sizes = [num_bytes for _, num_bytes in self._storages]
            pinned = own_device() != CPU
            self._host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned).split(sizes)
        for (storage, _), target in zip(self._storages, self._host, strict=True):
            target.copy_(_bytes_of(storage), non_blocking=True)

    def free(self) -> None:
        """Free the memory. Values that are not on the host are lost."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Reallocate the memory, with the values from the host, or zeros if it has none.

        Zeros, because NaN in unused elements would spread. A storage that was not freed stays as it
        is.
        """
        for number, (storage, num_bytes) in enumerate(self._storages):
            if storage.nbytes() == num_bytes:
                continue
            storage.resize_(num_bytes)
            if self._is_on_host:
                _bytes_of(storage).copy_(self._host[number], non_blocking=True)
            else:
                _bytes_of(storage).zero_()
        self._is_on_host = False


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
