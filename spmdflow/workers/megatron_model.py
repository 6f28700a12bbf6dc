"""A Megatron-Core GPT model for an `Architecture` and one rank's place in a layout. No weights.

Settings that follow from how the engine runs: no dropout, sums instead of means over micro-
batches and dp (`calculate_per_token_loss`), variable lengths between stages, so that micro-
batches may differ in rows and length. Layers are TransformerEngine's where it can run; else
Megatron's local ones, with a norm, an attention and a scalar head of our own.

Parameter names are those of Megatron's local layers, also under TransformerEngine, which fuses a
norm into the linear layer that follows it: `local_name` undoes that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, layers
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import default_vocab_multiple
from spmdflow.weights.table import stage_layers
from spmdflow.workers.attention import dense_attention, packed_attention
from spmdflow.workers.megatron_packed import PackedParams, PackedRotary, TEPackedAttention

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def build_model(
    architecture: Architecture,
    groups: ProcessGroupCollection,
    dtype: torch.dtype,
    options: Collection[str],
    *,
    part: int,
    num_parts: int,
) -> GPTModel:
    """One of this rank's parts of the model, with undefined weights. Collective over pipelines if
    tied.

    options: engine.options. part: on stage s of p it is virtual stage part * p + s of p * num_parts
    (`weights.ranks`).
    """
    tp_size = groups.tp.size()
    pp_size = groups.pp.size()
    pp_rank = groups.pp.rank()
    stage = part * pp_size + pp_rank
    num_stages = pp_size * num_parts
    num_layers = len(stage_layers(architecture.num_layers, pp_size=num_stages, pp_rank=stage))
    config = _transformer_config(
        architecture,
        num_layers * num_parts,
        dtype,
        options,
        tp_size=tp_size,
        pp_size=pp_size,
        num_parts=num_parts,
    )
    last = stage == num_stages - 1
    scalar = architecture.head != "causal_lm"
    multiple = default_vocab_multiple(tp_size)
    model = GPTModel(
        config,
        _stage_spec(config, num_layers),
        vocab_size=-(-architecture.vocab_size // multiple) * multiple,
        max_sequence_length=architecture.max_positions,
        pre_process=stage == 0,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied and not scalar,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        pg_collection=groups,
        vp_stage=part if num_parts > 1 else None,
    )
    inv_freq = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = rotary_frequencies(architecture).to(inv_freq.device)
    model.rotary_pos_emb.__class__ = PackedRotary
    if last:
        if scalar:
            model.output_layer = ScalarHead(config)
        model.output_layer.forward = functools.partial(
            _hidden_of_head, config=config, group=groups.tp
        )
    return model


def _hidden_of_head(
    hidden: Tensor,
    *,
    config: TransformerConfig,
    group: torch.distributed.ProcessGroup,
    **_: Any,
) -> tuple[Tensor, None]:
    """(T or T/t, b, H) -> (T, b, H), instead of logits: heads run later, where they are needed.

    All ranks of the group return the same gradient for these hidden states.
    """
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=group
        )
    return hidden, None


def _transformer_config(
    architecture: Architecture,
    num_layers: int,
    dtype: torch.dtype,
    options: Collection[str],
    *,
    tp_size: int,
    pp_size: int,
    num_parts: int,
) -> TransformerConfig:
    """Settings of one stage with num_layers decoder layers in num_parts equal parts."""
    recompute = "recompute" in options
    selective = "selective_recompute" in options
    window = architecture.sliding_window
    return TransformerConfig(
        # only layer numbers derive from this, and nothing reads them: stages may be uneven
        num_layers=num_layers * pp_size,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=architecture.mlp_bias,
        add_qkv_bias=architecture.qkv_bias,
        window_size=None if window is None else (window - 1, 0),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=num_parts if num_parts > 1 else None,
        sequence_parallel="sequence_parallel" in options and tp_size > 1,
        variable_seq_lengths=pp_size > 1,
        moe_token_dispatcher_type="alltoall",  # checked with the line above, also without experts
        deallocate_pipeline_outputs=pp_size > 1,
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else "selective" if selective else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # without initialization Megatron omits attributes that its gradient norms read; the
        # weights are overwritten anyway
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        masked_softmax_fusion=False,  # attention is TransformerEngine's or torch's: no scores
        persist_layer_norm=False,
        **fusions(options, on_cuda=HAVE_TE and torch.cuda.is_available()),
    )


def fusions(options: Collection[str], *, on_cuda: bool) -> dict[str, bool]:
    """Megatron's switches of fused kernels: on where TransformerEngine runs on CUDA, unless
    engine.options has no_fusions. Those of a package that is not installed stay off."""
    fused = on_cuda and "no_fusions" not in options
    return {
        "gradient_accumulation_fusion": fused and layers._grad_accum_fusion_available,
        "bias_activation_fusion": fused,  # gate, activation and product of the feed-forward network
        "bias_dropout_fusion": fused,  # the residual's addition
        "apply_rope_fusion": fused and rope_utils.fused_apply_rotary_pos_emb is not None,
    }


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """(head_dim / 2,) float32: theta^(-2i/d), scaled for long contexts according to the config.

    linear: all are divided by factor. llama3: those with fewer than low_freq_factor turns within
    the original positions are divided, those with more than high_freq_factor turns are unchanged,
    and those in between are interpolated linearly.
    """
    dims = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / architecture.rope_theta ** (dims / architecture.head_dim)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    share_kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return share_kept * frequencies + (1 - share_kept) * frequencies / scaling.factor


def _leave(tensor: Tensor) -> Tensor:
    """An initialization that does nothing."""
    return tensor


def _stage_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """num_layers decoder layers and a final norm: TransformerEngine's where it can run."""
    qk_norm = config.qk_layernorm
    if HAVE_TE and torch.cuda.is_available():
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
        layer.submodules.self_attention.module = GroupedSelfAttention
        layer.submodules.self_attention.submodules.core_attention = TEPackedAttention
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention: ModuleSpec = layer.submodules.self_attention
    attention.module = GroupedSelfAttention
    attention.submodules.core_attention = CausalAttention
    if qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def local_name(name: str) -> str:
    """A parameter's name in a model of local layers, without the wrappers' prefixes."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    return name


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
        """(..., hidden_size) -> the same."""
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalised.to(x.dtype)


class CausalAttention(nn.Module):
    """Scaled dot-product attention with PyTorch's kernels: no (T, T) scores are stored.

    Does not support context parallelism: every rank needs the keys of the complete sequence, which
    Megatron exchanges only in TransformerEngine's attention.
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
        """query (T, b, heads, d), key and value (T, b, kv heads, d) -> (T, b, heads * d).

        Of packed rows without b: (N, heads, d) and (N, kv heads, d) -> (N, heads, d).
        """
        assert attention_mask is None, "rows are padded on the right: causality is mask enough"
        scale = self.scale
        window = self.window
        if packed_seq_params is not None:
            rows = packed_seq_params.rows
            return packed_attention(query, key, value, rows, scale=scale, window=window)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (b, heads, T, d)
        mixed = dense_attention(q, k, v, scale=scale, window=window)
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
        """(T, b, H) -> query (T, b, heads/t, d), key and value (T, b, kv heads or 1, d)."""
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


class ScalarHead(nn.Module):
    """Weight of a linear head with one output, complete on every rank and in float32.

    bfloat16's 8 bits of mantissa are too few for a value.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, device=device))
