"""LoRA adapters in a Megatron stage: y = W x + scale B A x, with A and B divided as the layer is.

| layer | W of a rank | A of a rank | B of a rank | summed over tp |
|---|---|---|---|---|
| column-parallel (qkv, gate and up) | rows | all | the same rows | the gradient of A x |
| row-parallel (o, down) | columns | the same columns | all | A x |

What is summed has one number for each row of A, so it is small next to the layer's own sums. A
layer that Megatron fuses has a separate adapter for each of its parts. Every rank of the tp group
computes the same gradient for what all of them have. `weights.ranks` says which rows and columns a
rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from spmdflow.blocks.box import Box
from spmdflow.config.adapter import check_adapted_architecture, check_megatron_adapters
from spmdflow.config.model import LoRAConfig
from spmdflow.cpu.product import trained_linear
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_names
from spmdflow.parallel.layout import Layout
from spmdflow.weights.adapter import Adapters, adapter_names, is_adapter, is_b
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, Blocks, blocks
from spmdflow.weights.ranks import adapter_local_name
from spmdflow.weights.table import LocalTensor, ShardTable
from spmdflow.workers.lora_dropout import AdapterDropout


class ParallelAdapter(nn.Module):
    """A and B of one layer on one rank of a tp group."""

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear,
        name: str,
        *,
        shapes: tuple[Sequence[int], Sequence[int]],
        cfg: LoRAConfig,
        dropout: AdapterDropout,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        """name: of the adapted layer, in Hugging Face form. shapes: of this rank's A and B."""
        super().__init__()
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.lora_A = nn.Parameter(torch.empty(*shapes[0], **like))  # type: ignore[arg-type]
        self.lora_B = nn.Parameter(torch.empty(*shapes[1], **like))  # type: ignore[arg-type]
        self.divides_rows = isinstance(layer, ColumnParallelLinear)
        divided = self.lora_B if self.divides_rows else self.lora_A
        divided.tensor_model_parallel = True  # type: ignore[attr-defined]  # counted in norms
        self._name = name
        self._scale = cfg.scale
        self._dropout = dropout
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return scale B A drop(x): (T, b, in) -> (T, b, out), of this rank's columns and rows."""
        width = x.shape[-1]
        first = 0 if self.divides_rows else self._group.rank() * width
        x = self._dropout.drop(x, self._name, first=first, tokens_first=True)
        hidden = trained_linear(x, self.lora_A, None)  # (T, b, rank)
        if self._group.size() > 1:
            if self.divides_rows:
                hidden = copy_to_tensor_model_parallel_region(hidden, group=self._group)
            else:
                hidden = reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        return trained_linear(hidden, self.lora_B, None) * self._scale


