"""vLLM layers that compute with the trainer's shards in place: no second copy of a weight.

A generation shard is made of X training shards (X = t / t_g), and Megatron's local tensors are
not slices of vLLM's: its qkv mixes q, k and v group by group, its fc1 is gate over up per shard.
So each vLLM layer gets a method that works on the *list* of shards:

    column-parallel  one product per shard; the output columns are concatenated in vLLM's order
    row-parallel     one product per shard's columns, summed in float32
    embedding        id // rows gives the shard that has the row
    norms, biases    the view itself

The weight tables of both sides determine which tensors correspond, and the order of columns. A kv
head that several generation ranks share is on one of them only; then the ranks gather their outputs
of qkv, as Megatron does. Shards are keyed by vLLM's parameter: X views in tensor-parallel order, or
one view for a tensor that every rank holds completely (norms; biases of o_proj and down_proj). Each
view has the shape that `megatron_shards` states. The embedding of a tied model is needed on the
first and on the last generation stage.

vLLM's own weights of these layers are freed: never call its load_weights again. The views' storages
may be freed and refilled between generations. Their addresses are read again each time, so no CUDA
graph may have captured them (the engine runs eagerly).
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
"""(shard, first output column, last + 1): columns that are adjacent in vLLM's output."""

_WHOLE = ("norm.weight", "o_proj.bias", "down_proj.bias")
_ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def is_whole(name: str) -> bool:
    """Whether every tensor-parallel rank holds the complete vLLM parameter."""
    return name.endswith(_WHOLE)


def vllm_names(arch: Architecture, *, pp_size: int = 1, pp_rank: int = 0) -> dict[str, str]:
    """Returns Megatron parameter of one stage -> vLLM parameter of the same Hugging Face tensors.

    A parameter is found by the first Hugging Face tensor in it. The names do not depend on
    tensor-parallel sizes, and vLLM's layers have their number in the complete model.
    """
    stock = vllm_shards(arch, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)
    vllm_name_of = {}
    for name, tensor in stock.items():
        for piece in tensor.pieces:
            vllm_name_of[piece.name] = name
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
        result[name] = vllm_name_of[tensor.pieces[0].name]
    return result


def shard_tensors(
    arch: Architecture, replica: Replica, *, tp_size: int, vocab_multiple: int, replica_rank: int
) -> dict[str, list[LocalTensor]]:
    """Returns vLLM parameter -> the training shards that replace it on one rank of the replica.

    Generation rank g of the tensor-parallel group has the training shards g X to (g + 1) X - 1,
    where X = tp_size / replica.tp_size. Tensors that every rank has completely (`is_whole`) appear
    once. Only parameters of the rank's pipeline stage are in the result. tp_size, vocab_multiple:
    the trainer's. ConfigError if the shards cannot replace vLLM's weights.
    """
    per_rank = _shards_per_rank(arch, replica, tp_size, vocab_multiple)
    stock = stock_table(arch, replica, replica_rank)
    names = vllm_names(arch)
    first = replica_rank % replica.tp_size * per_rank
    shards_of: dict[str, list[LocalTensor]] = {}
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
            collected = shards_of.setdefault(names[name], [])
            if not collected or not is_whole(names[name]):
                collected.append(tensor)
    result = {}
    for name, tensors in shards_of.items():
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
    """Makes the model's layers compute with the shards in place, and frees vLLM's own weights.

    Complete tensors (norms, some biases) become views; the other layers get a method
    (VocabularyShards, RowShards or ColumnShards). gather: concatenates the last dimension over the
    tensor-parallel group; used if there are fewer kv heads than ranks. tp_size, vocab_multiple: the
    trainer's. Returns the tensors that the ranks read from then on. ConfigError if names or shapes
    of the views do not fit.
    """
    tables = []
    for replica_rank in range(replica.size):
        tables.append(
            shard_tensors(
                arch,
                replica,
                tp_size=tp_size,
                vocab_multiple=vocab_multiple,
                replica_rank=replica_rank,
            )
        )
    stock = stock_table(arch, replica, replica.replica_rank)
    mine = tables[replica.replica_rank]
    _check_shards(shards, mine)
    qkv_of_all: dict[str, list[LocalTensor]] = {}
    if (
        arch.num_kv_heads < replica.tp_size
    ):  # gathered, it equals the tensor of a single training rank
        alone = Replica.alone()
        tables_alone = shard_tensors(
            arch, alone, tp_size=1, vocab_multiple=VLLM_VOCAB_MULTIPLE, replica_rank=0
        )
        qkv_of_all = {}
        for name in mine:
            if name.endswith("qkv_proj.weight"):
                qkv_of_all[name] = tables_alone[name]
    for name, views in shards.items():
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        if is_whole(name):
            getattr(module, part).data = views[0]
        elif name == EMBEDDING:
            _replace_method(module, VocabularyShards(views))
        elif name.endswith(_ROW_PARALLEL):
            _replace_method(module, RowShards(views))
        elif part == "weight":
            runs = column_order(stock[name], qkv_of_all.get(name, mine[name]))
            gather_columns = gather if name in qkv_of_all else None
            _replace_method(
                module, ColumnShards(views, shards.get(f"{path}.bias"), runs, gather_columns)
            )
    if arch.tied and EMBEDDING in shards and hasattr(model.lm_head, "quant_method"):
        _replace_method(model.lm_head, model.model.embed_tokens.quant_method)
    read = []
    for name, tensors in mine.items():
        for view, tensor in zip(shards[name], tensors, strict=True):
            for block in blocks({name: view}, {name: tensor}):
                read.append(block)
    slots_of_rank = []
    for tensors_of in tables:
        slots_of_rank.append(slots_of(chain.from_iterable(tensors_of.values())))
    return Reading(whole_shapes(arch), read, slots_of_rank)


