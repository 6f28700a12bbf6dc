"""Builds a Megatron-Core GPT model for an `Architecture` and one rank of a layout, without weights.

Some of its settings follow from how the engine runs: no dropout, sums instead of means over
micro-batches and dp (`calculate_per_token_loss`), and variable lengths between stages, so that
micro-batches may differ in rows and length. The layers are TransformerEngine's where it can run,
otherwise Megatron's local ones with the norm, the attention and the scalar head of
`megatron_layers`.

Parameters have the names of Megatron's local layers. TransformerEngine fuses a norm into the linear
layer that follows it and names it differently; `local_name` translates.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Sequence
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from spmdflow.weights.architecture import Architecture, Mixture
from spmdflow.weights.ranks import default_vocab_multiple
from spmdflow.weights.table import stage_layers
from spmdflow.workers.megatron_experts import ExpertRouter, StageRouters, count_exchanges
from spmdflow.workers.megatron_layers import (
    CausalAttention,
    GroupedSelfAttention,
    PackedRotary,
    RMSNorm,
    ScalarHead,
    TEPackedAttention,
    use_onednn_products,
)

_GROUPED_EXPERT = re.compile(r"(.*mlp\.experts)\.(linear_fc[12])\.weight(\d+)")
"""TransformerEngine's name of an expert's matrix."""
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
    divides_rows: bool,
    has_adapters: bool = False,
) -> GPTModel:
    """Build one of this rank's parts of the model, with undefined weights.

    On pipeline stage s of p, part k is virtual stage k * p + s of p * num_parts (`weights.ranks`).
    The first has the embedding, the last the head. options: engine.options. The vocabulary is
    padded to a multiple that tp divides. The last part returns hidden states instead of logits.
    divides_rows: ranks divide the tokens of rows, so attention is this project's, and the rotary
    embedding takes positions. has_adapters: the layers are Megatron's local ones on every device,
    because TransformerEngine's fuse a norm into the linear layer, whose input an adapter needs.
    With tied embeddings all ranks of a pipeline call it together.
    """
    tp_size = groups.tp.size()
    pp_size = groups.pp.size()
    pp_rank = groups.pp.rank()
    stage = part * pp_size + pp_rank
    num_stages = pp_size * num_parts
    num_layers = len(stage_layers(architecture.num_layers, pp_size=num_stages, pp_rank=stage))
    uses_te = HAVE_TE and torch.cuda.is_available() and not has_adapters
    config = _transformer_config(
        architecture,
        num_layers * num_parts,
        dtype,
        options,
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=groups.ep.size(),
        num_parts=num_parts,
        uses_te=uses_te,
    )
    if divides_rows:
        config.apply_rope_fusion = False
    last = stage == num_stages - 1
    scalar = architecture.head != "causal_lm"
    multiple = default_vocab_multiple(tp_size)
    model = GPTModel(
        config,
        _stage_spec(config, num_layers, own_attention=divides_rows, uses_te=uses_te),
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
    if inv_freq.is_cpu:
        use_onednn_products(model)
    if last:
        if scalar:
            model.output_layer = ScalarHead(config)
        model.output_layer.forward = functools.partial(
            _hidden_of_head, config=config, group=groups.tp
        )
    return model


def leave_padding_untrained(
    model: GPTModel, padding_token: int, group: torch.distributed.ProcessGroup
) -> None:
    """Stop the gradient of the embedding at a token, as transformers does for its padding token.

    So the engines agree on rows in which that token is part of the text, such as the end of a turn.
    group: the tp group. Does nothing on later stages of a pipeline.
    """
    if not model.pre_process:
        return
    embed = model.embedding.forward

    def forward(input_ids: Tensor, position_ids: Tensor, **rest: Any) -> Tensor:
        embedded: Tensor = embed(input_ids, position_ids, **rest)  # (T or T/t, b, H)
        is_padding = (input_ids == padding_token).T
        if model.config.sequence_parallel:
            is_padding = is_padding.chunk(group.size())[group.rank()]
        return torch.where(is_padding[..., None], embedded.detach(), embedded).contiguous()

    model.embedding.forward = forward


def _hidden_of_head(
    hidden: Tensor,
    *,
    config: TransformerConfig,
    group: torch.distributed.ProcessGroup,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the hidden states (T, b, H) instead of logits: heads run later, where they are needed.

    Under sequence parallelism they are (T/t, b, H), and gathered over the tp group first. All ranks
    of the group return the same gradient for these hidden states.
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
    ep_size: int,
    num_parts: int,
    uses_te: bool,
) -> TransformerConfig:
    """Return Megatron's settings of one stage with num_layers decoder layers in all its parts."""
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
        sequence_parallel=divides_sequence(architecture, options, tp_size),
        variable_seq_lengths=pp_size > 1,
        moe_token_dispatcher_type="alltoall",  # checked with the line above, also without experts
        **_expert_settings(architecture.mixture, tp_size=tp_size, ep_size=ep_size),
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
        **fusions(options, on_cuda=uses_te),
    )


