"""vLLM layers that compute with the trainer's shards where they lie: no second copy of a weight.

A generation shard is made of X training shards (X = t / t_g), and Megatron's local tensors are
not slices of vLLM's: its qkv mixes q, k and v group by group, its fc1 is gate over up per shard.
So each vLLM layer gets a method that works on the *list* of shards:

    column-parallel  one product per shard; the output columns are joined in vLLM's order
    row-parallel     one product per shard's columns, summed in float32
    embedding        id // rows says which shard has the row
    norms, biases    the view itself

A kv head that several generation ranks share lies on one of them only; then the ranks gather their
outputs of qkv, as Megatron does. Shards are keyed (layer, kind), layer None outside of the layers:

    embed norm head                                           head only if it is not tied
    input_norm post_norm q_norm k_norm
    qkv o fc1 fc2, each with _bias

The lists of embed, head, qkv, fc1, o and fc2 (and of qkv_bias, fc1_bias) have X views, in tensor-
parallel order; the others one. Each view has the shape that `megatron_shards` says. A tied model's
embed is needed on the first and on the last generation stage.

vLLM's own weights of these layers are gone afterwards: never call its load_weights again. The
views' storages may be freed and refilled between generations; their addresses are read anew each
time, so compiled graphs must not have caught them (the engine runs eagerly).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spmdflow.errors import ConfigError
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.vllm_weights import Reading, slots_of, whole_shapes
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import blocks
from spmdflow.weights.ranks import megatron_shards
from spmdflow.weights.table import ShardTable, stage_layers

Key = tuple[int | None, str]
Shards = Mapping[Key, Sequence[Tensor]]
Run = tuple[int, int, int]
"""(shard, first output column, last + 1): neighbours in vLLM's output."""

_TOP = {
    "embed": ("embedding.word_embeddings.weight", "model.embed_tokens"),
    "norm": ("decoder.final_layernorm.weight", "model.norm"),
    "head": ("output_layer.weight", "lm_head"),
}
_LAYER = {
    "input_norm": ("input_layernorm.weight", "input_layernorm"),
    "qkv": ("self_attention.linear_qkv.weight", "self_attn.qkv_proj"),
    "qkv_bias": ("self_attention.linear_qkv.bias", "self_attn.qkv_proj"),
    "q_norm": ("self_attention.q_layernorm.weight", "self_attn.q_norm"),
    "k_norm": ("self_attention.k_layernorm.weight", "self_attn.k_norm"),
    "o": ("self_attention.linear_proj.weight", "self_attn.o_proj"),
    "o_bias": ("self_attention.linear_proj.bias", "self_attn.o_proj"),
    "post_norm": ("pre_mlp_layernorm.weight", "post_attention_layernorm"),
    "fc1": ("mlp.linear_fc1.weight", "mlp.gate_up_proj"),
    "fc1_bias": ("mlp.linear_fc1.bias", "mlp.gate_up_proj"),
    "fc2": ("mlp.linear_fc2.weight", "mlp.down_proj"),
    "fc2_bias": ("mlp.linear_fc2.bias", "mlp.down_proj"),
}
"""Kind -> (Megatron's name, vLLM's module), below the layer if it has one."""
WHOLE = ("norm", "input_norm", "post_norm", "q_norm", "k_norm", "o_bias", "fc2_bias")
"""Kinds that every tensor-parallel rank holds whole."""


def key_of(name: str, *, first_layer: int = 0) -> Key:
    """The key of a Megatron parameter, whose stage begins at that layer of the model."""
    if name.startswith("decoder.layers."):
        number, suffix = name.removeprefix("decoder.layers.").split(".", 1)
        return int(number) + first_layer, _kind(_LAYER, suffix, name)
    return None, _kind(_TOP, name, name)


def shard_tables(
    arch: Architecture, replica: Replica, *, tp_size: int, vocab_multiple: int, place: int
) -> dict[Key, list[ShardTable]]:
    """Key -> a table of one tensor for each view that a rank needs, by its place in the replica.

    tp_size, vocab_multiple: the trainer's. ConfigError if the shards cannot stand in for vLLM's.
    """
    per_rank = _shards_per_rank(arch, replica, tp_size, vocab_multiple)
    pp_rank, tp_rank = divmod(place, replica.tp_size)
    layers = stage_layers(arch.num_layers, pp_size=replica.pp_size, pp_rank=pp_rank)
    top_kinds = _top_kinds(arch, replica.pp_size, pp_rank)
    found: dict[Key, list[ShardTable]] = {}
    for shard in range(tp_rank * per_rank, (tp_rank + 1) * per_rank):
        table = megatron_shards(
            arch,
            tp_size=tp_size,
            tp_rank=shard,
            pp_size=1,
            pp_rank=0,
            vocab_multiple=vocab_multiple,
        )
        for name, tensor in table.items():
            layer, kind = key = key_of(name)
            is_needed = kind in top_kinds if layer is None else layer in layers
            if is_needed:
                found.setdefault(key, []).append({name: tensor})
    return {k: tables[:1] if k[1] in WHOLE else tables for k, tables in found.items()}


