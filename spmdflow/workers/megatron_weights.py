"""A stage's live tensors under their Hugging Face names: boxes, whole tensors, hashes, state.

Which element is what comes from `weights.megatron`. The ranks of a replica (tp and pp) hold every
element once, but for norms, small biases and a tied copy, which are owned by their first holder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdflow.blocks.box import Box, flat_range
from spmdflow.blocks.hash import box_hash
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.cut import LocalTensor, Piece, ShardTable, owned
from spmdflow.weights.move import Block, Read, blocks, fill
from spmdflow.weights.table import parameters
from spmdflow.workers.engine import sum_hashes
from spmdflow.workers.megatron_model import local_name


class StageWeights:
    """One rank's parameters. `full_tensors` and `hashes` are collective over the replica."""

    def __init__(
        self,
        module: nn.Module,
        architecture: Architecture,
        tables: Sequence[ShardTable],
        group: dist.ProcessGroup,
    ) -> None:
        """tables: of the ranks of the replica, in their order; group: these ranks."""
        self.table = tables[group.rank()]
        self._owned = owned(tables)[group.rank()]
        self.architecture, self._group = architecture, group
        self._parameters = {local_name(name): p for name, p in module.named_parameters()}
        found = {name: tuple(p.shape) for name, p in self._parameters.items()}
        expected = {name: tensor.shape for name, tensor in self.table.items()}
        assert found == expected, (
            f"table and model differ: {set(found.items()) ^ set(expected.items())}"
        )

    @property
    def local(self) -> dict[str, Tensor]:
        """Live local tensors by Megatron's names."""
        return {name: self._parameters[name].detach() for name in self.table}

    def load(self, read: Read) -> None:
        """Fill every tensor through a reader of boxes; padding becomes zero."""
        fill(self.local, self.table, read)

    def blocks(self) -> Iterator[Block]:
        """(Hugging Face name, live view, its box of the whole tensor) of all that is held here."""
        return blocks(self.local, self.table)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 tensor) in the order of the architecture, on every rank."""
        mine: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, tensor, box in blocks(self.local, self._owned):
            mine.setdefault(name, []).append((tensor, box))
        for parameter in parameters(self.architecture):
            whole = torch.zeros(parameter.shape, device=self._device)
            for tensor, box in mine.get(parameter.name, ()):
                whole[box.slices()] = tensor.float()
            # one rank has each element's bits, the others zeros: the sum of bits is exact
            dist.all_reduce(whole.view(torch.int32), group=self._group)
            yield parameter.name, whole

    def hashes(self, dtype: torch.dtype) -> dict[str, int]:
        """Positional hash of each whole tensor cast to dtype, from the boxes themselves."""
        shapes = {parameter.name: parameter.shape for parameter in parameters(self.architecture)}
        local = dict.fromkeys(shapes, 0)
        for name, tensor, box in blocks(self.local, self._owned):
            local[name] += box_hash(tensor.to(dtype), box, shapes[name])
        return sum_hashes(local, self._group, self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device


def block_name(name: str, box: Box) -> str:
    """Key of a box in a checkpoint: model.norm.weight[0:64]."""
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box.bounds)}]"


def flat_blocks(tensor: LocalTensor, flat: Tensor, start: int) -> Iterator[Block]:
    """(name, live view, its box) in elements start, start + 1, ... of a flattened local tensor."""
    for local in flat_range(tensor.shape, start, start + flat.numel()):
        for piece in tensor.pieces:
            common = piece.local.intersect(local)
            if common is not None:
                view = _view(flat, start, tensor.shape, common)
                yield piece.name, view, _moved(common, piece)


def _moved(local: Box, piece: Piece) -> Box:
    """The box of the Hugging Face tensor that lies at `local`."""
    shifts = [
        origin - low
        for (low, _), (origin, _) in zip(piece.local.bounds, piece.box.bounds, strict=True)
    ]
    return Box(
        tuple(
            (low + shift, high + shift)
            for (low, high), shift in zip(local.bounds, shifts, strict=True)
        )
    )


def _view(flat: Tensor, start: int, shape: tuple[int, ...], box: Box) -> Tensor:
    """A box of a tensor of that shape, of which flat holds the elements from start on."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    first = sum(low * stride for (low, _), stride in zip(box.bounds, strides, strict=True))
    return flat.as_strided(box.shape, strides, flat.storage_offset() + first - start)
