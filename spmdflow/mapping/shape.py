"""`ModelShape`: the sizes of a decoder that decide its FLOPs and bytes. Knows no ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import parameters


@dataclass(frozen=True)
class ModelShape:
    """A decoder: `num_layers` of attention and a feed-forward network, an embedding, a head."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    """Whether the logits use the embedding."""
    scalar_head: bool = False
    """One value a token instead of logits."""
    gated: bool = True
    """Whether the feed-forward network has a gate: three matrices instead of two."""
    nominal_parameters: int | None = None
    """The size in the model's name, where figures are to follow it; None: counted."""

    @classmethod
    def from_architecture(cls, arch: Architecture, *, name: str) -> ModelShape:
        """Of an architecture that the engines know; parameters are counted exactly."""
        counted = sum(_size(parameter.shape) for parameter in parameters(arch))
        return cls(
            name=name,
            num_layers=arch.num_layers,
            hidden_size=arch.hidden_size,
            ffn_size=arch.ffn_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            vocab_size=arch.vocab_size,
            tied=arch.tied,
            scalar_head=arch.head == "scalar",
            nominal_parameters=counted,
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, name: str, scalar_head: bool = False
    ) -> ModelShape:
        """Of a Hugging Face config.json, also of families that only FSDP and ZeRO run."""
        hidden_size = _first(config, "hidden_size", "n_embd")
        num_heads = _first(config, "num_attention_heads", "n_head")
        ffn_size = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden_size
        return cls(
            name=name,
            num_layers=_first(config, "num_hidden_layers", "n_layer"),
            hidden_size=hidden_size,
            ffn_size=int(ffn_size),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            vocab_size=_first(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", "n_embd" in config)) and not scalar_head,
            scalar_head=scalar_head,
            gated=config.get("hidden_act", config.get("activation_function")) == "silu",
        )

    @classmethod
    def from_folder(cls, path: str | Path, *, scalar_head: bool = False) -> ModelShape:
        """Of a folder with config.json; ConfigError if there is none."""
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            raise ConfigError(
                f"model: got {file}, which does not read as JSON ({err}), expected a Hugging Face "
                f"config.json; give the folder of a model"
            ) from err
        return cls.from_config(config, name=Path(path).name, scalar_head=scalar_head)

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys of one token, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + (2 + self.gated) * self.hidden_size * self.ffn_size

    @property
    def num_parameters(self) -> int:
        """All weights: the nominal number if there is one, else the matrices and norms counted."""
        if self.nominal_parameters is not None:
            return self.nominal_parameters
        norms = (2 * self.num_layers + 1) * self.hidden_size
        words = self.vocab_size * self.hidden_size
        head = self.hidden_size if self.scalar_head else words * (not self.tied)
        return self.num_layers * self.layer_parameters + norms + words + head

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of the keys and values of one token, all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ConfigError(
        f"model: got a config.json without {' or '.join(names)}, expected an integer; "
        f"give a decoder's config.json"
    )