def block_reading(
    arch: Architecture, shards: Shards, replica: Replica, *, tp_size: int, vocab_multiple: int
) -> Reading:
    """What the ranks read after `install`; ConfigError if the views are not those needed."""
    every = [
        shard_tables(arch, replica, tp_size=tp_size, vocab_multiple=vocab_multiple, place=place)
        for place in range(replica.size)
    ]
    mine = every[replica.ranks.index(replica.rank)]
    _check_shards(shards, mine)
    views = [
        block
        for key, tables in mine.items()
        for view, table in zip(shards[key], tables, strict=True)
        for block in blocks(dict.fromkeys(table, view), table)
    ]
    held = [slots_of(t for tables in found.values() for t in tables) for found in every]
    return Reading(whole_shapes(arch), views, held)


def install(
    model: Any,
    arch: Architecture,
    shards: Shards,
    replica: Replica,
    gather: Callable[[Tensor], Tensor],
) -> None:
    """Make the model's layers compute with the shards; vLLM's own weights are freed.

    gather: joins the last dimension over the tensor-parallel group; used if kv heads are fewer
    than its ranks.
    """
    for (layer, kind), views in shards.items():
        if kind.endswith("_bias") and kind not in WHOLE:
            continue
        module = model.get_submodule(_path(layer, kind))
        biases = shards.get((layer, f"{kind}_bias"))
        if kind in WHOLE:
            parameter = module.bias if kind.endswith("_bias") else module.weight
            parameter.data = views[0]
        elif kind == "embed":
            _replace(module, VocabularyShards(views))
        elif kind in ("o", "fc2"):
            _replace(module, RowShards(views))
        else:
            runs = _runs(arch, kind, views, replica)
            gathered = kind == "qkv" and arch.num_kv_heads < replica.tp_size
            _replace(module, ColumnShards(views, biases, runs, gather if gathered else None))
    if arch.tied and (None, "embed") in shards and hasattr(model.lm_head, "quant_method"):
        _replace(model.lm_head, model.model.embed_tokens.quant_method)


class ColumnShards:
    """A column-parallel layer: each shard gives some output columns."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        runs: Sequence[Run],
        gather: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._weights, self._gather = list(weights), gather
        self._biases: list[Tensor | None] = list(biases) if biases else [None] * len(weights)
        in_place = len(weights) == 1 and len(runs) == 1 and gather is None
        self._runs = [] if in_place else list(runs)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., columns) in vLLM's order; the layer's own weight and bias are not read."""
        pairs = zip(self._weights, self._biases, strict=True)
        parts = [F.linear(x, weight, shard_bias) for weight, shard_bias in pairs]
        if self._gather is not None:
            parts = [self._gather(torch.cat(parts, -1))]
        if not self._runs:
            return parts[0]
        return torch.cat([parts[shard][..., low:high] for shard, low, high in self._runs], -1)


class RowShards:
    """A row-parallel layer: each shard takes some input columns, the products add up."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum, in float32 until it is whole; bias is the layer's own."""
        if len(self._weights) == 1:
            return F.linear(x, self._weights[0], bias)
        flat = x.reshape(-1, x.shape[-1])
        pairs = zip(flat.split(self._weights[0].shape[1], -1), self._weights, strict=True)
        total = sum(_product(part, weight) for part, weight in pairs)
        result = total.to(x.dtype).view(*x.shape[:-1], -1)  # type: ignore[union-attr]
        return result if bias is None else result + bias


