"""A Llama with a KV cache as one flat function over a few large tensors.

A transformers module spends most of a small model's decode step in Python. This file does the same
arithmetic with fewer, larger operations (one product for q, k and v, one for gate and up). The
results equal transformers within 1e-5 in float32 (tests/unit/rollout/test_builtin_generator.py).

Every row has its own cache slots for the tokens after its prompt, filled from 0. Rows of any age
are therefore decoded together, and an ended row makes room for another. A parked row keeps its
slots while it is not decoded; `extend` writes the tokens that follow. Keys and values of a prompt
are computed, stored and read once for all rows that begin with it: their queries go through one
product (as in Hydragen, Juravsky et al. 2024). A decode step reads little more than the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from spmdflow.cpu.product import compute_dtype, linear
from spmdflow.cpu.shared_prompts import SharedPrompts
from spmdflow.parallel.device import to_device

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3")
_WINDOW = "sliding_attention"
_MORE_SLOTS = 16
_MASK_ELEMENTS = 1 << 26
"""Most elements of an attention mask in a prefill: 64 MiB of booleans."""


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
    layer_types = getattr(config, "layer_types", None)
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    return list(layer_types or [_WINDOW if windowed else "full_attention"])


@dataclass(frozen=True)
class _Linear:
    """One matrix product. Weight and bias may stack the rows of several layers."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    """The tensors that the forward of one layer reads."""

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
    parks = True
    truncates = True
    routing = None
    _cache: list[Tensor]
    """(2, rows, KV, slots, head_dim) of each layer: keys and values after the prompts."""
    _shared: list[Tensor]
    """(2, G, KV, P, head_dim) of each layer: keys and values of the prompts, right-padded."""
    _lengths: list[int]
    """Tokens of each prompt."""
    _prompt_of_row: list[int]
    """The prompt of each row, parked ones first."""
    _num_parked: int
    _prompts: SharedPrompts | None
    """Of the rows that are not parked. None: the rows have changed since the last step."""
    _most_slots: int

    def __init__(self, module: Any, device: torch.device, *, prefill_chunk: int) -> None:
        """module: from transformers, on the device or the meta device (then all weights are
        zeros). prefill_chunk: see CachedForward."""
        self.prefill_chunk = prefill_chunk
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
        self._query_heads = torch.arange(self._num_heads).view(self._num_kv_heads, -1)
        self._window = config.sliding_window if _layer_types(config)[0] == _WINDOW else None
        state = {}
        for name, tensor in module.named_parameters():
            state[name] = tensor.detach()
        self._layers = [self._layer_of(state, i) for i in range(config.num_hidden_layers)]
        self._embedding = self._fuse_layers(state, "model.embed_tokens").weight
        self._dtype = compute_dtype(self._embedding)
        self._float32_head: _Linear | None = None
        """A float32 copy of a head in bfloat16, until the weights change. None: not made."""
        self._norm = self._fuse_layers(state, "model.norm").weight
        tied = config.tie_word_embeddings
        self._head = _Linear(self._embedding, None) if tied else self._fuse_layers(state, "lm_head")
        rotary = type(module.model.rotary_emb)(config=config).to(device)
        self._rotations = _rotations(rotary, self.max_positions, self._dtype)
        self.release()

    def reserve(self, rows: int, slots: int) -> None:
        """See CachedForward.reserve. The cache grows to `slots` in steps: unused slots cost
        time."""
        self._most_slots = max(slots, self._most_slots)
        self._grow(max(rows, self._cache[0].shape[1]), self._cache[0].shape[3])

    def _make_slots(self, span: int) -> None:
        if span > self._cache[0].shape[3]:
            self._grow(self._cache[0].shape[1], min(span + _MORE_SLOTS, self._most_slots))

    def _grow(self, rows: int, slots: int) -> None:
        """Enlarge each layer's cache (2, rows, KV, slots, head_dim) to at least this size.

        Values are preserved, and new entries are 0. A cache that is large enough stays.
        """
        for number, old in enumerate(self._cache):
            if rows > old.shape[1] or slots > old.shape[3]:
                new = old.new_zeros(2, rows, old.shape[2], slots, self._head_dim)
                new[:, : old.shape[1], :, : old.shape[3]] = old
                self._cache[number] = new

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """Append n rows to the cache, run their prompts, and return the logits (n, V) after them.

        Keys and values of each prompt are computed and stored once, for all rows that begin with
        it. Prompts are right-padded: a token never attends to later ones. See
        CachedForward.prefill.
        prompts: distinct, on the host. source: index of each new row's prompt.
        """
        ids = to_device(pad_sequence(prompts, batch_first=True), self._device)
        sizes = [len(prompt) for prompt in prompts]
        every = list(range(len(prompts)))
        pairs: dict[int, Tensor] = {}  # keys and values (2, B, KV, P, head_dim) of each layer

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pair = torch.stack([key, value])
            if number in pairs:
                pair = torch.cat([pairs[number], pair], 3)
            pairs[number] = pair
            return self._attend_to_prompts(query, *pair)

        logits = torch.zeros(0, device=ids.device)
        for start in range(0, ids.shape[1], self.prefill_chunk):
            chunk = ids[:, start : start + self.prefill_chunk].contiguous()
            width = chunk.shape[1]
            positions = torch.arange(start, start + width, device=ids.device)
            # a prompt without tokens in this chunk has one of padding, whose logits are not used
            in_chunk = [min(max(size - start, 1), width) for size in sizes]
            after = self._run_layers(chunk, positions.repeat(len(ids), 1), in_chunk, every, attend)
            if start == 0:
                logits = after
            else:
                has_tokens = to_device(torch.tensor(sizes), ids.device) > start
                logits = torch.where(has_tokens[:, None], after, logits)
        for number in range(len(self._layers)):
            self._append_prompts(number, pairs.pop(number))
        self._prompt_of_row += [len(self._lengths) + prompt for prompt in source]
        self._lengths += sizes
        self._prompts = None
        return logits.index_select(0, to_device(torch.tensor(source), ids.device))

    def _attend_to_prompts(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of the last F of P tokens of prompts, within the model's window.

        query (B, H, F, head_dim), key and value (B, KV, P, head_dim) -> (B, H, F, head_dim). Where
        a mask is needed, queries are taken so few at a time that it has at most _MASK_ELEMENTS.
        """
        num_keys = key.shape[2]
        first = num_keys - query.shape[2]
        if first == 0 and self._window is None:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        keys = torch.arange(num_keys, device=query.device)
        outputs = []
        for part in query.split(max(1, _MASK_ELEMENTS // num_keys), 2):
            positions = torch.arange(first, first + part.shape[2], device=query.device)[:, None]
            seen = keys <= positions
            if self._window is not None:
                seen &= keys > positions - self._window
            outputs.append(
                F.scaled_dot_product_attention(part, key, value, attn_mask=seen, enable_gqa=True)
            )
            first += part.shape[2]
        return torch.cat(outputs, 2)

    def extend(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """Run more tokens of B cached rows, and return the logits (B, V) after the last of each.

        New keys and values go into the rows' own slots, over older ones from `starts` on. Slots
        grow if needed. New tokens attend to the cached ones and to themselves. See
        CachedForward.extend.
        rows: that are not parked. more: tokens of each row, at least one, on the host.
        starts: position of each row's first new token.
        """
        last: dict[int, Tensor] = {}
        for first in range(0, max(map(len, more)), self.prefill_chunk):
            longer = [index for index, tokens in enumerate(more) if len(tokens) > first]
            logits = self._extend_by_chunk(
                [rows[index] for index in longer],
                [more[index][first : first + self.prefill_chunk] for index in longer],
                [starts[index] + first for index in longer],
            )
            last.update(zip(longer, logits, strict=True))
        return torch.stack([last[index] for index in range(len(rows))])

    def _extend_by_chunk(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """Do what `extend` does, with at most `prefill_chunk` tokens of each row."""
        ids = to_device(pad_sequence(more, batch_first=True), self._device)
        sizes = [len(part) for part in more]
        prompts = [self._prompt_of_row[row] for row in rows]
        firsts = [self._lengths[prompt] for prompt in prompts]
        row_facts = [rows, prompts, starts, firsts]
        row, prompt, start, first = to_device(torch.tensor(row_facts), ids.device)
        positions = start[:, None] + torch.arange(ids.shape[1], device=ids.device)  # (B, F)
        positions.clamp_(max=self.max_positions - 1)
        span = max(at + size - first for at, size, first in zip(starts, sizes, firsts))
        self._make_slots(span)
        seen = self._attention_mask(first, positions, span)[:, None]
        new = [(i, n) for i, size in enumerate(sizes) for n in range(size)]  # not the padding
        at, number = to_device(torch.tensor(new), ids.device).T
        slots = positions[at, number] - first[at]

        def attend(layer: int, query: Tensor, *new_pair: Tensor) -> Tensor:
            """Write new keys and values into the cache of a layer, then attend over the cache.

            Padding is not written. new_pair: key and value (B, KV, F, head_dim).
            """
            cache = self._cache[layer]
            for part, x in zip(cache, new_pair, strict=True):
                part[row[at], :, slots] = x[at, :, number]
            key, value = torch.cat([self._shared[layer][:, prompt], cache[:, row, :, :span]], 3)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, enable_gqa=True
            )

        return self._run_layers(ids, positions, sizes, list(range(len(rows))), attend)

    def _run_layers(
        self,
        ids: Tensor,
        positions: Tensor,
        sizes: list[int],
        source: list[int],
        attend: Callable[..., Tensor],
    ) -> Tensor:
        """Run all layers and return logits (n, V): row i is after the last token of row source[i].

        ids, positions (B, F): right-padded rows of these sizes.
        attend: (layer, query, key, value), each (B, heads, F, head_dim) -> (B, H, F, head_dim).
        """
        batch, width = ids.shape
        hidden = F.embedding(ids.view(-1), self._embedding).to(self._dtype)  # (B * F, D)
        cos, sin = (t[positions.view(-1)][:, None] for t in self._rotations)
        ends = torch.arange(batch) * width + torch.tensor(sizes) - 1
        chosen = to_device(torch.cat([ends, torch.tensor(source)]), ids.device)
        ends, rows = chosen.split([batch, len(source)])
        for number, layer in enumerate(self._layers):
            parts = (
                x.view(batch, width, -1, self._head_dim).transpose(1, 2)
                for x in self._heads(layer, hidden, cos, sin)
            )
            mixed = attend(number, *parts).transpose(1, 2).reshape(batch * width, -1)
            if number == len(self._layers) - 1:  # later code reads only the last tokens
                mixed = mixed[ends]
                hidden = hidden[ends]
            hidden = self._finish_layer(layer, hidden, mixed)
        return self._logits(hidden).index_select(0, rows)

    def _append_prompts(self, number: int, fresh: Tensor) -> None:
        """Append keys and values (2, B, KV, P, head_dim) of new prompts to those of a layer.

        The shorter ones are padded with zeros on the right.
        """
        known = self._shared[number]
        width = max(known.shape[3], fresh.shape[3])
        parts = []
        for x in (known, fresh):
            parts.append(F.pad(x, (0, 0, 0, width - x.shape[3])))
        self._shared[number] = torch.cat(parts, 1)

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """Append a token (n,) to every row that is not parked; return the logits (n, V) after it.

        Writes the keys and values of these tokens into the cache. Rows with the same prompt attend
        to it through one product (`SharedPrompts`). See CachedForward.step.
        positions (n,): of the tokens.
        span: upper bound of the tokens that any row has after its prompt, including this one.
        """
        rows = len(tokens)
        kv_heads = self._num_kv_heads
        parked = self._num_parked
        self._make_slots(span)
        if self._prompts is None:
            live = self._prompt_of_row[parked:]
            self._prompts = SharedPrompts.of(self._lengths, live, self._query_heads, self._device)
        starts = self._prompts.starts
        seen = self._attention_mask(starts, positions[:, None], span)
        bias = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        bias = bias.masked_fill_(~seen, float("-inf"))[:, None]
        hidden = F.embedding(tokens, self._embedding).to(self._dtype)  # (n, D)
        cos, sin = (t.index_select(0, positions)[:, None] for t in self._rotations)
        heads = torch.arange(parked * kv_heads, (parked + rows) * kv_heads, device=tokens.device)
        slot_rows = heads * self._cache[0].shape[3]
        slot_rows += (positions - starts).repeat_interleave(kv_heads)
        for layer, shared, cache in zip(self._layers, self._shared, self._cache, strict=True):
            query, *fresh = self._heads(layer, hidden, cos, sin)
            for part, x in zip(cache, fresh, strict=True):
                part.view(-1, self._head_dim).index_copy_(
                    0, slot_rows, x.reshape(-1, self._head_dim)
                )
            # the query heads that share a kv head are rows of one query: no repeated keys
            query = (query * self._head_dim**-0.5).view(rows, kv_heads, -1, self._head_dim)
            own = cache[:, parked : parked + rows, :, :span]
            mixed = self._prompts.attend(query, shared, own, bias)
            hidden = self._finish_layer(layer, hidden, mixed)
        return self._logits(hidden)

    def _attention_mask(self, starts: Tensor, positions: Tensor, span: int) -> Tensor:
        """Return (n, F, P + span) bool: which prompt and own tokens each query may attend to.

        Keys are the row's prompt (padded to P), then its own `span` slots. A query attends to keys
        at or before its position, at most `sliding_window` tokens back if the model has one.
        starts (n,): prompt lengths. positions (n, F): of the queries.
        """
        starts = starts[:, None, None]
        width = self._shared[0].shape[3]
        slots = torch.arange(width + span, device=positions.device)
        behind = slots >= width
        key_positions = torch.where(behind, slots - width + starts, slots)  # (n, 1, P + span)
        seen = (key_positions <= positions[..., None]) & (behind | (slots < starts))
        if self._window is not None:
            seen &= key_positions > positions[..., None] - self._window
        return seen

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """Keep only these rows of the cache, in this order; the first `num_parked` are parked.

        Parked rows keep their keys and values but are not decoded. Rows that stay at their index
        are not copied. Prompts that no row begins with any more are dropped. See
        CachedForward.keep.
        """
        moves = []
        for target, source in enumerate(rows):
            if source != target:
                moves.append((source, target))
        if moves:
            sources, targets = to_device(torch.tensor(moves), self._device).T
            for cache in self._cache:
                cache[:, targets] = cache[:, sources]
        self._prompt_of_row = [self._prompt_of_row[row] for row in rows]
        self._num_parked = num_parked
        used_prompts = sorted(set(self._prompt_of_row))
        if len(used_prompts) < len(self._lengths):
            self._lengths = [self._lengths[prompt] for prompt in used_prompts]
            self._prompt_of_row = [used_prompts.index(prompt) for prompt in self._prompt_of_row]
            width = max(self._lengths, default=0)
            selection = to_device(torch.tensor(used_prompts, dtype=torch.int64), self._device)
            self._shared = [
                cache[:, :, :, :width].index_select(1, selection) for cache in self._shared
            ]
        self._prompts = None

    def release(self) -> None:
        """Free the KV cache and forget all rows and prompts. The next batch allocates it again."""
        self._most_slots = 0
        shape = (2, 0, self._num_kv_heads, 0, self._head_dim)
        empty = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._cache = [empty.clone() for _ in self._layers]
        self._shared = [empty.clone() for _ in self._layers]
        self._lengths = []
        self._prompt_of_row = []
        self._num_parked = 0
        self._prompts = None

    def _heads(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (N, H, head_dim), k and v (N, KV, head_dim) of hidden states (N, D).

        They are those after the layer's input norm. q and k are normalised per head if the layer
        has such norms (Qwen3), then rotated with cos and sin.
        """
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

    def _finish_layer(self, layer: _Layer, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The part of a layer after its attention: output projection and MLP, with residuals."""
        hidden = hidden + layer.output(mixed)
        gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, -1)
        return hidden + layer.down(F.silu(gate).mul_(up))

    def renew(self) -> None:
        """See CachedForward.renew."""
        self._float32_head = None

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits (n, V) of hidden states (n, D) before the last norm.

        On a CPU they are computed in float32 also if the weights are bfloat16: rounded logits would
        change which tokens are sampled. The head is copied to float32 once after each sync.
        """
        if self._head.weight.dtype == self._dtype:
            head = self._head
        else:
            if self._float32_head is None:
                self._float32_head = _Linear(self._head.weight.to(self._dtype), self._head.bias)
            head = self._float32_head
        return head(self._rms_norm(hidden, self._norm))

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), self._epsilon)

    def _layer_of(self, state: dict[str, Tensor], number: int) -> _Layer:
        """Return the fused tensors of layer `number`, from a state dict by Hugging Face name.

        Adds their views to `weights`.
        """
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        mlp = f"{prefix}.mlp"
        norms = []
        for part in "qk":
            if f"{attention}.{part}_norm.weight" in state:
                norms.append(self._fuse_layers(state, f"{attention}.{part}_norm").weight)
        return _Layer(
            self._fuse_layers(state, f"{prefix}.input_layernorm").weight,
            self._fuse_layers(state, *(f"{attention}.{part}_proj" for part in "qkv")),
            (norms[0], norms[1]) if norms else None,
            self._fuse_layers(state, f"{attention}.o_proj"),
            self._fuse_layers(state, f"{prefix}.post_attention_layernorm").weight,
            self._fuse_layers(state, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            self._fuse_layers(state, f"{mlp}.down_proj"),
        )

    def _fuse_layers(self, state: dict[str, Tensor], *layers: str) -> _Linear:
        """Return one product of several layers with their rows stacked.

        Adds a view of each part to `weights`, by Hugging Face name. On the meta device the fused
        tensors are zeros on this forward's device. There is a bias if any of the layers has one.
        """
        fused_of: dict[str, Tensor | None] = {}
        for kind in ("weight", "bias"):
            parts = []
            for x in layers:
                if f"{x}.{kind}" in state:
                    parts.append(state[f"{x}.{kind}"])
            if not parts:
                fused_of[kind] = None
                continue
            fused = torch.cat(parts)
            if fused.is_meta:
                fused = torch.zeros_like(fused, device=self._device)
            views = fused.split([len(part) for part in parts])
            self.weights.update(zip((f"{x}.{kind}" for x in layers), views, strict=True))
            fused_of[kind] = fused
        assert fused_of["weight"] is not None, layers
        return _Linear(fused_of["weight"], fused_of["bias"])


def _rotations(rotary: Any, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (positions, head_dim) of transformers' rotary module.

    sin is negative in the first half. With the halves of x swapped, x * cos + swapped * sin is the
    rotation.
    """
    positions = torch.arange(num_positions, device=rotary.inv_freq.device)[None]
    cos, sin = rotary(rotary.inv_freq.new_zeros((), dtype=dtype), positions)
    sin[..., : sin.shape[-1] // 2] *= -1
    return cos[0], sin[0]
