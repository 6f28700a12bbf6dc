"""LoRA: linear layers with an adapter, y = W x + b + scale B A x (Hu et al. 2021).

Only A, B and the modules to save are trained. A and B start from a folder in peft's format.
Without one, A is initialized as in peft (uniform, Kaiming with a = sqrt 5), from a separate random
stream for each layer, and B is zero, so the model initially equals the one in the folder. Knows no
ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spmdflow.blocks.box import Box
from spmdflow.config.model import LoRAConfig
from spmdflow.cpu.product import Linear
from spmdflow.data.row_id import seed_of
from spmdflow.errors import ConfigError
from spmdflow.weights.adapter import ALL_LINEAR, adapter_names, is_adapter, is_b, is_target
from spmdflow.weights.move import Read
from spmdflow.weights.peft_folder import PeftFolder
from spmdflow.weights.table import shapes_by_name
from spmdflow.workers.lora_dropout import AdapterDropout
from spmdflow.workers.model import LoadedModel, ModelSource


class LoRALinear(Linear):
    """A linear layer with an adapter."""

    lora_A: Linear
    lora_B: Linear
    scale: float
    uses_adapter: bool
    dropout: AdapterDropout
    full_name: str
    """Name of the layer in the model."""

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + b, plus scale B A drop(x) if uses_adapter: (b, T, in) -> (b, T, out)."""
        output = super().forward(input)
        if not self.uses_adapter:
            return output
        adapted: Tensor = self.lora_B(self.lora_A(self.dropout.drop(input, self.full_name)))
        return output + adapted * self.scale


def add_adapters(model: LoadedModel, cfg: LoRAConfig, *, seed: int, key: str) -> LoadedModel:
    """Add adapters to the linear layers that cfg.targets names, in place.

    Only layers inside decoder layers get one; the experts of a mixture, which transformers fuses to
    one tensor, get none, nor does a module to save. Returns the model with lora=cfg, the dropout of
    its adapters, and a reader that returns the initial values of what is trained. seed: of the run.
    key: the settings' name, for errors. ConfigError for a target or a module to save that the model
    does not have, and for an adapter of another model to start from.
    """
    inside = set()
    for layer in model.layers:
        for part in layer.modules():
            inside.add(id(part))
    linear = {}
    for name, part in model.module.named_modules():
        is_saved = is_target(name, cfg.modules_to_save)
        if type(part) is Linear and id(part) in inside and not is_saved:
            linear[name] = part
    check_targets(cfg.targets, linear, experts=_names_of_experts(model.module), key=key)
    tensors = dict(model.module.named_parameters(remove_duplicate=False))
    tied = tensors.keys() - dict(model.module.named_parameters()).keys()
    check_modules_to_save(cfg.modules_to_save, tensors, tied, key=key)
    dropout = AdapterDropout(cfg.dropout, seed)
    for name, part in linear.items():
        if is_target(name, cfg.targets):
            _add_adapter(part, cfg, name, dropout)
    shapes = {}
    for name, parameter in model.module.named_parameters():
        if cfg.adapters.is_trained(name):
            shapes[name] = tuple(parameter.shape)
    start = first_values(cfg, shapes, is_tied=bool(tied), seed=seed, key=key)
    if model.read is not None:
        return replace(model, lora=cfg, dropout=dropout, read=start.read_before(model.read))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name in start.shapes:
                parameter.copy_(start.read(name, Box.of_shape(parameter.shape)))
    return replace(model, lora=cfg, dropout=dropout)


def adapt_source(model: ModelSource, cfg: LoRAConfig, *, seed: int, key: str) -> ModelSource:
    """Return the source of a model with lora=cfg, whose reader also has the first values of what is
    trained.

    The engine adds the adapters to its modules. Arguments and errors: as in `add_adapters`.
    """
    architecture = replace(model.architecture, adapters=cfg.adapters)
    weights = shapes_by_name(model.architecture)
    shapes = shapes_by_name(architecture)
    every = replace(cfg.adapters, targets=(ALL_LINEAR,)).shapes(weights)
    linear = [name.rsplit(".", 2)[0] for name in every if is_b(name)]  # x.q_proj.lora_B.weight
    check_targets(cfg.targets, linear, experts=(), key=key)
    tied = ["lm_head.weight"] if model.architecture.tied else []
    check_modules_to_save(cfg.modules_to_save, [*weights, *tied], tied, key=key)
    trained = {name: x for name, x in shapes.items() if cfg.adapters.is_trained(name)}
    start = first_values(cfg, trained, is_tied=bool(tied), seed=seed, key=key)
    assert model.read is not None
    dropout = AdapterDropout(cfg.dropout, seed)
    return replace(model, lora=cfg, dropout=dropout, read=start.read_before(model.read))


