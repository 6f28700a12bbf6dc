"""LoRA: linear layers with an adapter, y = W x + b + alpha / rank B A x (Hu et al. 2021).

Only A and B are trained. A is initialized as in peft (uniform, Kaiming with a = sqrt 5), from a
separate random stream for each layer. B is zero, so the model initially equals the one in the
folder. Knows no ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from spmdflow.blocks.box import Box
from spmdflow.config.model import LoRAConfig
from spmdflow.cpu.product import Linear
from spmdflow.data.row_id import seed_of
from spmdflow.errors import ConfigError
from spmdflow.weights.adapter import adapter_names, is_adapter, is_target
from spmdflow.weights.move import Read
from spmdflow.workers.model import LoadedModel


class LoRALinear(Linear):
    """A linear layer with an adapter."""

    lora_A: Linear
    lora_B: Linear
    scale: float
    uses_adapter: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + b, plus scale B A x if uses_adapter: (..., in) -> (..., out)."""
        output = super().forward(input)
        if not self.uses_adapter:
            return output
        adapted: Tensor = self.lora_B(self.lora_A(input))
        return output + adapted * self.scale


def add_adapters(model: LoadedModel, cfg: LoRAConfig, *, seed: int, key: str) -> LoadedModel:
    """Add adapters to the linear layers that cfg.targets names, in place.

    Only layers inside decoder layers get one; the experts of a mixture, which transformers fuses to
    one tensor, get none. Returns the model with lora=cfg and a reader that returns the adapters'
    initial values. seed: of the run. key: the settings' name, for errors. ConfigError for a target
    that matches no layer.
    """
    inside = set()
    for layer in model.layers:
        for part in layer.modules():
            inside.add(id(part))
    linear = {}
    for name, part in model.module.named_modules():
        if type(part) is Linear and id(part) in inside:
            linear[name] = part
    for target in cfg.targets or [""]:
        if not any(is_target(name, [target]) for name in linear):
            ends = sorted({name.rpartition(".")[2] for name in linear})
            expected = f"all-linear or some of {', '.join(ends)}"
            got = repr(target)
            if target in _names_of_experts(model.module):
                got += ", which is a tensor of experts and takes no adapters"
            raise ConfigError.of(f"{key}.targets", got, expected, "choose some of these")
    for name, part in linear.items():
        if is_target(name, cfg.targets):
            _add_adapter(part, cfg, name, None if part.weight.is_meta else seed)
    return replace(model, lora=cfg, read=model.read and _with_start(model.read, model.module, seed))


def _names_of_experts(module: nn.Module) -> set[str]:
    """Last parts of the names of tensors that hold several experts, and of their modules."""
    names = set()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 3:
            names.update(name.split(".")[-2:])
    return names


def _add_adapter(part: Linear, cfg: LoRAConfig, name: str, seed: int | None) -> None:
    """Turn a linear layer into a LoRALinear in place, with lora_A, lora_B, scale and uses_adapter.

    seed: of the initial values of A and B. None if they are read later (weights on the meta
    device).
    """
    like = {"bias": False, "device": part.weight.device, "dtype": part.weight.dtype}
    part.lora_A = Linear(part.in_features, cfg.rank, **like)  # type: ignore[arg-type]
    part.lora_B = Linear(cfg.rank, part.out_features, **like)  # type: ignore[arg-type]
    part.__class__ = LoRALinear
    assert isinstance(part, LoRALinear)
    part.scale = cfg.scale
    part.uses_adapter = True
    if seed is not None:
        pairs = zip((part.lora_A, part.lora_B), adapter_names(name), strict=True)
        for adapter, adapter_name in pairs:
            adapter.weight.data.copy_(
                _first_values(adapter_name, tuple(adapter.weight.shape), seed)
            )


def _with_start(read: Read, module: nn.Module, seed: int) -> Read:
    """Return a reader that computes the initial values of adapters, and reads all other tensors."""
    shapes = {}
    for n, p in module.named_parameters():
        if is_adapter(n):
            shapes[n] = tuple(p.shape)

    def read_either(name: str, box: Box) -> Tensor:
        if name not in shapes:
            return read(name, box)
        return _first_values(name, shapes[name], seed)[box.slices()]

    return read_either


def _first_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of a complete A or B, equal on every rank.

    A is uniform (Kaiming, a = sqrt 5) from a stream by seed and name. B is zero.
    """
    values = torch.zeros(shape)
    if name.endswith(adapter_names("")[0]):
        stream = seed_of(seed, "lora", zlib.crc32(name.encode()))
        nn.init.kaiming_uniform_(
            values, a=math.sqrt(5), generator=torch.Generator().manual_seed(stream)
        )
    return values


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Switch all adapters of the module off inside the with block, and on again at its end.

    Forward passes inside then use the model as in its folder.
    """
    adapted = []
    for part in module.modules():
        if isinstance(part, LoRALinear):
            adapted.append(part)
    for part in adapted:
        part.uses_adapter = False
    try:
        yield
    finally:
        for part in adapted:
            part.uses_adapter = True
