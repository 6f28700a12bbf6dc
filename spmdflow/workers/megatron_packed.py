"""Packed rows for Megatron's layers: positions for the rotary embedding, offsets for attention.

Given offsets, Megatron's rotary embedding reads them on the host in every layer, unless
TransformerEngine's fused kernel takes them. Without that kernel it gets angles by position.
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
    """Megatron's packed_seq_params: offsets if the rotary kernel is fused, else positions."""

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
    """Megatron's rotary embedding, which also takes positions in place of a length."""

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> Any:
        """A length, or positions (N,)."""
        packed = named.get("packed_seq_params", given[-1])
        if isinstance(packed, PackedParams) and packed.positions is not None:
            return packed.positions
        return super().get_rotary_seq_len(*given, **named)

    def forward(self, max_seq_len: Any, *given: Any, **named: Any) -> Tensor:
        """(T, 1, 1, d) angles of positions 0 to T - 1, or (N, 1, d) of those that are given."""
        if isinstance(max_seq_len, Tensor):
            angles = max_seq_len[:, None].float() * self.inv_freq
            return torch.cat([angles, angles], -1)[:, None]
        found: Tensor = super().forward(max_seq_len, *given, **named)
        return found


class TEPackedAttention(TEDotProductAttention):
    """TransformerEngine's attention, which always needs the offsets."""

    def forward(self, *given: Any, packed_seq_params: Any = None, **named: Any) -> Tensor:
        """As the class it derives from."""
        if packed_seq_params is not None:
            rows = packed_seq_params.rows
            packed_seq_params = PackedParams.of(rows, packed_seq_params.positions, fused=True)
        found: Tensor = super().forward(*given, packed_seq_params=packed_seq_params, **named)
        return found
