"""A Llama with a KV cache as one flat function over a few large tensors.

A transformers module spends most of a small model's decode step in Python; this does the same
arithmetic with fewer, larger operations (one product for q, k and v, one for gate and up). Equal to
transformers within 1e-5 in float32, which tests/unit/rollout/test_builtin_generator.py checks.

Every row has slots of its own, filled from 0, so that rows of any age are decoded together and a
row that has ended makes room for another. Rows that begin with the same prompt are prefilled once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3")
_WINDOW = "sliding_attention"
_MORE_SLOTS = 16


def covers(module: Any) -> bool:
    """Whether LlamaForward computes what this transformers causal LM computes."""
    config = module.config
    return (
        config.model_type in _FAMILIES
        and config.hidden_act == "silu"
        and len(set(_layer_types(config))) <= 1
        and module.model.rotary_emb.rope_type in _STATIC_ROPE
    )


def _layer_types(config: Any) -> list[str]:
    given = getattr(config, "layer_types", None)
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    return list(given or [_WINDOW if windowed else "full_attention"])


@dataclass(frozen=True)
class _Linear:
    """One product; views of weight and bias have the rows of several layers."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    """What one layer's forward reads."""

    attention_norm: Tensor
    qkv: _Linear
    """((H + 2 KV) * head_dim, D): rows of q, then k, then v."""
    head_norms: tuple[Tensor, Tensor] | None
    """Of the heads of q and of k (Qwen3)."""
    output: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    """(2 I, D): rows of gate, then up."""
    down: _Linear


