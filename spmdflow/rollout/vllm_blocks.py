"""vLLM layers that compute with the trainer's shards in place: no second copy of a weight.

A generation shard is made of X training shards (X = t / t_g), and Megatron's local tensors are
not slices of vLLM's: its qkv mixes q, k and v group by group, its fc1 is gate over up per shard.
So each vLLM layer gets a method that works on the *list* of shards:

    column-parallel  one product per shard; the output columns are joined in vLLM's order
    row-parallel     one product per shard's columns, summed in float32
    embedding        id // rows says which shard has the row
    norms, biases    the view itself

What belongs to what, and the order of columns, follow from the weight tables of both. A kv head
that several generation ranks share is on one of them only; then the ranks gather their outputs of
qkv, as Megatron does. Shards are keyed by vLLM's parameter: X views in tensor-parallel order, one
of what every rank holds whole (norms; biases of o_proj and down_proj). Each view has the shape that
`megatron_shards` says. A tied model's embedding is needed on the first and on the last generation
stage.

vLLM's own weights of these layers are freed: never call its load_weights again. The
views' storages may be freed and refilled between generations; their addresses are read anew each
time, so no CUDA graph may have captured them (the engine runs eagerly).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spmdflow.errors import ConfigError
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.vllm_weights import Reading, slots_of, stock_table, whole_shapes
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import blocks
from spmdflow.weights.ranks import VLLM_VOCAB_MULTIPLE, megatron_shards, vllm_shards
from spmdflow.weights.table import EMBEDDING, LocalTensor

Shards = Mapping[str, Sequence[Tensor]]
Run = tuple[int, int, int]
"""(shard, first output column, last + 1): neighbours in vLLM's output."""

_WHOLE = ("norm.weight", "o_proj.bias", "down_proj.bias")
_ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def is_whole(name: str) -> bool:
    """Whether every tensor-parallel rank holds all of a vLLM parameter."""
    return name.endswith(_WHOLE)


def vllm_names(arch: Architecture, *, pp_size: int = 1, pp_rank: int = 0) -> dict[str, str]:
    """Megatron's parameter of one stage -> vLLM's parameter of the same Hugging Face tensors."""
    stock = vllm_shards(arch, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)
    theirs = {}
    for name, tensor in stock.items():
        for piece in tensor.pieces:
            theirs[piece.name] = name
    table = megatron_shards(
        arch,
        tp_size=1,
        tp_rank=0,
        pp_size=pp_size,
        pp_rank=pp_rank,
        vocab_multiple=VLLM_VOCAB_MULTIPLE,
    )
    result = {}
    for name, tensor in table.items():
        result[name] = theirs[tensor.pieces[0].name]
    return result


def shard_tensors(
    arch: Architecture, replica: Replica, *, tp_size: int, vocab_multiple: int, place: int
) -> dict[str, list[LocalTensor]]:
    """The training shards of each vLLM parameter of a rank, by its place in the replica.

    tp_size, vocab_multiple: the trainer's. ConfigError if the shards cannot replace vLLM's.
    """
    per_rank = _shards_per_rank(arch, replica, tp_size, vocab_multiple)
    stock = stock_table(arch, replica, place)
    names = vllm_names(arch)
    first = place % replica.tp_size * per_rank
    found: dict[str, list[LocalTensor]] = {}
    for shard in range(first, first + per_rank):
        table = megatron_shards(
            arch,
            tp_size=tp_size,
            tp_rank=shard,
            pp_size=1,
            pp_rank=0,
            vocab_multiple=vocab_multiple,
        )
        for name, tensor in table.items():
            known = found.setdefault(names[name], [])
            if not known or not is_whole(names[name]):
                known.append(tensor)
    result = {}
    for name, tensors in found.items():
        if name in stock:
            result[name] = tensors
    return result


def install(
    model: Any,
    arch: Architecture,
    shards: Shards,
    replica: Replica,
    gather: Callable[[Tensor], Tensor],
    *,
    tp_size: int,
    vocab_multiple: int,
) -> Reading:
    """Make the model's layers compute with the shards; vLLM's own weights are freed.

    gather: joins the last dimension over the tensor-parallel group; used if kv heads are fewer
    than its ranks. tp_size, vocab_multiple: the trainer's. Gives what the ranks then read;
    ConfigError if the views are not those needed.
    """
    every = []
    for place in range(replica.size):
        every.append(
            shard_tensors(
                arch, replica, tp_size=tp_size, vocab_multiple=vocab_multiple, place=place
            )
        )
    stock = stock_table(arch, replica, replica.place)
    mine = every[replica.place]
    _check_shards(shards, mine)
    qkv_of_all: dict[str, list[LocalTensor]] = {}
    if arch.num_kv_heads < replica.tp_size:  # gathered, it is what a single rank would train
        alone = Replica.alone()
        whole = shard_tensors(arch, alone, tp_size=1, vocab_multiple=VLLM_VOCAB_MULTIPLE, place=0)
        qkv_of_all = {}
        for name in mine:
            if name.endswith("qkv_proj.weight"):
                qkv_of_all[name] = whole[name]
    for name, views in shards.items():
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        if is_whole(name):
            getattr(module, part).data = views[0]
        elif name == EMBEDDING:
            _replace(module, VocabularyShards(views))
        elif name.endswith(_ROW_PARALLEL):
            _replace(module, RowShards(views))
        elif part == "weight":
            runs = column_order(stock[name], qkv_of_all.get(name, mine[name]))
            joins = gather if name in qkv_of_all else None
            _replace(module, ColumnShards(views, shards.get(f"{path}.bias"), runs, joins))
    if arch.tied and EMBEDDING in shards and hasattr(model.lm_head, "quant_method"):
        _replace(model.lm_head, model.model.embed_tokens.quant_method)
    read = []
    for name, tensors in mine.items():
        for view, tensor in zip(shards[name], tensors, strict=True):
            for block in blocks({name: view}, {name: tensor}):
                read.append(block)
    held = []
    for found in every:
        held.append(slots_of(chain.from_iterable(found.values())))
    return Reading(whole_shapes(arch), read, held)


