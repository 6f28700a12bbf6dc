"""Values between local tensors and boxes. Pure torch, no processes.

fill(local, table, read)          boxes -> local tensors (loading, resharding, a checkpoint)
blocks(local, table)              local tensors -> live views by box (the inverse)
Blocks(blocks).read               boxes out of such views: fill's third argument

`Storages`: memory that is freed for a while.
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

    local_tensors: at least those of the table, in its shapes; values are rounded to their dtype.
    """
    with torch.no_grad():
        for name, described in table.items():
            tensor = _local(local_tensors, name, described.shape)
            if described.padding:
                tensor.zero_()
            for piece in described.pieces:
                copy_box(tensor[piece.local.slices()], piece.name, piece.box, read)


def copy_box(target: Tensor, name: str, box: Box, read: Read) -> None:
    """Write a box in place, rounded to target's dtype.

    Some rows at a time: what is read for another device is converted in host memory first.
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
    """Every piece as a view that shares storage with its local tensor, in the table's order."""
    for name, described in table.items():
        tensor = _local(local_tensors, name, described.shape).detach()
        for piece in described.pieces:
            yield piece.name, tensor[piece.local.slices()], piece.box


def own_parts(held: Iterable[Block], own: Iterable[Iterable[Box]]) -> Iterator[Block]:
    """The parts of each block that `blocks.box.own_boxes` gives to this rank."""
    for (name, view, box), parts in zip(held, own, strict=True):
        for part in parts:
            yield name, view[part.slices(box)], part


class Blocks:
    """Live views by the boxes that they hold, of one rank or of several: read, or written."""

    def __init__(self, some: Iterable[Block]) -> None:
        self._held: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, values, box in some:
            self._held.setdefault(name, []).append((values, box))

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
        missing = subtract_all([box], [each for _, each in self._held.get(name, ())])
        if missing:
            got = f"no values of box {missing[0].bounds}"
            expected = f"blocks that hold all of {box.bounds}"
            raise PlanError.of(f"tensor {name}", got, expected, "add the rank that holds it")
        result = []
        for values, each, part in self._shared(name, box):
            result.append((values[part.slices(each)], part))
        return result

    def view(self, name: str, box: Box) -> Tensor | None:
        """The live values of a box; None if no block holds it whole."""
        for values, whole in self._held.get(name, ()):
            if whole.contains(box):
                return values[box.slices(whole)]
        return None

    def sole_view(self, name: str, box: Box) -> Tensor | None:
        """As `view`; None too if another block holds an element of it."""
        if len(list(self._shared(name, box))) == 1:
            return self.view(name, box)
        return None

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Copy a box in place, rounded, wherever blocks hold an element of it (a tied copy too)."""
        with torch.no_grad():
            for target, whole, common in self._shared(name, box):
                target[common.slices(whole)].copy_(values[common.slices(box)])

    def _shared(self, name: str, box: Box) -> Iterator[tuple[Tensor, Box, Box]]:
        """(values, their box, what it has of `box`) of each block that has an element of it."""
        for values, whole in self._held.get(name, ()):
            common = whole.intersect(box)
            if common is not None:
                yield values, whole, common


def _local(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        got = None if tensor is None else tuple(tensor.shape)
        do = "build the model with the table's sizes"
        raise PlanError.of(f"local tensor {name}", got, f"shape {shape} as the table says", do)
    return tensor


class Storages:
    """The storages of some tensors, each once; freed and reallocated together.

    A storage that is resized to nothing keeps its tensors: views, addresses in Python and aliases
    stay valid, and reading them is an error until the storage has its size back.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {}
        for t in tensors:
            found[t.untyped_storage()._cdata] = t.untyped_storage()
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]
        self._host: Sequence[Tensor] = ()
        self._is_on_host = False
        self._version: int | None = None
        """Of the values in host memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def to_host(self, version: int | None = None) -> None:
        """Free the memory and keep the values in one host buffer, which is reused and, beside a
        GPU, pinned, so that the host waits for no copy.

        version: of the values; if the host still has that version, nothing is copied.
        """
        if self._is_on_host:
            return
        if version is None or version != self._version:
            self._copy_to_host()
        self.free()
        self._is_on_host = True
        self._version = version

    def _copy_to_host(self) -> None:
        if not self._host:
            sizes = [num_bytes for _, num_bytes in self._storages]
            pinned = own_device() != CPU
            self._host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned).split(sizes)
        for (storage, _), kept in zip(self._storages, self._host, strict=True):
            kept.copy_(_bytes_of(storage), non_blocking=True)

    def free(self) -> None:
        """Free the memory; the values are lost, unless they are on the host."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Reallocate the memory: with the values kept on the host, else zeros (NaN in unused slots
        would spread)."""
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
