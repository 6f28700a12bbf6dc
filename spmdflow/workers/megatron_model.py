"""A Megatron-Core GPT model for an `Architecture` and one rank's place in a layout. No weights.

Settings that follow from how the engine runs: no dropout, sums instead of means over micro-
batches and dp (`calculate_per_token_loss`), shapes sent along between stages, so that micro-
batches may differ in rows and length.
"""

from __future__ import annotations

import math

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from spmdflow.weights.architecture import Architecture
from spmdflow.weights.megatron import vocab_multiple
from spmdflow.workers.megatron_layer import ScalarHead, stage_spec


def transformer_config(
    architecture: Architecture,
    *,
    tp_size: int,
    pp_size: int,
    num_layers: int,
    dtype: torch.dtype,
    recompute: bool = False,
    sequence_parallel: bool = False,
) -> TransformerConfig:
    """Settings of one stage with num_layers decoder layers."""
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
        sequence_parallel=sequence_parallel and tp_size > 1,
        variable_seq_lengths=pp_size > 1,
        moe_token_dispatcher_type="alltoall",  # checked with the line above, also without experts
        deallocate_pipeline_outputs=pp_size > 1,
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # without initialisation Megatron leaves out the attributes that its norms of gradients
        # read; the weights are overwritten anyway
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    num_layers: int,
) -> GPTModel:
    """This rank's part of the model, weights undefined; collective over pipelines if tied."""
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    scalar = architecture.head != "causal_lm"
    multiple = vocab_multiple(groups.tp.size())
    model = GPTModel(
        config,
        stage_spec(config, num_layers),
        vocab_size=-(-architecture.vocab_size // multiple) * multiple,
        max_sequence_length=architecture.max_positions,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied and not scalar,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        pg_collection=groups,
    )
    model.rotary_pos_emb.inv_freq = rotary_frequencies(architecture).to(
        model.rotary_pos_emb.inv_freq.device
    )
    if scalar and last:
        model.output_layer = ScalarHead(config, groups.tp)
    return model


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """(head_dim / 2,) float32: theta^(-2i/d), stretched for long contexts as the config says.

    linear: all divided by factor. llama3: those that turn less than low_freq_factor times within
    the original positions are divided, those that turn more than high_freq_factor times are kept,
    between them the two are mixed linearly.
    """
    places = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / architecture.rope_theta ** (places / architecture.head_dim)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _leave(tensor: Tensor) -> Tensor:
    """An initialisation that does nothing."""
    return tensor
