"""Codes of a model's elements, by which a table of weights is compared with what a loader does.

A code depends on the tensor's name and on the element's index. All weights are loaded as codes, and
every element of the engine is compared with the code that the table expects there, twice with
other codes: a single misplaced element has the expected codes with a probability of 1 in 2**14.
Pure: knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from spmdflow.weights.table import Piece, ShardTable

Load = Callable[[Mapping[str, Tensor]], None]
"""Loads some of the model's tensors, by name, into the engine's."""
Shapes = Mapping[str, Sequence[int]]
"""Of the model's tensors, by name."""

CPU = torch.device("cpu")
EXACT_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float64: 24}
"""Bits of an integer that a type holds exactly; of float64 no more than are useful."""
ORDER_FACTOR = 1_220_703_125
"""Odd: number * ORDER_FACTOR modulo 2**32 puts numbers in another order."""
_CODE_BITS = 7
"""A code is at least 1 and at most 2**7, which every type holds exactly."""
_NUM_CHECKS = 2
_BLOCK = 1 << 26
"""Most elements whose codes are computed at a time."""


def table_agrees(
    local_tensors: Mapping[str, Tensor],
    table: ShardTable,
    layers: Mapping[str, Shapes],
    load: Load,
) -> bool:
    """Return whether the loader stores every element where the table says.

    local_tensors: the engine's, by name; zeros before and afterwards. layers: shapes of the model's
    tensors that are loaded together, in any groups that have all of them.
    """
    dtype = narrowest_type(local_tensors)
    device = next(iter(local_tensors.values())).device
    all_shapes = {name: shape for shapes in layers.values() for name, shape in shapes.items()}
    is_right = True
    for salt in range(_NUM_CHECKS):
        for shapes in layers.values():
            codes = {}
            for name, shape in shapes.items():
                of_index = partial(_code, name, salt)
                codes[name] = fill_by_index(tuple(shape), of_index, dtype=dtype, device=device)
            load(codes)
        for name, tensor in local_tensors.items():
            local = table[name]
            is_right = is_right and int(tensor.count_nonzero()) + local.padding == tensor.numel()
            for piece in local.pieces:
                shape = all_shapes[piece.name]
                is_right = is_right and _has_codes(tensor, piece, shape, salt)
            tensor.zero_()
    return is_right


def _has_codes(tensor: Tensor, piece: Piece, shape: Sequence[int], salt: int) -> bool:
    """Whether a piece of an engine's tensor has the codes of the model's, which has this shape."""
    view = piece.view(tensor)
    if view.ndim == 0:
        view = view[None]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    rows = max(1, _BLOCK // max(1, prod(view.shape[1:])))
    for start in range(0, len(view), rows):
        part = view[start : start + rows]
        index = torch.zeros((), dtype=torch.int32, device=tensor.device)
        for axis, (low, _) in enumerate(piece.box.bounds):
            origin = low + start if axis == 0 else low
            steps = torch.arange(part.shape[axis], dtype=torch.int32, device=tensor.device)
            sizes = [1] * part.ndim
            sizes[axis] = len(steps)
            index = index + ((steps + origin) * strides[axis]).view(sizes)
        if not bool((part == _code(piece.name, salt, index)).all()):
            return False
    return True


def _code(name: str, salt: int, index: Tensor) -> Tensor:
    """A number from 1 to 128 for elements of a tensor; index: row-major, int32."""
    mixed = (index + (crc32(f"{name} {salt}".encode()) >> 1)) * ORDER_FACTOR  # modulo 2**32
    mixed = mixed ^ ((mixed >> 15) & 0x1FFFF)
    mixed = mixed * 0x2C1B3C6D
    return ((mixed >> 20) & ((1 << _CODE_BITS) - 1)) + 1


def fill_by_index(
    shape: tuple[int, ...],
    of_index: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a tensor whose elements are of_index(their row-major index, int32)."""
    size = prod(shape)
    result = torch.empty(size, dtype=dtype, device=device)
    for start in range(0, size, _BLOCK):
        stop = min(size, start + _BLOCK)
        result[start:stop] = of_index(torch.arange(start, stop, dtype=torch.int32, device=device))
    return result.view(shape)


def narrowest_type(local_tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The tensors' type that holds the fewest integers exactly."""
    return min((tensor.dtype for tensor in local_tensors.values()), key=EXACT_BITS.__getitem__)