def column_order(stock: LocalTensor, shards: Sequence[LocalTensor]) -> list[Run]:
    """Returns the runs of the shards' rows that form vLLM's tensor, in vLLM's order.

    A run is (shard, first row, last row + 1); adjacent runs are merged. If vLLM's tensor is padded
    (the vocabulary), the shards are already in order, and the result has all rows of each shard.
    """
    if stock.padding:
        result = []
        for number, tensor in enumerate(shards):
            result.append((number, 0, tensor.shape[0]))
        return result
    runs: list[Run] = []
    for wanted in stock.pieces:
        for number, tensor in enumerate(shards):
            for candidate in tensor.pieces:
                if candidate.name == wanted.name:
                    common = candidate.box.intersect(wanted.box)
                else:
                    common = None
                if common is None:
                    continue
                low, high = candidate.part(common).local.bounds[0]
                if runs and runs[-1][0] == number and runs[-1][2] == low:
                    low = runs.pop()[1]
                runs.append((number, low, high))
    return runs


class ColumnShards:
    """A column-parallel layer. Each shard computes some output columns."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        runs: Sequence[Run],
        gather: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """runs: order of the output columns. gather: over the replica's ranks; None: not needed."""
        self._weights = list(weights)
        self._gather = gather
        self._biases: list[Tensor | None] = list(biases) if biases else [None] * len(weights)
        in_place = len(weights) == 1 and len(runs) == 1 and gather is None
        self._runs = [] if in_place else list(runs)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x (..., in) times every shard, as (..., columns) in vLLM's column order.

        Adds each shard's bias, if there are biases, and gathers over the replica's ranks if needed.
        Does not read the layer's own weight and bias.
        """
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
    """A row-parallel layer. Each shard takes some input columns, and their products are summed."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the sum over shards of (their columns of x) @ shard.T, plus the layer's bias.

        x (..., in) is split evenly over the shards, in order. The products are summed in float32
        and rounded once to x's dtype. A single shard is a plain linear layer.
        """
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
    """The embedding and, if tied, the head. Each shard has some rows of the vocabulary."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """weights: the shards in the order of their rows."""
        self._weights = list(weights)
        runs = []
        for shard, weight in enumerate(weights):
            runs.append((shard, 0, len(weight)))
        self._head = ColumnShards(weights, None, runs, None)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Returns the embedding rows of ids, which count from the first row of this rank.

        All shards have equally many rows: id // rows is the shard, id % rows the row in it.
        """
        rows = len(self._weights[0])
        output = F.embedding(ids % rows, self._weights[0])
        for number, weight in enumerate(self._weights[1:], 1):
            is_in_shard = (ids // rows == number)[..., None]
            output = torch.where(is_in_shard, F.embedding(ids % rows, weight), output)
        return output

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of this rank's rows."""
        return self._head.apply(layer, x, bias)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, without rounding intermediate sums to x's precision."""
    if x.dtype == torch.float32:
        return x @ weight.t()
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.t().float()  # CPU kernels round their result to x's precision


def _replace_method(module: Any, method: Any) -> None:
    """Makes `method` compute the layer's output, and frees the layer's own weight.

    The parameter stays, with 0 elements. The layer's own bias is freed only for ColumnShards, which
    have the shards' biases.
    """
    module.quant_method = method
    module.use_fused_embedding = False
    module.weight.data = module.weight.data.new_empty(0)
    if isinstance(method, ColumnShards) and getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.new_empty(0)


def _shards_per_rank(
    arch: Architecture, replica: Replica, tp_size: int, vocab_multiple: int
) -> int:
    """Returns X = tp_size / replica.tp_size: how many training shards make up a generation shard.

    ConfigError if that is not an integer, or if the trainer pads the vocabulary to another size
    than vLLM does.
    """
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
    """ConfigError unless the views have the names and shapes of the expected tensors."""
    shapes = {}
    for name, views in shards.items():
        shapes[name] = [tuple(view.shape) for view in views]
    expected = {}
    for name, tensors in wanted.items():
        expected[name] = [tensor.shape for tensor in tensors]
    for name in [*expected, *shapes]:
        if shapes.get(name) != expected.get(name):
            got = f"views of shapes {shapes.get(name)} for {name}"
            do = "pass the Megatron tensors of this generation shard, in "
            do += "tensor-parallel order"
            raise ConfigError.of("rollout.weights", got, expected.get(name), do)
