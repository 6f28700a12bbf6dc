"""The layers that a Megatron model has from us: norm, attention, scalar head, and packed rows.

Packed rows need positions for the rotary embedding and offsets for attention. If Megatron's rotary
embedding gets offsets, it reads them on the host in every layer, unless TransformerEngine's fused
kernel is used. Without that kernel it gets angles by position instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from spmdflow.cpu.product import trained_linear
from spmdflow.workers.attention import (
    AttentionForm,
    PackedRows,
    dense_attention,
    packed_attention,
)
from spmdflow.workers.context_parallel import TokenShard, context_attention


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019), normalised in float32 as Hugging Face does.

    Megatron's own norm without TransformerEngine has no sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        """The weight is on Megatron's current device. Further arguments of Megatron are ignored."""
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()  # the CPU, inside megatron_runtime
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # each rank sees its part of the sequence: gradients are summed over tp afterwards
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight: (..., hidden_size) -> the same shape and dtype.

        rms(x) = sqrt(mean(x^2) + eps) over the last dimension, computed in float32.
        """
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(x.dtype)


class CausalAttention(nn.Module):
    """Scaled dot-product attention with PyTorch's kernels: no (T, T) scores are stored.

    Ranks that divide packed rows exchange queries, keys and values here
    (`context_parallel.context_attention`), not by Megatron's own context parallelism.
    """

    def __init__(
        self, *, config: TransformerConfig, softmax_scale: float | None = None, **_: Any
    ) -> None:
        """softmax_scale: None: the default of the kernels. Further arguments are ignored."""
        super().__init__()
        assert config.context_parallel_size == 1, config.context_parallel_size
        self.scale = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute causal attention of padded rows, or of packed rows.

        query (T, b, heads, d), key and value (T, b, kv heads, d) -> (T, b, heads * d). With
        packed_seq_params, the rows are packed and have no dimension b: (N, heads, d) and (N, kv
        heads, d) -> (N, heads, d), where N counts this rank's tokens if ranks divide rows.
        attention_mask must be None, because rows are padded on the right.
        """
        assert attention_mask is None, "rows are padded on the right: causality is mask enough"
        form = AttentionForm(self.scale, self.window)
        if packed_seq_params is not None:
            rows = packed_seq_params.rows
            if packed_seq_params.shard is None:
                return packed_attention(query, key, value, rows, form)
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            return context_attention(q, k, v, rows, form, packed_seq_params.shard)[0]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (b, heads, T, d)
        mixed = dense_attention(q, k, v, form)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class GroupedSelfAttention(SelfAttention):
    """Self-attention that also splits over more ranks than there are key-value heads.

    Megatron does the same with its global tensor-parallel group (attention.py, 0.16.1); here it
    is the model's own. Each rank stores 1/t of the fused rows. The outputs are gathered, and a
    rank uses its key-value head and its own query heads.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Project (T, b, H) to query (T, b, heads/t, d), key and value (T, b, kv heads, d).

        With at least as many key-value heads as tensor-parallel ranks, Megatron's own method runs.
        Otherwise all ranks of the tp group gather the fused projection, and each takes its one
        key-value head and its share of the query heads that belong to it.
        """
        kv_heads = self.config.num_query_groups
        if kv_heads >= self.world_size:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate=output_gate, split_qkv=split_qkv
            )
        fused, _ = self.linear_qkv(hidden_states)
        fused = all_gather_last_dim_from_tensor_parallel_region(fused, group=self.tp_group)
        ranks_per_head = self.world_size // kv_heads
        head, part = divmod(self.tp_group.rank(), ranks_per_head)
        mine = fused.chunk(kv_heads, -1)[head]
        mine = mine.unflatten(-1, (-1, self.hidden_size_per_attention_head))  # (T, b, q.. k v, d)
        query = mine[..., :-2, :]
        key = mine[..., -2:-1, :]
        value = mine[..., -1:, :]
        query = query.chunk(ranks_per_head, 2)[part]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query.contiguous(), key.contiguous(), value.contiguous()


def use_onednn_products(model: nn.Module) -> None:
    """Make every parallel linear layer of a model on a CPU multiply with `cpu.product`.

    Replaces the method by which Megatron's layers multiply. Under sequence parallelism they keep
    their own, which gathers its input once more in backward.
    """
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = _multiply  # type: ignore[method-assign]


def _multiply(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: torch.distributed.ProcessGroup | None,
    **more: Any,
) -> Tensor:
    """Return x W^T + b: (..., in) -> (..., out/t), with Megatron's arguments.

    allreduce_dgrad: the gradient of the input is summed over tp_group.
    """
    if sequence_parallel:
        return linear_with_grad_accumulation_and_async_allreduce(
            input,
            weight,
            bias,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=True,
            tp_group=tp_group,
            **more,
        )
    if allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return trained_linear(input, weight, bias)


class ScalarHead(nn.Module):
    """Weight of a linear head with one output, complete on every rank and in float32.

    bfloat16's 8 bits of mantissa are too few for a value.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, device=device))


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's packed_seq_params: offsets if the rotary kernel is fused, otherwise positions."""

    rows: Any = None
    """The `PackedRows`."""
    shard: Any = None
    """The `TokenShard`, if ranks divide rows."""
    positions: Any = None
    """(N,) int64: position of each token in its row."""

    @classmethod
    def of(
        cls,
        rows: PackedRows,
        positions: Tensor,
        *,
        fused: bool,
        shard: TokenShard | None = None,
    ) -> PackedParams:
        """Return Megatron's parameters of packed rows.

        fused: the rotary kernel takes offsets, so these are set. Otherwise the positions (N,) are.
        shard: this rank's tokens, if ranks divide rows; not fused then.
        """
        if not fused:
            return cls("thd", rows=rows, shard=shard, positions=positions)
        ends = rows.offsets
        most = max(rows.lengths)
        return cls("thd", ends, ends, max_seqlen_q=most, max_seqlen_kv=most, rows=rows)


class PackedRotary(RotaryEmbedding):
    """Megatron's rotary embedding, which also accepts positions instead of a length."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Return the positions (N,) of packed rows if there are any, otherwise a length."""
        packed = kwargs.get("packed_seq_params", args[-1])
        if isinstance(packed, PackedParams) and packed.positions is not None:
            return packed.positions
        return super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return rotary angles: (T, 1, 1, d) of positions 0 to T - 1, or (N, 1, d).

        max_seq_len: the number T, or a tensor of positions (N,).
        """
        if isinstance(max_seq_len, Tensor):
            angles = max_seq_len[:, None].float() * self.inv_freq
            return torch.cat([angles, angles], -1)[:, None]
        output: Tensor = super().forward(max_seq_len, *args, **kwargs)
        return output


class TEPackedAttention(TEDotProductAttention):
    """TransformerEngine's attention, which always needs the offsets."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        """Run TransformerEngine's attention. Packed rows are converted to offsets first."""
        if packed_seq_params is not None:
            rows = packed_seq_params.rows
            packed_seq_params = PackedParams.of(rows, packed_seq_params.positions, fused=True)
        output: Tensor = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        return output