def column_order(stock: LocalTensor, shards: Sequence[LocalTensor]) -> list[Run]:
    """Runs of the shards' rows that make up vLLM's tensor in its order, adjacent ones joined.

    For a padded vocabulary, whose rows are in order already: all rows of each shard.
    """
    if stock.padding:
        result = []
        for number, tensor in enumerate(shards):
            result.append((number, 0, tensor.shape[0]))
        return result
    runs: list[Run] = []
    for wanted in stock.pieces:
        for number, tensor in enumerate(shards):
            for held in tensor.pieces:
                if held.name == wanted.name:
                    common = held.box.intersect(wanted.box)
                else:
                    common = None
                if common is None:
                    continue
                low, high = held.part(common).local.bounds[0]
                if runs and runs[-1][0] == number and runs[-1][2] == low:
                    low = runs.pop()[1]
                runs.append((number, low, high))
    return runs


class ColumnShards:
    """A column-parallel layer: each shard gives some output columns."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        runs: Sequence[Run],
        gather: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._weights = list(weights)
        self._gather = gather
        self._biases: list[Tensor | None] = list(biases) if biases else [None] * len(weights)
        in_place = len(weights) == 1 and len(runs) == 1 and gather is None
        self._runs = [] if in_place else list(runs)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., columns) in vLLM's order; the layer's own weight and bias are not read."""
        pairs = zip(self._weights, self._biases, strict=True)
        parts = []
        for weight, shard_bias in pairs:
            parts.append(F.linear(x, weight, shard_bias))
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
        """The sum of the products, in float32 and rounded once; bias is the layer's own."""
        if len(self._weights) == 1:
            return F.linear(x, self._weights[0], bias)
        flat = x.reshape(-1, x.shape[-1])
        pairs = zip(flat.split(self._weights[0].shape[1], -1), self._weights, strict=True)
        total = sum(_product(part, weight) for part, weight in pairs)
        result = total.to(x.dtype).view(*x.shape[:-1], -1)  # type: ignore[union-attr]
        if bias is None:
            return result
        return result + bias


class VocabularyShards:
    """Embedding and, where it is tied, head: each shard has some rows of the vocabulary."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        runs = []
        for shard, weight in enumerate(weights):
            runs.append((shard, 0, len(weight)))
        self._head = ColumnShards(weights, None, runs, None)

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
    """float32: x @ weight.T without rounding to x's precision in between."""
    if x.dtype == torch.float32:
        return x @ weight.t()
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.t().float()  # CPU kernels round their result to x's precision


def _replace(module: Any, method: Any) -> None:
    """Let the method do the layer's work, and free what the stock method worked on."""
    module.quant_method = method
    module.use_fused_embedding = False
    module.weight.data = module.weight.data.new_empty(0)
    if isinstance(method, ColumnShards) and getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.new_empty(0)


def _shards_per_rank(
    arch: Architecture, replica: Replica, tp_size: int, vocab_multiple: int
) -> int:
    """X; ConfigError if a generation rank's part is not made of whole training shards."""
    padded = -(-arch.vocab_size // vocab_multiple) * vocab_multiple
    stock_vocab = -(-arch.vocab_size // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
    if tp_size % replica.tp_size or padded != stock_vocab:
        raise ConfigError(
            f"rollout.weights: got training shards of tensor-parallel size {tp_size}, vocabulary "
            f"{arch.vocab_size} padded to {padded}, for generation with t{replica.tp_size} and a "
            f"vocabulary padded to 64; expected a multiple of t{replica.tp_size} and equal "
            f"padding; change rollout.layout or set rollout.weights=copy"
        )
    return tp_size // replica.tp_size


def _check_shards(shards: Shards, wanted: Mapping[str, Sequence[LocalTensor]]) -> None:
    shapes = {}
    for name, views in shards.items():
        shapes[name] = [tuple(view.shape) for view in views]
    expected = {}
    for name, tensors in wanted.items():
        expected[name] = [tensor.shape for tensor in tensors]
    for name in [*expected, *shapes]:
        if shapes.get(name) != expected.get(name):
            got = f"views of shapes {shapes.get(name)} for {name}"
            do = "hand over the Megatron tensors of this generation shard, in "
            do += "tensor-parallel order"
            raise ConfigError.of("rollout.weights", got, expected.get(name), do)