class StageAdapters:
    """The adapters of a stage, which can be switched off together."""

    def __init__(
        self,
        model: GPTModel,
        table: ShardTable,
        cfg: LoRAConfig,
        *,
        dropout: AdapterDropout,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        """Adds adapters to the layers of a model of local layers, in place, without values.

        table: the local tensors of this rank, adapters included (`weights.ranks.megatron_tables`).
        group: the tp group.
        """
        self.are_on = True
        for name, layer in list(model.decoder.named_modules(prefix="decoder")):
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                tensor = table.get(f"{name}.weight")
                added = nn.ModuleDict()
                for part in () if tensor is None else _adapted_parts(name, tensor, table):
                    shapes = tuple(
                        table[adapter_local_name(name, each)].shape for each in adapter_names(part)
                    )
                    added[_last(part)] = ParallelAdapter(
                        layer,
                        part,
                        shapes=shapes,  # type: ignore[arg-type]
                        cfg=cfg,
                        dropout=dropout,
                        group=group,
                    )
                if added:
                    assert tensor is not None
                    layer.adapters = added
                    self._add_to_output(layer, output_order(tensor, list(added)))

    def _add_to_output(self, layer: nn.Module, order: Tensor | None) -> None:
        """Make a layer add the outputs of its adapters to its own. order: see `output_order`."""
        plain = layer.forward
        adapters: Any = layer.adapters

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            output, bias = plain(x, *args, **kwargs)
            if not self.are_on:
                return output, bias
            parts = [adapter(x) for adapter in adapters.values()]
            added = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
            if order is not None:
                missing = int(order.max()) + 1 - added.shape[-1]
                added = nn.functional.pad(added, (0, missing))
                added = added.index_select(-1, order.to(added.device))
            return output + added, bias

        layer.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the with block the model computes without its adapters."""
        self.are_on = False
        try:
            yield
        finally:
            self.are_on = True


def output_order(tensor: LocalTensor, parts: Sequence[str]) -> Tensor | None:
    """Return where each row of a fused layer's output is among the outputs of its adapters.

    parts: last names of the layers that have an adapter, in the order in which their outputs are
    joined. Rows without an adapter are the element after the last one, which is zero. None: the
    orders are the same. (out,) int64.
    """
    rows_of_part: dict[str, list[int]] = {part: [] for part in parts}
    for piece in tensor.pieces:
        part = _last(piece.name.removesuffix(".weight"))
        if part in rows_of_part:
            rows_of_part[part] += range(*piece.local.bounds[0])
    joined = [row for part in parts for row in rows_of_part[part]]
    num_rows = tensor.shape[0]
    if joined == list(range(num_rows)):
        return None
    order = torch.full((num_rows,), len(joined))
    order[torch.tensor(joined)] = torch.arange(len(joined))
    return order


def _adapted_parts(name: str, tensor: LocalTensor, table: ShardTable) -> list[str]:
    """Names, without .weight, of the Hugging Face layers in a local tensor that have an adapter."""
    parts = []
    for piece in tensor.pieces:
        part = piece.name.removesuffix(".weight")
        a, _ = adapter_names(part)
        if part not in parts and adapter_local_name(name, a) in table:
            parts.append(part)
    return parts


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def without_adapters(table: ShardTable) -> dict[str, LocalTensor]:
    """Return the local tensors of weights alone."""
    result = {}
    for name, tensor in table.items():
        if not any(is_adapter(piece.name) for piece in tensor.pieces):
            result[name] = tensor
    return result


def check_adapted_stage(
    name: str, architecture: Architecture, layout: Layout, options: Sequence[str]
) -> None:
    """Raise ConfigError if a Megatron engine cannot train adapters of this model on this layout.

    name: of the role.
    """
    check_megatron_adapters(name, pp_size=layout.pp_size, options=options)
    check_adapted_architecture(name, architecture, tp_size=layout.tp_size)


def freeze_base(
    parameters: Mapping[str, nn.Parameter], table: ShardTable, adapters: Adapters, *, key: str
) -> None:
    """Disable the gradients of all parameters but those of adapters and modules to save.

    parameters, table: by local name. key: of the settings, for errors. ConfigError if a module to
    save is only a part of a tensor.
    """
    for name, parameter in parameters.items():
        trained = {}
        for piece in table[name].pieces:
            trained[piece.name] = adapters.is_trained(piece.name)
        if any(trained.values()) and not all(trained.values()):
            part = next(each for each, is_trained in trained.items() if is_trained)
            got = f"{_last(part.rpartition('.')[0])}, which is a part of a tensor of Megatron"
            names = sorted({_last(each.rpartition(".")[0]) for each in trained})
            do = f"name all of {', '.join(names)}, or choose engine.kind={engine_names()[0]}"
            raise ConfigError.of(f"{key}.modules_to_save", got, "a tensor of its own", do)
        parameter.requires_grad_(any(trained.values()))


def start_gradients_at_embedding(model: GPTModel) -> None:
    """Let recomputed layers have gradients although the embedding is frozen.

    Megatron's recomputation gives a layer gradients only if its input has one. Does nothing for a
    stage without an embedding.
    """
    if not model.pre_process:
        return
    embed = model.embedding.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = embed(*args, **kwargs)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()
        return embedded

    model.embedding.forward = forward


def merged_blocks(
    parameters: Mapping[str, nn.Parameter], table: ShardTable, cfg: LoRAConfig
) -> Iterator[Block]:
    """Yield (name, values, box) of every weight, with its adapter merged: W + scale B A.

    Needs no messages: a rank has the rows of B and the columns of A of its part of W. The sums are
    float32, rounded once to the precision of W. parameters, table: by local name.
    """
    every = list(blocks(parameters, table))
    adapters = Blocks(block for block in every if is_adapter(block[0]))
    adapted = {name for name, _, _ in every if is_adapter(name)}
    for name, view, box in every:
        a, b = adapter_names(name)
        if a in adapted:
            rows, columns = box.bounds
            of_a = adapters.read(a, Box(((0, cfg.rank), columns))).float()
            of_b = adapters.read(b, Box((rows, (0, cfg.rank)))).float()
            yield name, torch.add(view.float(), of_b @ of_a, alpha=cfg.scale).to(view.dtype), box
        elif not is_adapter(name):
            yield name, view, box


def separate_blocks(
    parameters: Mapping[str, nn.Parameter], table: ShardTable, cfg: LoRAConfig
) -> Iterator[Block]:
    """Yield every weight and A as it is, and scale B: the form that generators add."""
    for name, view, box in blocks(parameters, table):
        yield name, view * cfg.scale if is_b(name) else view, box
