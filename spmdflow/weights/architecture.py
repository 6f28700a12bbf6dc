"""`Architecture`: the sizes of a decoder, and the features of its tensors and its forward pass.

Read from a Hugging Face config.json, in the form of transformers 4 or 5. A model that only
transformers can run has sizes but no table of tensors: `from_config` raises the reason, and
`sizes_from_config` reads the sizes. This module does not know ranks or engines.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind, engine_names
from spmdflow.weights.adapter import Adapters

Head = Literal["causal_lm", "scalar"]
"""Logits over the vocabulary, or one value per token from a bias-free linear layer `score`."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    """Only for llama3, like the next two."""
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Mixture:
    """The experts of a decoder: in some layers, of which each token uses a few."""

    num_experts: int
    num_chosen: int
    """Experts that each token uses."""
    expert_size: int
    """Inner width of an expert."""
    shared_size: int
    """Inner width of the experts that every token uses, together; 0: there are none."""
    num_layers: int
    """Layers with experts; the others have a feed-forward network of `Architecture.ffn_size`."""
    renormalises: bool = True
    """Whether the weights of a token's experts sum to 1, as a softmax over these alone does.
    Otherwise they are their probabilities among all experts."""


@dataclass(frozen=True)
class Architecture:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, gated SiLU, perhaps experts.

    Without a table (`obstacle`) it may be any other, and only the sizes count; one that the file
    does not state is 0.
    """

    family: str
    """config.json's model_type; one of `FAMILIES` if there is a table."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """Whether the logits use the embedding; False for a scalar head, which has none to tie."""
    max_positions: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k is normed."""
    norm_eps: float = 0.0
    rope_theta: float = 0.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Number of previous tokens that attention sees; None: all."""
    head: Head = "causal_lm"
    gated: bool = True
    """Whether the feed-forward network has a gate: three matrices instead of two."""
    mixture: Mixture | None = None
    """Its experts; None: a dense model."""
    caps_scores: bool = False
    """Attention scores are capped by a tanh (Gemma 2)."""
    has_sinks: bool = False
    """Each softmax of attention has one more score, without a value (gpt-oss)."""
    adapters: Adapters | None = None
    """Adapters that are among its tensors; None: there are none, or they are merged."""
    obstacle: str = ""
    """Why only transformers can run the model; empty if its tensors are in `weights.table`."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of all tensors of such a model, if they were read
    (`folder.with_tensors`)."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, head: Head = "causal_lm") -> Architecture:
        """Return the architecture that the content of a config.json describes.

        A key that it lacks has the family's default in transformers; null means not stated, without
        that default. ConfigError with the reason if model_type has no table of tensors, if a
        feature is not supported, or if a size is missing or wrong.
        """
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            got = f"model_type {config.get('model_type')!r}"
            raise _unsupported_error(got, f"one of {', '.join(sorted(FAMILIES))}")
        stated = {**family.defaults, **config}
        facts = {}
        for key, value in stated.items():
            if value is not None:
                facts[key] = value
        _check_features(facts, family)
        num_heads = _positive_int(facts, "num_attention_heads")
        hidden_size = _positive_int(facts, "hidden_size")
        theta, scaling = _rope(facts)
        arch = cls(
            family=facts["model_type"],
            num_layers=_positive_int(facts, "num_hidden_layers"),
            hidden_size=hidden_size,
            ffn_size=_positive_int(facts, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=facts.get("num_key_value_heads", num_heads),
            head_dim=facts.get("head_dim", hidden_size // num_heads),
            vocab_size=_positive_int(facts, "vocab_size"),
            tied=head == "causal_lm" and bool(facts.get("tie_word_embeddings", False)),
            qkv_bias=_has(family.qkv_bias, facts),
            o_bias=_has(family.o_bias, facts),
            mlp_bias=_has(family.mlp_bias, facts),
            qk_norm=family.qk_norm,
            norm_eps=float(facts.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=_positive_int(facts, "max_position_embeddings"),
            sliding_window=facts.get("sliding_window") if family.has_sliding_window else None,
            head=head,
            mixture=_mixture(facts) if family.has_experts else None,
        )
        _check_heads(arch)
        _check_mixture(arch, family)
        return arch

    @classmethod
    def sizes_from_config(
        cls, config: Mapping[str, Any], *, head: Head = "causal_lm"
    ) -> Architecture:
        """Like `from_config`, also for a model that only transformers can run.

        Such an architecture has only sizes (0: not stated) and, in `obstacle`, the error of
        from_config. Sizes in text_config override those at the top.
        """
        try:
            return cls.from_config(config, head=head)
        except ConfigError as err:
            return _sizes_only({**config, **config.get("text_config", {})}, head, str(err))

    @classmethod
    def from_folder(cls, path: str | Path, *, head: Head = "causal_lm") -> Architecture:
        """From a folder with config.json; ConfigError if there is none, or no table for it."""
        return cls.from_config(read_config(path), head=head)

    @classmethod
    def dense_from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Like `from_config`, and ConfigError for a mixture of experts too."""
        arch = cls.from_config(config)
        if not arch.is_dense:
            got = f"a mixture of {arch.num_experts} experts"
            do = "choose another model or another generator"
            raise ConfigError.of("model", got, "a dense model here", do)
        return arch

    @classmethod
    def dense_from_folder(cls, path: str | Path) -> Architecture:
        """`dense_from_config` of a folder's config.json."""
        return cls.dense_from_config(read_config(path))

    @classmethod
    def sizes_from_folder(cls, path: str | Path, *, head: Head = "causal_lm") -> Architecture:
        """From a folder with config.json, also for a model that only transformers can run."""
        return cls.sizes_from_config(read_config(path), head=head)

    @property
    def is_dense(self) -> bool:
        """Whether it has no experts."""
        return self.mixture is None

    @property
    def is_dense_with_table(self) -> bool:
        """Whether it is dense and its tensors are in `weights.table`.

        Its tensors have the names of its files, and vLLM's are in a table as well
        (`ranks.vllm_tables`). The experts of a mixture are fused when transformers reads the files,
        and vLLM's loader says itself where it puts them (`GeneratorKind.derived_table`).
        """
        return self.is_dense and not self.obstacle

    @property
    def packs(self) -> bool:
        """Whether rows may be packed end to end: known only of families whose tokens interact
        through causal attention alone, in all layers."""
        return self.family in FAMILIES or self.family in PACKED_BY_TRANSFORMERS

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys of one token, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0: a dense model."""
        return 0 if self.mixture is None else self.mixture.num_experts

    @property
    def expert_parameters(self) -> int:
        """Number of weights of all routed experts; 0 for a dense model."""
        experts = self.mixture
        if experts is None:
            return 0
        one = (2 + self.gated) * self.hidden_size * experts.expert_size
        return experts.num_layers * experts.num_experts * one

    @property
    def activated_size(self) -> float:
        """Inner width of the feed-forward network that a token uses; mean over the layers."""
        if self.mixture is None:
            return self.ffn_size
        experts = self.mixture
        width = experts.num_chosen * experts.expert_size + experts.shared_size
        dense = (self.num_layers - experts.num_layers) * self.ffn_size
        return (dense + experts.num_layers * width) / max(self.num_layers, 1)

    @property
    def routed_size(self) -> float:
        """Width of the copies of a token's hidden state that its experts read; mean over the
        layers. 0 without experts."""
        if self.mixture is None:
            return 0.0
        experts = self.mixture
        return experts.num_chosen * self.hidden_size * experts.num_layers / max(self.num_layers, 1)

    @property
    def seen_token_cost(self) -> float:
        """FLOPs of attending to one token, over those of a token's matrix products in a layer.

        Attending to a token takes 4 q_size FLOPs (its score and its weighted value); the products
        take 2 for each weight that the token uses. 0 if sizes are not stated.
        """
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        used = attention + (2 + self.gated) * self.hidden_size * self.activated_size
        return 2 * self.q_size / used if used else 0.0

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the matrices of one layer; mean over the layers."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        matrices = (2 + self.gated) * self.hidden_size
        if self.mixture is None:
            return attention + matrices * self.ffn_size
        experts = self.mixture
        width = experts.num_experts * experts.expert_size + experts.shared_size
        routed = matrices * width + experts.num_experts * self.hidden_size
        dense = (self.num_layers - experts.num_layers) * matrices * self.ffn_size
        return attention + (dense + experts.num_layers * routed) // max(self.num_layers, 1)

    @property
    def num_parameters(self) -> int:
        """Number of weights: matrices, biases, norms, embedding, and the head unless it is tied."""
        biases = self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.o_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.ffn_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        words = self.vocab_size * self.hidden_size
        if self.head == "scalar":
            head = self.hidden_size
        else:
            head = words * (not self.tied)
        layers = self.num_layers * (self.layer_parameters + biases + norms)
        return layers + self.hidden_size + words + head

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of the keys and values of one token, all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes


def packs_rows(kind: str, options: Collection[str], path: str | Path) -> bool:
    """Whether an engine with these options packs rows of the model in this folder.

    False for a folder that does not exist: whoever reads it raises the error.
    """
    shape = sizes_if_there(path)
    return shape is not None and engine_kind(kind).packs_with(options) and shape.packs


def sizes_if_there(path: str | Path) -> Architecture | None:
    """The sizes of the model in a folder; None for a folder that does not exist: whoever reads it
    raises the error."""
    if not (Path(path) / "config.json").exists():
        return None
    return Architecture.sizes_from_folder(path)


def read_config(path: str | Path, *, key: str = "model.path") -> dict[str, Any]:
    """The content of a folder's config.json; ConfigError about the setting `key` otherwise."""
    return read_json(Path(path) / "config.json", key=key)


def read_json(file: Path, *, key: str) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder.

    ConfigError about the setting `key` if there is no such file, or if it is not JSON or not an
    object.
    """
    if not file.is_file():
        raise ConfigError(
            f"{key}: no {file.name} in {file.parent}, expected a Hugging Face folder; "
            f"give the folder that holds it"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ConfigError.of(key, f"{err} in {file}", "JSON", "fix the file") from err
    if not isinstance(content, dict):
        raise ConfigError.of(key, f"a JSON list in {file}", "an object", "fix the file")
    return content


_Rule = bool | str
"""Whether a family has something, or the key of config.json that says so (absent: no)."""


@dataclass(frozen=True)
class Family:
    """Features of a family of architectures, and its defaults."""

    qkv_bias: _Rule = False
    o_bias: _Rule = False
    mlp_bias: _Rule = False
    qk_norm: bool = False
    has_sliding_window: bool = False
    """Whether sliding_window applies to every layer."""
    has_experts: bool = False
    """Whether every layer has experts, none of them shared."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for keys that config.json lacks."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        has_sliding_window=True,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        qkv_bias=True,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    ),
    "qwen3": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
    ),
    "qwen3_moe": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        has_experts=True,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "mixtral": Family(
        has_sliding_window=True,
        has_experts=True,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
        },
    ),
}
"""By model_type. Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3, and two mixtures of experts."""


