"""A causal LM with a KV cache: the two passes that the built-in generator needs.

`LlamaForward` is one flat function over a few large tensors: a transformers module spends most of
a small model's decode step in Python; this does the same arithmetic with fewer, larger operations
(one product for q, k and v, one for gate and up). Equal to transformers within 1e-5 in float32,
which tests/unit/rollout/test_builtin_generator.py checks. Attention runs over preallocated slots:
a batch is left-padded, so every row writes the same slot, and a row's first slots are masked.
`HuggingFaceForward` runs what `LlamaForward` does not cover.

transformers is imported late and, of the rollout package, only here. Knows no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_STATIC_ROPE = ("default", "linear", "llama3")


def forward_of(module: Any) -> LlamaForward | HuggingFaceForward:
    """The fastest forward that computes what this transformers causal LM computes."""
    return LlamaForward(module) if covers(module) else HuggingFaceForward(module)


def covers(module: Any) -> bool:
    """Whether LlamaForward computes what this transformers causal LM computes."""
    config = module.config
    return (
        config.model_type == "llama"
        and config.hidden_act == "silu"
        and not getattr(config, "attention_bias", False)
        and not getattr(config, "mlp_bias", False)
        and module.model.rotary_emb.rope_type in _STATIC_ROPE
    )


def causal_lm(path: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers module of a folder (config.json, *.safetensors), in eval mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar per rank and model would bury the run's own lines
    module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return module.to(device).eval().requires_grad_(False)


def end_tokens(path: str) -> tuple[int, ...]:
    """Token ids that end a response: generation_config.json's, else config.json's; may be none."""
    from transformers import AutoConfig, GenerationConfig

    found = AutoConfig.from_pretrained(path, local_files_only=True).eos_token_id
    if (Path(path) / "generation_config.json").exists():
        chosen = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        found = found if chosen is None else chosen
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


class HuggingFaceForward:
    """Any family: transformers' own module and cache."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.weights: dict[str, Tensor] = {n: p.detach() for n, p in module.named_parameters()}
        """Every parameter by name; tied ones once."""
        self.max_positions: int = module.config.max_position_embeddings

    def start(self, ids: Tensor, lengths: Tensor, *, num_slots: int) -> Tensor:
        """Logits (B, V) after the prompts; ids (B, P) left-padded, lengths (B,)."""
        from transformers import DynamicCache

        slots = torch.arange(ids.shape[1], device=ids.device)
        starts = (ids.shape[1] - lengths)[:, None]
        self._cache = DynamicCache(config=self._module.config)
        self._mask = (slots >= starts).long()
        self._positions = lengths
        return self._forward(ids, (slots - starts).clamp_(min=0))

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) of every row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        logits = self._forward(tokens[:, None], self._positions[:, None])
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only; rows (b,) int64 ascending."""
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def release(self) -> None:
        """Free the KV cache."""
        self._cache = None

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._module(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


@dataclass(frozen=True)
class _Layer:
    """What one layer's forward reads."""

    attention_norm: Tensor
    qkv: Tensor
    """((H + 2 KV) * head_dim, D): rows of q, then k, then v."""
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """(2 I, D): rows of gate, then up."""
    down: Tensor


