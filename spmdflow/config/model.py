"""Which weights a model has, in which precision, and what of a policy is trained."""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.config.leaf import setting
from spmdflow.weights.adapter import Adapters, adapter_scale

AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16")


class Precise:
    """A part of the settings that has a dtype."""

    dtype: str
    max_model_len: int | None = None
    """Of a generator: tokens of prompt and response together; None: as the settings say."""

    @property
    def precision(self) -> str:
        """dtype, or float32 while it is auto (before a run or a plan has chosen)."""
        if self.dtype == AUTO:
            return DTYPES[1]
        return self.dtype


@dataclass
class ModelConfig(Precise):
    """Which weights, in which precision."""

    path: str = setting(
        "Hugging Face folder, owner/name[@revision] on the hub, or a RUN_DIR or checkpoint."
    )
    dtype: str = setting(
        "Compute precision; gradients and optimizer stay float32. On a CPU bfloat16 is that of "
        "matrix products. auto: bfloat16 on CUDA, float32 on CPU, for a reference the actor's.",
        AUTO,
        one_of=DTYPES,
    )


@dataclass
class LoRAConfig:
    """Adapters: y = W x + scale B A x; only A and B are trained (Hu et al. 2021)."""

    rank: int = setting("Rows of A and columns of B.", 16, at_least=1)
    alpha: float = setting(
        "Adapters are scaled by alpha / rank, with rslora by alpha / sqrt(rank).", 32.0, above=0
    )
    targets: list[str] = setting(
        "Linear layers that get one, by the ends of their names, such as q_proj; all-linear: all "
        "those of the decoder's layers.",
        ["all-linear"],
    )
    adapter: str | None = setting(
        "Start from this adapter: a folder in peft's format, a name on the hub, or a RUN_DIR or "
        "checkpoint with adapters. It gives the values of all other settings of this section.",
        None,
    )
    rslora: bool = setting("Scale adapters by alpha / sqrt(rank) (Kalajdzievski 2023).", False)
    dropout: float = setting(
        "Probability that an element of an adapter's input is dropped in updates. "
        "Log-probabilities and generation are without dropout.",
        0.0,
        at_least=0,
        below=1,
    )
    modules_to_save: list[str] = setting(
        "Modules that are trained whole next to the adapters, by the ends of their names, such as "
        "lm_head or embed_tokens.",
        [],
    )

    @property
    def adapters(self) -> Adapters:
        """Which weights have them, and which are trained whole."""
        return Adapters(self.rank, tuple(self.targets), tuple(self.modules_to_save))

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return adapter_scale(self.rank, self.alpha, rslora=self.rslora)


@dataclass
class PolicyModelConfig(ModelConfig):
    """A model that is trained, whole or by adapters."""

    lora: LoRAConfig | None = setting(
        "Train adapters of this rank and leave the weights as they are.", None
    )
