"""Tensors that transformers fuses when it loads a folder (experts), as boxes of the folder's.

transformers' own conversion says which box of a fused tensor each tensor of the folder is: the
elements of the fused tensors are numbered (`numbered`), transformers cuts the tensors as it does
when it saves a model, and the numbers in each part are read. The numbered tensors are small: a long
dimension has at most 24 elements, each of which represents an equal part of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.weights.numbered import Numbering
from spmdflow.weights.table import LocalTensor, Piece

_PARTS = (24, 16, 12, 8)
"""Elements of a long dimension in the small tensors: the first of these numbers that divides it.
Parts of equal size, such as gate and up, then end between two of them."""

Cut = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Tensors of the module -> tensors by the names of the files (`folder.in_folder_form`)."""


def locate_fused(
    shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Sequence[int]], cut: Cut
) -> dict[str, LocalTensor]:
    """Return where the folder's tensors are in each fused tensor of the module.

    shapes: of the fused tensors. stored: of all tensors in the files. Tensors that do not consist
    of boxes of the files' tensors, in their sizes, are omitted.
    """
    numbering = Numbering.of({name: _small_shape(shape) for name, shape in shapes.items()})
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, numbers in cut(numbering.tensors(lambda number: number)).items():
        if name not in stored:
            continue
        for small in numbering.pieces(name, numbers):
            piece = _enlarge(small, name, shapes[small.name], stored[name])
            if piece is not None:
                pieces[small.name].append(piece)
    result = {}
    for name, shape in shapes.items():
        table = LocalTensor(tuple(shape), tuple(pieces[name]))
        if table.padding == 0:
            result[name] = table
    return result


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with a number of `_PARTS` for each dimension that one of them divides."""
    small = []
    for size in shape:
        divisors = [parts for parts in _PARTS if size > parts and size % parts == 0]
        small.append(next(iter(divisors), size))
    return tuple(small)


def _enlarge(small: Piece, name: str, shape: Sequence[int], stored: Sequence[int]) -> Piece | None:
    """Return the piece of the folder's tensor `name` in the fused one, in their real sizes.

    small: a piece of the small fused tensor (`box`) in the folder's (`local`), that is, the other
    way round. shape: of the fused tensor. stored: of the folder's. None if the latter has other
    sizes than the small one leads to.
    """
    scales = []
    for size, num_parts in zip(shape, _small_shape(shape), strict=True):
        scales.append(size // num_parts)
    axes = small.axes or tuple(range(len(shape)))
    fused_of_own: dict[int, int] = {}
    for fused, own in enumerate(axes):
        if own is not None:
            fused_of_own[own] = fused
    own_scales = []
    for own in range(len(stored)):
        own_scales.append(scales[fused_of_own[own]] if own in fused_of_own else 1)
    box = _scale_box(small.local, own_scales)
    local = _scale_box(small.box, scales)
    if box is None or local is None or box.size != local.size:
        return None
    if any(stop > size for (_, stop), size in zip(box.bounds, stored, strict=True)):
        return None
    return Piece(name, box, local, tuple(fused_of_own.get(own) for own in range(len(stored))))


def _scale_box(box: Box, scales: Sequence[int]) -> Box | None:
    """The box with its bounds multiplied; None if there are not as many scales."""
    if len(box.bounds) != len(scales):
        return None
    bounds = []
    for (start, stop), scale in zip(box.bounds, scales, strict=True):
        bounds.append((start * scale, stop * scale))
    return Box(tuple(bounds))