PACKED_BY_TRANSFORMERS = frozenset(
    {
        *("cohere2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma"),
        *("gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe"),
        *("minimax_m2", "ministral3", "olmo2", "olmo3", "olmoe", "phi3", "qwen2_moe", "seed_oss"),
        *("smollm3", "starcoder2"),
    }
)
"""Families without a table whose rows may be packed, too: packed and padded log-probs of a random
model are equal within 1e-5 (tests/unit/workers/test_packed_families.py). Others are padded."""


def _has(rule: _Rule, facts: Mapping[str, Any]) -> bool:
    if isinstance(rule, str):
        return bool(facts.get(rule, False))
    return rule


def _unsupported_error(got: object, expected: object) -> ConfigError:
    """Error for a model that no engine with tables supports."""
    do = f"choose another model, or engine.kind={engine_names()[0]}, which runs what transformers"
    return ConfigError.of("model", got, expected, f"{do} can load")


def _check_features(facts: Mapping[str, Any], family: Family) -> None:
    """Raise ConfigError for the first feature that no engine with tables supports.

    Supported: SiLU, full attention in all layers (or the family's sliding window), rotary positions
    over complete heads; no quantization and no attention dropout.
    """
    windowed = facts.get("use_sliding_window") and not family.has_sliding_window
    layers = sorted(set(facts.get("layer_types", ())))
    if layers in ([], ["full_attention"]) or family.has_sliding_window:
        layers = ["full_attention"]
    features = {
        "hidden_act": (facts.get("hidden_act", "silu"), "silu"),
        "use_sliding_window": (bool(windowed), False),
        "quantization_config": (bool(facts.get("quantization_config")), False),
        "partial_rotary_factor": (_rope_facts(facts).get("partial_rotary_factor", 1.0), 1.0),
        "attention_dropout": (float(facts.get("attention_dropout", 0.0)), 0.0),
        "layer_types": (layers, ["full_attention"]),
    }
    for key, (got, expected) in features.items():
        if got != expected:
            raise _unsupported_error(
                f"{key} {got!r} in a {facts['model_type']} config", repr(expected)
            )


