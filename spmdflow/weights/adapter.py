"""LoRA adapters by name: which weights have one, and the names of a weight's A and B.

y = W x + scale B A x (Hu et al. 2021). The weight `q_proj.weight` (out, in) has the adapter
`q_proj.lora_A.weight` (rank, in) and `q_proj.lora_B.weight` (out, rank). Modules to save have no
adapter: all their weights are trained. Names and numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""A target that means every linear layer of the decoder's layers."""
_A = ".lora_A.weight"
_B = ".lora_B.weight"
_ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True)
class Adapters:
    """Which weights of a model have adapters, of which rank, and which are trained whole."""

    rank: int
    targets: tuple[str, ...]
    """Ends of names of linear layers, or `ALL_LINEAR`."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that are trained whole, such as lm_head."""

    def is_trained(self, name: str) -> bool:
        """Whether a tensor is trained: an A, a B, or a tensor of a module to save."""
        return is_adapter(name) or self.is_saved(name)

    def is_saved(self, name: str) -> bool:
        """Whether a tensor belongs to a module to save."""
        return is_target(name.rpartition(".")[0], self.modules_to_save)

    def shapes(self, weights: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
        """Return name -> shape of every A (rank, in) and B (out, rank) that the weights have.

        A weight has an adapter if it is 2-D, ".layers." is in its name, its layer is a target, and
        no module to save. Experts and their routers are no linear layers.
        weights: the model's shapes by Hugging Face name; existing As and Bs are skipped.
        """
        shapes: dict[str, tuple[int, int]] = {}
        for name, shape in weights.items():
            is_linear = len(shape) == 2 and ".layers." in name and not is_adapter(name)
            is_linear = is_linear and not name.endswith(_ROUTER) and not self.is_saved(name)
            if is_linear and is_target(name.removesuffix(".weight"), self.targets):
                a, b = adapter_names(name)
                shapes |= {a: (self.rank, shape[1]), b: (shape[0], self.rank)}
        return shapes


def adapter_scale(rank: int, alpha: float, *, rslora: bool) -> float:
    """Return what B A x is multiplied by: alpha / rank, or alpha / sqrt(rank) with rslora.

    Rank-stabilised LoRA: Kalajdzievski 2023.
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of the A and the B of a weight."""
    layer = weight.removesuffix(".weight")
    return layer + _A, layer + _B


def is_adapter(name: str) -> bool:
    """Whether a tensor is an A or a B."""
    return name.endswith((_A, _B))


def is_b(name: str) -> bool:
    """Whether a tensor is a B."""
    return name.endswith(_B)


def is_target(layer: str, targets: Iterable[str]) -> bool:
    """Whether a linear layer of this name gets an adapter, because its name ends in a target."""
    return any(end in (ALL_LINEAR, layer) or layer.endswith(f".{end}") for end in targets)