class LlamaForward:
    """A Llama's weights, its KV cache and the two passes that generation needs."""

    def __init__(self, module: Any) -> None:
        config = module.config
        self.weights: dict[str, Tensor] = {}
        """Every tensor the forward reads, by Hugging Face name; views where stored fused."""
        self.max_positions: int = config.max_position_embeddings
        self._num_kv_heads: int = config.num_key_value_heads
        self._group: int = config.num_attention_heads // config.num_key_value_heads
        self._head_dim: int = config.head_dim
        self._epsilon: float = config.rms_norm_eps
        state = {name: tensor.detach() for name, tensor in module.named_parameters()}
        self._layers = [self._layer_of(state, i) for i in range(config.num_hidden_layers)]
        self._embedding = self._fused(state, "model.embed_tokens")
        self._norm = self._fused(state, "model.norm")
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else self._fused(state, "lm_head")
        turned = config.num_attention_heads + config.num_key_value_heads
        self._rotations = _rotations(
            module.model.rotary_emb, self.max_positions, self._embedding.dtype
        )
        places = torch.arange(turned * self._head_dim, device=self._embedding.device)
        half = self._head_dim // 2
        self._swap = places + torch.where(places % self._head_dim < half, half, -half)
        """(heads of q and k * head_dim,): each place's partner in the other half of its head."""
        self._buffer = self._embedding.new_zeros(0)

    def start(self, ids: Tensor, lengths: Tensor, *, num_slots: int) -> Tensor:
        """Logits (B, V) after the prompts; ids (B, P) left-padded, lengths (B,).

        num_slots: prompt and response tokens to make room for.
        """
        batch, width = ids.shape
        self._cache = self._room(batch, num_slots)
        self._slot = 0
        starts = (width - lengths)[:, None]
        slots = torch.arange(num_slots, device=ids.device)
        self._bias = self._zeros(batch, num_slots).masked_fill_(slots < starts, float("-inf"))
        self._positions = lengths
        # a padding slot sees itself alone: a softmax over nothing would poison the cache with NaN
        seen = (slots[:width] <= slots[:width, None]) & (slots[:width] >= starts[:, :, None])
        seen |= torch.eye(width, dtype=torch.bool, device=ids.device)
        bias = self._zeros(batch, width, width).masked_fill_(~seen, float("-inf"))
        return self._forward(ids, (slots[:width] - starts).clamp_(min=0), bias)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) of every row."""
        bias = self._bias[:, None, : self._slot + 1]
        logits = self._forward(tokens[:, None], self._positions[:, None], bias)
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only; rows (b,) int64 ascending."""
        used = self._cache[:, :, rows, :, : self._slot]
        self._cache = self._cache[:, :, : len(rows)]
        self._cache[..., : self._slot, :] = used
        self._bias, self._positions = self._bias[rows], self._positions[rows]

    def release(self) -> None:
        """Free the KV cache; the next start allocates it again."""
        self._buffer = self._cache = self._embedding.new_zeros(0)

    def _forward(self, ids: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Logits (B, V) of the last column of ids (B, Q); bias (B, Q, slots so far)."""
        (batch, width), end = ids.shape, self._slot + ids.shape[1]
        hidden = F.embedding(ids.reshape(-1), self._embedding)  # (B * Q, D)
        heads = len(self._swap) // self._head_dim
        cos, sin = (
            t.index_select(0, positions.reshape(-1)).repeat(1, heads) for t in self._rotations
        )
        keys, values = (part.unbind() for part in self._cache[..., :end, :].unbind(1))
        biases = [self._grouped(bias)] * (len(self._layers) - 1) + [self._grouped(bias[:, -1:])]
        for layer, key, value, seen in zip(self._layers, keys, values, biases, strict=True):
            qkv = F.linear(self._rms_norm(hidden, layer.attention_norm), layer.qkv)
            mixed = self._attend(qkv.view(batch, width, -1), cos, sin, key, value, seen)
            if len(mixed) < len(hidden):  # last layer: only the last column is read further on
                hidden = hidden.view(batch, width, -1)[:, -1]
            hidden = hidden + F.linear(mixed, layer.output)
            normed = self._rms_norm(hidden, layer.mlp_norm)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate).mul_(up), layer.down)
        self._slot = end
        return F.linear(self._rms_norm(hidden, self._norm), self._head)

    def _attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, key: Tensor, value: Tensor, bias: Tensor
    ) -> Tensor:
        """(B * queries, H * head_dim): attention of the last columns, as many as bias has.

        qkv (B, Q, (H + 2 KV) * head_dim); key, value (B, KV, slots, head_dim), whose last Q slots
        are written; bias (B, 1, group * queries, slots).
        """
        batch, width, _ = qkv.shape
        kv_heads, head_dim = self._num_kv_heads, key.shape[-1]
        queries = bias.shape[2] // self._group
        # rotary embedding (Su et al. 2021) of the q and k heads
        heads = qkv.view(batch * width, -1)[:, : len(self._swap)]
        turned = torch.addcmul(heads * cos, heads.index_select(1, self._swap), sin)
        turned = turned.view(batch, width, -1, head_dim)
        key[:, :, self._slot :] = turned[:, :, -kv_heads:].transpose(1, 2)
        fresh = qkv[..., -kv_heads * head_dim :].unflatten(-1, (kv_heads, head_dim))
        value[:, :, self._slot :] = fresh.transpose(1, 2)
        # the query heads that share a kv head become rows of one query: no repeated keys
        query = turned[:, -queries:, :-kv_heads].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, kv_heads, -1, head_dim)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        mixed = mixed.view(batch, kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(batch * queries, -1)

    def _grouped(self, bias: Tensor) -> Tensor:
        """(B, queries, slots) -> (B, 1, group * queries, slots), once per head of a kv group."""
        return bias[:, None].expand(-1, self._group, -1, -1).flatten(1, 2).unsqueeze(1)

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._epsilon)

    def _layer_of(self, state: dict[str, Tensor], number: int) -> _Layer:
        prefix = f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            self._fused(state, f"{prefix}.input_layernorm"),
            self._fused(state, *(f"{attention}.{part}_proj" for part in "qkv")),
            self._fused(state, f"{attention}.o_proj"),
            self._fused(state, f"{prefix}.post_attention_layernorm"),
            self._fused(state, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            self._fused(state, f"{mlp}.down_proj"),
        )

    def _fused(self, state: dict[str, Tensor], *names: str) -> Tensor:
        """One tensor of the rows of several weights; `weights` gets the views of it."""
        parts = [state[f"{name}.weight"] for name in names]
        fused = torch.cat(parts)
        views = fused.split([len(part) for part in parts])
        self.weights.update(zip((f"{name}.weight" for name in names), views, strict=True))
        return fused

    def _room(self, batch: int, num_slots: int) -> Tensor:
        """KV cache (layers, 2, B, KV, num_slots, head_dim) in a buffer that only grows."""
        shape = (len(self._layers), 2, batch, self._num_kv_heads, num_slots, self._head_dim)
        size = torch.Size(shape).numel()
        if len(self._buffer) < size:
            self._buffer = self._embedding.new_zeros(size)
        return self._buffer[:size].view(shape)

    def _zeros(self, *shape: int) -> Tensor:
        return self._embedding.new_zeros(shape)


def _rotations(rotary: Any, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, head_dim) of transformers' module; sin is negative in the first half.

    With the halves of x swapped, x * cos + swapped * sin is the rotation.
    """
    positions = torch.arange(num_positions, device=rotary.inv_freq.device)[None]
    cos, sin = rotary(rotary.inv_freq.new_zeros((), dtype=dtype), positions)
    sin[..., : sin.shape[-1] // 2] *= -1
    return cos[0], sin[0]