class VocabularyShards:
    """Embedding and, where it is tied, head: each shard has some rows of the vocabulary."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._head = ColumnShards(weights, None, _whole_runs(weights), None)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Rows of ids that count from the first row of this rank."""
        rows = len(self._weights[0])
        found = F.embedding(ids % rows, self._weights[0])
        for number, weight in enumerate(self._weights[1:], 1):
            here = (ids // rows == number)[..., None]
            found = torch.where(here, F.embedding(ids % rows, weight), found)
        return found

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of this rank's rows."""
        return self._head.apply(layer, x, bias)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """float32: x @ weight.T without a rounding between."""
    if x.dtype == torch.float32:
        return x @ weight.t()
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.t().float()  # CPU kernels round their result to x's precision


def _runs(arch: Architecture, kind: str, views: Sequence[Tensor], replica: Replica) -> list[Run]:
    """In which order vLLM wants the output columns of the shards."""
    if kind == "fc1":
        half = len(views[0]) // 2
        shards = range(len(views))
        return [(s, low, low + half) for low in (0, half) for s in shards]
    if kind == "qkv":
        per_shard = len(views[0])
        if arch.num_kv_heads < replica.tp_size:
            per_shard *= len(views) * replica.tp_size  # all gathered: one part
        return qkv_runs(arch, tp_size=replica.tp_size, tp_rank=replica.tp_rank, per_shard=per_shard)
    return _whole_runs(views)


def qkv_runs(arch: Architecture, *, tp_size: int, tp_rank: int, per_shard: int) -> list[Run]:
    """Columns of the interleaved qkv, in shards of per_shard, that make [q; k; v] of a rank.

    The first shard begins with the rank's first group, or with the first of all if the rank has
    but a part of a group (then the shards are those of every rank).
    """
    groups, width = arch.num_kv_heads, arch.head_dim
    per_group = arch.num_heads // groups
    heads = range(tp_rank * arch.num_heads // tp_size, (tp_rank + 1) * arch.num_heads // tp_size)
    kv_heads = sorted({head // per_group for head in heads})
    origin = kv_heads[0] * (per_group + 2) if groups >= tp_size else 0
    places = [head // per_group * (per_group + 2) + head % per_group for head in heads]
    for past_queries in (0, 1):  # k, then v
        places += [group * (per_group + 2) + per_group + past_queries for group in kv_heads]
    starts = [(place - origin) * width for place in places]
    return _merged(piece for start in starts for piece in _split(start, start + width, per_shard))


def _whole_runs(views: Sequence[Tensor]) -> list[Run]:
    return [(shard, 0, len(view)) for shard, view in enumerate(views)]


def _split(start: int, stop: int, per_shard: int) -> Iterator[Run]:
    """The columns start .. stop - 1 of all shards side by side, shard by shard."""
    while start < stop:
        shard, low = divmod(start, per_shard)
        high = min(per_shard, low + stop - start)
        yield shard, low, high
        start += high - low


def _merged(runs: Iterator[Run] | Sequence[Run]) -> list[Run]:
    """Neighbours joined."""
    found: list[Run] = []
    for shard, low, high in runs:
        if found and found[-1][0] == shard and found[-1][2] == low:
            low = found.pop()[1]
        found.append((shard, low, high))
    return found


def _replace(module: Any, method: Any) -> None:
    """Let the method do the layer's work, and free what the stock method worked on."""
    module.quant_method, module.use_fused_embedding = method, False
    module.weight.data = module.weight.data.new_empty(0)
    if isinstance(method, ColumnShards) and getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.new_empty(0)


def _path(layer: int | None, kind: str) -> str:
    return _TOP[kind][1] if layer is None else f"model.layers.{layer}.{_LAYER[kind][1]}"


def _kind(table: Mapping[str, tuple[str, str]], suffix: str, name: str) -> str:
    kind = next((kind for kind, (theirs, _) in table.items() if theirs == suffix), None)
    assert kind is not None, f"no vLLM layer for Megatron's {name}"
    return kind


def _top_kinds(arch: Architecture, pp_size: int, pp_rank: int) -> set[str]:
    last = pp_rank == pp_size - 1
    kinds = {"norm", "embed" if arch.tied else "head"} if last else set()
    return kinds | {"embed"} if pp_rank == 0 else kinds


def _shards_per_rank(
    arch: Architecture, replica: Replica, tp_size: int, vocab_multiple: int
) -> int:
    """X; ConfigError if a generation rank's part is not made of whole training shards."""
    padded = -(-arch.vocab_size // vocab_multiple) * vocab_multiple
    if tp_size % replica.tp_size or padded != -(-arch.vocab_size // 64) * 64:
        raise ConfigError(
            f"rollout.weights: got training shards of tensor-parallel size {tp_size}, vocabulary "
            f"{arch.vocab_size} padded to {padded}, for generation with t{replica.tp_size} and a "
            f"vocabulary padded to 64; expected a multiple of t{replica.tp_size} and equal "
            f"padding; change rollout.layout or set rollout.weights=copy"
        )
    return tp_size // replica.tp_size


def _check_shards(shards: Shards, wanted: Mapping[Key, Sequence[ShardTable]]) -> None:
    shapes = {key: [tuple(view.shape) for view in views] for key, views in shards.items()}
    expected = {
        key: [tensor.shape for table in tables for tensor in table.values()]
        for key, tables in wanted.items()
    }
    for key in [*expected, *shapes]:
        if shapes.get(key) != expected.get(key):
            raise ConfigError(
                f"rollout.weights: got views of shapes {shapes.get(key)} for {key}, expected "
                f"{expected.get(key)}; hand over the Megatron tensors of this generation shard, in "
                f"tensor-parallel order"
            )
