"""Packed rows for Megatron's layers: positions for the rotary embedding, offsets for attention.

With offsets, Megatron's rotary embedding reads them on the host in every layer, unless
TransformerEngine's fused kernel is used. Without that kernel it gets angles by position instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from spmdflow.workers.attention import PackedRows


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's packed_seq_params: offsets if the rotary kernel is fused, otherwise positions."""

    rows: Any = None
    """The `PackedRows`."""
    positions: Any = None
    """(N,) int64: position of each token in its row."""

    @classmethod
    def of(cls, rows: PackedRows, positions: Tensor, *, fused: bool) -> PackedParams:
        """fused: the rotary kernel takes offsets."""
        if not fused:
            return cls("thd", rows=rows, positions=positions)
        ends = rows.offsets
        most = max(rows.lengths)
        return cls("thd", ends, ends, max_seqlen_q=most, max_seqlen_kv=most, rows=rows)


class PackedRotary(RotaryEmbedding):
    """Megatron's rotary embedding, which also accepts positions instead of a length."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """A length, or positions (N,)."""
        packed = kwargs.get("packed_seq_params", args[-1])
        if isinstance(packed, PackedParams) and packed.positions is not None:
            return packed.positions
        return super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Angles (T, 1, 1, d) of positions 0 to T - 1, or (N, 1, d) of the positions passed."""
        if isinstance(max_seq_len, Tensor):
            angles = max_seq_len[:, None].float() * self.inv_freq
            return torch.cat([angles, angles], -1)[:, None]
        output: Tensor = super().forward(max_seq_len, *args, **kwargs)
        return output


class TEPackedAttention(TEDotProductAttention):
    """TransformerEngine's attention, which always needs the offsets."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        """See TEDotProductAttention. Converts packed rows to offsets first."""
        if packed_seq_params is not None:
            rows = packed_seq_params.rows
            packed_seq_params = PackedParams.of(rows, packed_seq_params.positions, fused=True)
        output: Tensor = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        return output