def check_targets(
    targets: Sequence[str], linear: Iterable[str], *, experts: Collection[str], key: str
) -> None:
    """Raise ConfigError unless each target is the end of a linear layer's name.

    linear: names of the layers that can have an adapter. experts: names of tensors of experts. key:
    as in `add_adapters`.
    """
    names = list(linear)
    for target in targets or [""]:
        if not any(is_target(name, [target]) for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            expected = f"all-linear or some of {', '.join(ends)}"
            got = repr(target)
            if target in experts:
                got += ", which is a tensor of experts and takes no adapters"
            raise ConfigError.of(f"{key}.targets", got, expected, "choose some of these")


def check_modules_to_save(
    modules: Sequence[str], tensors: Iterable[str], tied: Iterable[str], *, key: str
) -> None:
    """Raise ConfigError unless each of these ends of names is a module with tensors of its own.

    tensors: names of all tensors. tied: those of them that are another name of an earlier one; of
    these the earlier name must be given. key: as in `add_adapters`.
    """
    for module in modules:
        where = f"{key}.modules_to_save"
        if any(is_target(name.rpartition(".")[0], [module]) for name in tied):
            got = f"{module!r}, whose weight is that of the embedding"
            do = "write embed_tokens instead, which trains the weight that both share"
            raise ConfigError.of(where, got, "a module with a weight of its own", do)
        if not any(is_target(name.rpartition(".")[0], [module]) for name in tensors):
            ends = {name.split(".")[-2] for name in tensors if name.count(".")}
            expected = f"some of {', '.join(sorted(ends))}"
            raise ConfigError.of(where, repr(module), expected, "choose some of these")


def _names_of_experts(module: nn.Module) -> set[str]:
    """Last parts of the names of tensors that hold several experts, and of their modules."""
    names = set()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 3:
            names.update(name.split(".")[-2:])
    return names


def _add_adapter(part: Linear, cfg: LoRAConfig, name: str, dropout: AdapterDropout) -> None:
    """Turn a linear layer into a LoRALinear in place, whose A and B have no values yet."""
    like = {"bias": False, "device": part.weight.device, "dtype": part.weight.dtype}
    part.lora_A = Linear(part.in_features, cfg.rank, **like)  # type: ignore[arg-type]
    part.lora_B = Linear(cfg.rank, part.out_features, **like)  # type: ignore[arg-type]
    part.__class__ = LoRALinear
    assert isinstance(part, LoRALinear)
    part.scale = cfg.scale
    part.uses_adapter = True
    part.dropout = dropout
    part.full_name = name


@dataclass(frozen=True)
class FirstValues:
    """The initial values of the tensors that are not read from the model's folder."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the complete tensors, by name."""
    read: Read

    def read_before(self, other: Read) -> Read:
        """Return a reader of these tensors and, by another reader, of all others."""

        def read_either(name: str, box: Box) -> Tensor:
            return self.read(name, box) if name in self.shapes else other(name, box)

        return read_either


def first_values(
    cfg: LoRAConfig, shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool, seed: int, key: str
) -> FirstValues:
    """Return the initial values of what is trained with adapters.

    All are those of cfg.adapter, if that is set. Otherwise A and B are new, and modules to save
    begin with the model's weights. shapes: of all trained tensors. is_tied: the head is the
    embedding. seed: of the run. key: as in `add_adapters`. ConfigError if cfg.adapter has other
    tensors.
    """
    if cfg.adapter is not None:
        folder = PeftFolder(f"{key}.adapter", cfg.adapter)
        folder.check(shapes, is_tied=is_tied)
        return FirstValues(shapes, folder.read)
    new = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    return FirstValues(new, lambda name, box: _new_values(name, new[name], seed)[box.slices()])


def _new_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of a complete new A or B, equal on every rank.

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