def _rope_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary positions, in the form of transformers 5 or 4.

    Merges rope_theta and partial_rotary_factor at the top level, rope_scaling, and rope_parameters.
    Later ones override earlier ones.
    """
    top_level = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in facts:
            top_level[key] = facts[key]
    return {
        **top_level,
        **(facts.get("rope_scaling") or {}),
        **(facts.get("rope_parameters") or {}),
    }


def _rope(facts: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling), the latter None for unscaled positions; theta is 10000 by default.

    ConfigError for a scaling other than default, linear and llama3.
    """
    rope = _rope_facts(facts)
    theta = float(rope.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise _unsupported_error(f"rope scaling {kind!r}", "default, linear or llama3")


def _positive_int(facts: Mapping[str, Any], key: str) -> int:
    """The value of a key of config.json; ConfigError unless it is a positive integer."""
    value = facts.get(key)
    if type(value) is not int or value < 1:
        got = f"{key} {value!r} in config.json"
        do = "fix the file or choose another model"
        raise ConfigError.of("model", got, "a positive integer", do)
    return value


def _mixture(facts: Mapping[str, Any]) -> Mixture | None:
    """The experts that a config.json states, in the keys of several families; None without any."""

    def first(*names: str) -> int:
        return next((facts[name] for name in names if isinstance(facts.get(name), int)), 0)

    num_experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not num_experts:
        return None
    expert_size = first("moe_intermediate_size", "intermediate_size")
    num_shared = first("n_shared_experts", "moe_num_shared_experts")
    num_layers = first("num_hidden_layers")
    step = first("decoder_sparse_step", "moe_layer_interval") or 1
    start = first("first_k_dense_replace", "moe_layer_start_index")
    dense = facts.get("mlp_only_layers") or ()
    with_experts = 0
    for layer in range(start, num_layers):
        with_experts += (layer + 1) % step == 0 and layer not in dense
    if not with_experts:
        return None
    return Mixture(
        num_experts=num_experts,
        num_chosen=first("num_experts_per_tok", "moe_k"),
        expert_size=expert_size,
        shared_size=first("shared_expert_intermediate_size") or num_shared * expert_size,
        num_layers=with_experts,
        renormalises=bool(facts.get("norm_topk_prob", False)),
    )


_WITH_SINKS = ("gpt_oss",)
"""config.json does not state them."""


def _sizes_only(facts: Mapping[str, Any], head: Head, obstacle: str) -> Architecture:
    """Return the sizes of a model without a table: the keys of Llama's or GPT-2's config.json.

    A size that is not stated is 0, except that ffn_size is 4 * hidden_size, there are as many
    key-value heads as heads, and head_dim is hidden_size / num_heads. A model counts as gated if it
    has SiLU or is a Gemma. obstacle: why there is no table.
    """

    def first(*names: str) -> int:
        return next((facts[name] for name in names if isinstance(facts.get(name), int)), 0)

    hidden_size = first("hidden_size", "n_embd")
    num_heads = first("num_attention_heads", "n_head")
    tied = facts.get("tie_word_embeddings", "n_embd" in facts)
    activation = facts.get("hidden_act", facts.get("activation_function"))
    return Architecture(
        family=str(facts.get("model_type")),
        num_layers=first("num_hidden_layers", "n_layer"),
        hidden_size=hidden_size,
        ffn_size=first("intermediate_size", "n_inner") or 4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=first("num_key_value_heads") or num_heads,
        head_dim=first("head_dim") or hidden_size // max(num_heads, 1),
        vocab_size=first("vocab_size"),
        tied=head == "causal_lm" and bool(tied),
        max_positions=first("max_position_embeddings", "n_positions"),
        head=head,
        gated=activation == "silu" or str(facts.get("model_type")).startswith("gemma"),
        mixture=_mixture(facts),
        caps_scores=bool(facts.get("attn_logit_softcapping")),
        has_sinks=facts.get("model_type") in _WITH_SINKS,
        obstacle=obstacle,
    )


def _check_mixture(arch: Architecture, family: Family) -> None:
    """Raise ConfigError unless all layers of a family with experts have some."""
    if not family.has_experts:
        return
    count = 0 if arch.mixture is None else arch.mixture.num_layers
    if count < arch.num_layers:
        got = f"experts in {count} of {arch.num_layers} layers of a {arch.family} config"
        raise _unsupported_error(got, "experts in all layers")


def _check_heads(arch: Architecture) -> None:
    """Raise ConfigError unless key-value heads divide attention heads and head_dim is even."""
    if arch.num_heads % arch.num_kv_heads:
        got = f"{arch.num_kv_heads} key-value heads for {arch.num_heads} attention heads"
        raise ConfigError.of("model", got, "a divisor", "fix config.json")
    if arch.head_dim % 2:
        expected = "an even number, as rotary positions rotate pairs"
        raise ConfigError.of("model", f"head_dim {arch.head_dim}", expected, "fix config.json")