def divides_sequence(architecture: Architecture, options: Collection[str], tp_size: int) -> bool:
    """Whether tensor-parallel ranks divide the sequence too: by the option, or for experts.

    Each of them then sends its own part of the tokens to the experts; Megatron refuses to train
    experts without it.
    """
    return tp_size > 1 and ("sequence_parallel" in options or architecture.mixture is not None)


def _expert_settings(mixture: Mixture | None, *, tp_size: int, ep_size: int) -> dict[str, Any]:
    """Megatron's settings of experts; {} for a dense model.

    No expert has a capacity, so no token is dropped. The auxiliary loss is ours
    (`objectives.balance`).
    """
    if mixture is None:
        return {}
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_router_topk": mixture.num_chosen,
        "moe_router_pre_softmax": not mixture.renormalises,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_ffn_hidden_size": mixture.expert_size,
        "moe_grouped_gemm": HAVE_TE and torch.cuda.is_available(),
        "expert_model_parallel_size": ep_size,
        "expert_tensor_parallel_size": tp_size,
    }


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
    """Return the rotary frequencies theta^(-2i/d), (head_dim / 2,) float32.

    They are scaled for long contexts according to the config. linear: all are divided by factor.
    llama3: those with fewer than low_freq_factor turns within the original positions are divided,
    those with more than high_freq_factor turns are unchanged, and those in between are interpolated
    linearly.
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


def _stage_spec(
    config: TransformerConfig, num_layers: int, *, own_attention: bool, uses_te: bool
) -> TransformerBlockSubmodules:
    """Return Megatron's description of num_layers decoder layers and a final norm.

    uses_te: they are TransformerEngine's layers, otherwise Megatron's local ones with `RMSNorm`.
    own_attention: `CausalAttention` in both.
    """
    qk_norm = config.qk_layernorm
    has_experts = config.num_moe_experts is not None
    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if uses_te:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm, **experts)
        layer.submodules.self_attention.module = GroupedSelfAttention
        core_attention = CausalAttention if own_attention else TEPackedAttention
        layer.submodules.self_attention.submodules.core_attention = core_attention
        if has_experts:
            _submodules_of(layer.submodules.mlp).router = ExpertRouter
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm", **experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if has_experts:
        _submodules_of(layer.submodules.mlp).router = ExpertRouter
    attention: ModuleSpec = layer.submodules.self_attention
    attention.module = GroupedSelfAttention
    attention.submodules.core_attention = CausalAttention
    if qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def _submodules_of(described: ModuleSpec | functools.partial[Any]) -> Any:
    """Return the parts in Megatron's description of a module; from 0.19 on it is a partial call."""
    if isinstance(described, functools.partial):
        return described.keywords["submodules"]
    return described.submodules


def routers_of(
    parts: Sequence[GPTModel], architecture: Architecture, groups: ProcessGroupCollection
) -> StageRouters | None:
    """Return the routers of all of a rank's parts of the model; None for a dense model."""
    if architecture.mixture is None:
        return None
    pp_size = groups.pp.size()
    num_stages = pp_size * len(parts)
    routers = {}
    dispatchers = []
    for number, part in enumerate(parts):
        stage = number * pp_size + groups.pp.rank()
        layers = stage_layers(architecture.num_layers, pp_size=num_stages, pp_rank=stage)
        for layer, module in zip(layers, part.decoder.layers, strict=True):
            routers[layer] = module.mlp.router
            dispatchers.append(module.mlp.token_dispatcher)
    divides = parts[0].config.sequence_parallel
    result = StageRouters(
        routers,
        num_layers=architecture.num_layers,
        device=next(parts[0].parameters()).device,
        part=groups.tp.rank() if divides else 0,
        num_parts=groups.tp.size() if divides else 1,
    )
    if parts[0].config.expert_model_parallel_size > 1:
        for dispatcher in dispatchers:
            count_exchanges(dispatcher, result.traffic)
    return result


def local_name(name: str) -> str:
    """Return a parameter's name in a model of local layers.

    Removes leading "module." prefixes of wrappers, and replaces TransformerEngine's names of norms
    that it fuses into a linear layer, and of experts that it groups.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    grouped = _GROUPED_EXPERT.fullmatch(name)
    if grouped is not None:
        layer, linear, expert = grouped.groups()
        return f"{layer}.local_experts.{expert}.{linear}.weight"
    return name