class LlamaForward:
    """Weights, KV cache and the two passes; see rollout.forward.CachedForward."""

    refills = True
    _cache: list[Tensor]
    """(2, rows, KV, slots, head_dim) of each layer: keys and values."""
    _most_slots: int

    def __init__(self, module: Any, device: torch.device) -> None:
        """module: of transformers, on the device; of the meta device: the weights are zeros."""
        config = module.config
        self.weights: dict[str, Tensor] = {}
        """Every tensor the forward reads, by Hugging Face name; views where stored fused."""
        self.max_positions: int = config.max_position_embeddings
        self._device = device
        self._num_kv_heads: int = config.num_key_value_heads
        self._num_heads: int = config.num_attention_heads
        self._head_dim: int = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._epsilon: float = config.rms_norm_eps
        self._window = config.sliding_window if _layer_types(config)[0] == _WINDOW else None
        state = {name: tensor.detach() for name, tensor in module.named_parameters()}
        self._layers = [self._layer_of(state, i) for i in range(config.num_hidden_layers)]
        self._embedding = self._fused(state, "model.embed_tokens").weight
        self._norm = self._fused(state, "model.norm").weight
        tied = config.tie_word_embeddings
        self._head = _Linear(self._embedding, None) if tied else self._fused(state, "lm_head")
        rotary = type(module.model.rotary_emb)(config=config).to(device)
        self._rotations = _rotations(rotary, self.max_positions, self._embedding.dtype)
        self.release()

    def reserve(self, rows: int, slots: int) -> None:
        """See CachedForward. Room for `slots` comes bit by bit: gaps slow attention."""
        self._most_slots = max(slots, self._most_slots)
        self._grow(max(rows, self._cache[0].shape[1]), self._cache[0].shape[3])

    def _make_slots(self, span: int) -> None:
        if span > self._cache[0].shape[3]:
            self._grow(self._cache[0].shape[1], min(span + _MORE_SLOTS, self._most_slots))

    def _grow(self, rows: int, slots: int) -> None:
        """Caches (2, rows, KV, slots, head_dim) of this size, layer by layer; values stay."""
        for number, old in enumerate(self._cache):
            if rows > old.shape[1] or slots > old.shape[3]:
                new = self._embedding.new_zeros(2, rows, old.shape[2], slots, self._head_dim)
                new[:, : old.shape[1], :, : old.shape[3]] = old
                self._cache[number] = new

    def prefill(self, prompts: list[Tensor], source: Tensor, first: int) -> Tensor:
        """See CachedForward; right-padded: a token never sees what stands behind it."""
        ids = pad_sequence(prompts, batch_first=True).to(self._device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        (batch, width), new = ids.shape, slice(first, first + len(source))
        self._make_slots(width)
        places = torch.arange(width, device=ids.device)
        seen = None
        if self._window is not None:
            seen = (places <= places[:, None]) & (places > places[:, None] - self._window)
        hidden = F.embedding(ids.view(-1), self._embedding)  # (B * P, D)
        cos, sin = (t[:width].repeat(batch, 1)[:, None] for t in self._rotations)
        ends = torch.arange(batch, device=ids.device) * width + lengths - 1
        for number, layer in enumerate(self._layers):
            query, key, value = (
                x.view(batch, width, -1, self._head_dim).transpose(1, 2)
                for x in self._heads(layer, hidden, cos, sin)
            )
            for part, fresh in zip(self._cache[number], (key, value), strict=True):
                part[new, :, :width] = fresh[source]
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=True
            )
            mixed = mixed.transpose(1, 2).reshape(batch * width, -1)
            if number == len(self._layers) - 1:  # only the last tokens are read further on
                mixed, hidden = mixed[ends], hidden[ends]
            hidden = self._finish(layer, hidden, mixed)
        return self._logits(hidden)[source]

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """See CachedForward."""
        rows, kv_heads = len(tokens), self._num_kv_heads
        self._make_slots(span)
        slots = torch.arange(span, device=tokens.device)
        seen = slots <= positions[:, None]
        if self._window is not None:
            seen &= slots > positions[:, None] - self._window
        bias = self._embedding.new_zeros(rows, 1, 1, span).masked_fill_(
            ~seen[:, None, None], float("-inf")
        )
        hidden = F.embedding(tokens, self._embedding)  # (n, D)
        cos, sin = (t.index_select(0, positions)[:, None] for t in self._rotations)
        first = torch.arange(rows * kv_heads, device=tokens.device) * self._cache[0].shape[3]
        places = first + positions.repeat_interleave(kv_heads)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            query, *fresh = self._heads(layer, hidden, cos, sin)
            for part, x in zip(cache, fresh, strict=True):
                part.view(-1, self._head_dim).index_copy_(0, places, x.reshape(-1, self._head_dim))
            key, value = cache[:, :rows, :, :span]
            # the query heads that share a kv head are rows of one query: no repeated keys
            grouped = query.reshape(rows, kv_heads, -1, self._head_dim)
            mixed = _attend(grouped, key, value, bias)
            hidden = self._finish(layer, hidden, mixed.reshape(rows, -1))
        return self._logits(hidden)

    def keep(self, rows: list[int]) -> None:
        """See CachedForward; rows that stay where they are cost nothing."""
        moved = [(source, place) for place, source in enumerate(rows) if source != place]
        if moved:
            sources, places = torch.tensor(moved, device=self._device).T
            for cache in self._cache:
                cache[:, places] = cache[:, sources]

    def release(self) -> None:
        """Free the KV cache; the next batch allocates it again."""
        self._most_slots = 0
        shape = (2, 0, self._num_kv_heads, 0, self._head_dim)
        self._cache = [self._embedding.new_zeros(shape) for _ in self._layers]

    def _heads(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (N, H, head_dim), k and v (N, KV, head_dim) of hidden (N, D), q and k rotated."""
        qkv = layer.qkv(self._rms_norm(hidden, layer.attention_norm))
        qkv = qkv.view(len(hidden), -1, self._head_dim)
        turning, value = qkv.tensor_split([self._num_heads + self._num_kv_heads], 1)
        if layer.head_norms is not None:
            parts = turning.split([self._num_heads, self._num_kv_heads], 1)
            pairs = zip(parts, layer.head_norms, strict=True)
            turning = torch.cat([self._rms_norm(x, weight) for x, weight in pairs], 1)
        # rotary embedding (Su et al. 2021)
        swapped = turning.roll(self._head_dim // 2, -1)
        turned = torch.addcmul(turning * cos, swapped, sin)
        query, key = turned.tensor_split([self._num_heads], 1)
        return query, key, value

    def _finish(self, layer: _Layer, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What a layer does behind its attention."""
        hidden = hidden + layer.output(mixed)
        gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, -1)
        return hidden + layer.down(F.silu(gate).mul_(up))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._rms_norm(hidden, self._norm))

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._epsilon)

    def _layer_of(self, state: dict[str, Tensor], number: int) -> _Layer:
        prefix = f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = [
            self._fused(state, f"{attention}.{part}_norm").weight
            for part in "qk"
            if f"{attention}.{part}_norm.weight" in state
        ]
        return _Layer(
            self._fused(state, f"{prefix}.input_layernorm").weight,
            self._fused(state, *(f"{attention}.{part}_proj" for part in "qkv")),
            (norms[0], norms[1]) if norms else None,
            self._fused(state, f"{attention}.o_proj"),
            self._fused(state, f"{prefix}.post_attention_layernorm").weight,
            self._fused(state, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            self._fused(state, f"{mlp}.down_proj"),
        )

    def _fused(self, state: dict[str, Tensor], *layers: str) -> _Linear:
        """The rows of several layers one after another; `weights` gets the views of them."""
        found: dict[str, Tensor | None] = {}
        for kind in ("weight", "bias"):
            parts = [state[f"{x}.{kind}"] for x in layers if f"{x}.{kind}" in state]
            if not parts:
                found[kind] = None
                continue
            fused = torch.cat(parts)
            if fused.is_meta:
                fused = torch.zeros_like(fused, device=self._device)
            views = fused.split([len(part) for part in parts])
            self.weights.update(zip((f"{x}.{kind}" for x in layers), views, strict=True))
            found[kind] = fused
        assert found["weight"] is not None, layers
        return _Linear(found["weight"], found["bias"])


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """(n, KV, group, head_dim) of a decode step; key and value (n, KV, slots, head_dim).

    On CPU as two batched products, which read memory faster than the kernel for long queries.
    """
    if not query.is_cpu:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    return scores.add_(bias).softmax(-1) @ value


def _rotations(rotary: Any, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, head_dim) of transformers' module; sin is negative in the first half.

    With the halves of x swapped, x * cos + swapped * sin is the rotation.
    """
    positions = torch.arange(num_positions, device=rotary.inv_freq.device)[None]
    cos, sin = rotary(rotary.inv_freq.new_zeros((), dtype=dtype), positions)
    sin[..., : sin.shape[-1] // 2] *= -1
    return cos[0], sin[0]
