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
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for name, table in locate_stored(shapes, stored, cut).items():
        for piece in table.pieces:
            pieces[piece.name].append(_inverse(piece, name, len(table.shape)))
    result = {}
    for name, shape in shapes.items():
        table = LocalTensor(tuple(shape), tuple(pieces[name]))
        if table.padding == 0:
            result[name] = table
    return result


def locate_stored(
    shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Sequence[int]], cut: Cut
) -> dict[str, LocalTensor]:
    """Return which elements of the module's fused tensors each of the folder's tensors has.

    The inverse of `locate_fused`, with the same arguments. Tensors of the folder that have none are
    omitted. Elements that are no copies are padding.
    """
    numbering = Numbering.of({name: _small_shape(shape) for name, shape in shapes.items()})
    result = {}
    for name, numbers in cut(numbering.tensors(lambda number: number)).items():
        if name not in stored:
            continue
        pieces = []
        for small in numbering.pieces(name, numbers):
            piece = _enlarge(small, shapes[small.name], stored[name])
            if piece is not None:
                pieces.append(piece)
        if pieces:
            result[name] = LocalTensor(tuple(stored[name]), tuple(pieces))
    return result


def _inverse(piece: Piece, name: str, num_axes: int) -> Piece:
    """Return where a piece of a module's tensor is in the folder's tensor `name`, and back.

    num_axes: of the folder's tensor.
    """
    axes = piece.axes or tuple(range(num_axes))
    fused_of_own = {}
    for fused, own in enumerate(axes):
        if own is not None:
            fused_of_own[own] = fused
    inverse = tuple(fused_of_own.get(own) for own in range(num_axes))
    return Piece(name, piece.local, piece.box, inverse)


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with a number of `_PARTS` for each dimension that one of them divides."""
    small = []
    for size in shape:
        divisors = [parts for parts in _PARTS if size > parts and size % parts == 0]
        small.append(next(iter(divisors), size))
    return tuple(small)


def _enlarge(small: Piece, shape: Sequence[int], stored: Sequence[int]) -> Piece | None:
    """Return the piece of a fused tensor in a tensor of the folder, in their real sizes.

    small: the same piece in small tensors. shape: of the fused tensor. stored: of the folder's.
    None if the latter has other sizes than the small one leads to.
    """
    scales = []
    for size, num_parts in zip(shape, _small_shape(shape), strict=True):
        scales.append(size // num_parts)
    axes = small.axes or tuple(range(len(shape)))
    own_scales = [1] * len(stored)
    for fused, own in enumerate(axes):
        if own is not None:
            own_scales[own] = scales[fused]
    box = _scale_box(small.box, scales)
    local = _scale_box(small.local, own_scales)
    if box is None or local is None or box.size != local.size:
        return None
    if any(stop > size for (_, stop), size in zip(local.bounds, stored, strict=True)):
        return None
    return Piece(small.name, box, local, axes)


def _scale_box(box: Box, scales: Sequence[int]) -> Box | None:
    """The box with its bounds multiplied; None if there are not as many scales."""
    if len(box.bounds) != len(scales):
        return None
    bounds = []
    for (start, stop), scale in zip(box.bounds, scales, strict=True):
        bounds.append((start * scale, stop * scale))
    return Box(tuple(bounds))
