"""Tensors that transformers fuses when it loads a folder (experts), as boxes of the folder's.

Which box of a fused tensor a tensor of the folder is, is read off transformers' own conversion,
backwards: the fused tensors get numbers, transformers cuts them as it does when it saves, and the
numbers say what lies where. The numbers stand for a small tensor: a long dimension has 24 numbers,
each of which stands for an equal part of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.weights.numbered import Numbering
from spmdflow.weights.table import LocalTensor, Piece

_PARTS = (24, 16, 12, 8)
"""Numbers of a long dimension, whichever of them divides it first: fused parts of equal size end
between two of them."""

Cut = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Tensors of the module -> tensors by the names of the files (`folder.in_folder_form`)."""


def locate_fused(
    shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Sequence[int]], cut: Cut
) -> dict[str, LocalTensor]:
    """Return where the folder's tensors are in each fused tensor of the module.

    shapes: of the fused tensors. stored: of all tensors in the files. Tensors that do not consist
    of boxes of the files' tensors, in their sizes, are left out.
    """
    numbering = Numbering.of({name: _small(shape) for name, shape in shapes.items()})
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, numbers in cut(numbering.tensors(lambda number: number)).items():
        if name not in stored:
            continue
        for found in numbering.pieces(name, numbers):
            piece = _enlarged(found, name, shapes[found.name], stored[name])
            if piece is not None:
                pieces[found.name].append(piece)
    result = {}
    for name, shape in shapes.items():
        table = LocalTensor(tuple(shape), tuple(pieces[name]))
        if table.padding == 0:
            result[name] = table
    return result


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with the number of parts for each long dimension."""
    small = []
    for size in shape:
        parts = [parts for parts in _PARTS if size > parts and size % parts == 0]
        small.append(parts[0] if parts else size)
    return tuple(small)


def _enlarged(found: Piece, name: str, shape: Sequence[int], stored: Sequence[int]) -> Piece | None:
    """Return the piece of the folder's tensor `name` in the fused one, in their own sizes.

    found: between their small forms, from the other side: its box is of the fused tensor, its local
    box of the folder's. shape, stored: of the fused tensor, and of the folder's. None if the
    folder's tensor has other sizes.
    """
    scales = [size // small for size, small in zip(shape, _small(shape), strict=True)]
    axes = found.axes or tuple(range(len(shape)))
    fused_of_own: dict[int, int] = {}
    for fused, own in enumerate(axes):
        if own is not None:
            fused_of_own[own] = fused
    own_scales = []
    for own in range(len(stored)):
        own_scales.append(scales[fused_of_own[own]] if own in fused_of_own else 1)
    box = _times(found.local, own_scales)
    local = _times(found.box, scales)
    if box is None or local is None or box.size != local.size:
        return None
    if any(stop > size for (_, stop), size in zip(box.bounds, stored, strict=True)):
        return None
    return Piece(name, box, local, tuple(fused_of_own.get(own) for own in range(len(stored))))


def _times(box: Box, scales: Sequence[int]) -> Box | None:
    """The box with its bounds multiplied; None if there are not as many scales."""
    if len(box.bounds) != len(scales):
        return None
    bounds = []
    for (start, stop), scale in zip(box.bounds, scales, strict=True):
        bounds.append((start * scale, stop * scale))
    return Box(tuple(bounds))
