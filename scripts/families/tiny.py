"""Tiny random models of many families of transformers, to train and to generate with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 8}
EVERY_SECOND = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
    "gemma2": WINDOW | EVERY_SECOND | TIED | {"query_pre_attn_scalar": 16},
    "gemma3_text": WINDOW | EVERY_SECOND | TIED | {"query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "granite": {},
    "gemma": TIED,
    "glm": {},
    "glm4": {},
    "olmo3": WINDOW | EVERY_SECOND,
    "ministral3": {},
    "starcoder2": TIED,
    "seed_oss": {},
    "exaone4": {},
    "ernie4_5": {},
    "cohere2": TIED | WINDOW | EVERY_SECOND,
    "granitemoe": LOCAL_EXPERTS,
    "minimax_m2": LOCAL_EXPERTS | {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "dots1": ROUTED_EXPERTS,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "gpt_oss": LOCAL_EXPERTS | WINDOW | EVERY_SECOND,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "mixtral": LOCAL_EXPERTS,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": ROUTED_EXPERTS,
    "deepseek_v3": ROUTED_EXPERTS
    | {
        "num_attention_heads": 2,
        "head_dim": None,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
    },
    "qwen3_next": EXPERTS
    | DELTA_NET
    | LINEAR_FIRST
    | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3_5_text": DELTA_NET | LINEAR_FIRST,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "mamba_chunk_size": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "lfm2": TIED
    | {
        "layer_types": ["conv", "full_attention"],
        "conv_dim": 128,  # this and what follows is only for vLLM
        "block_dim": 128,
        "block_multiple_of": 32,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
    },
    "gpt2": TIED
    | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "num_key_value_heads": None},
}
"""model_type -> settings of its config in addition to `SIZES`; None: it has no such key."""


def save_tiny_model(
    family: str,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    sizes: Mapping[str, int] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random float32 model of a family, with weights that matter, and return the folder.

    tokenizer: a folder whose tokenizer, special tokens and number of words it gets; None: it has
    320 words. sizes: instead of those of `SIZES`. changes: to the settings of its config.
    """
    import transformers

    facts = {**SIZES, "vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    facts |= sizes or {}
    if tokenizer is not None:
        config_of_tokenizer = transformers.AutoConfig.from_pretrained(tokenizer)
        for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
            facts[name] = getattr(config_of_tokenizer, name)
    facts |= FAMILIES[family] | (changes or {})
    facts = {name: value for name, value in facts.items() if value is not None}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **facts)
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.1
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # some families leave experts at zero
        if parameter.ndim >= 2 and not parameter.detach().any():
            torch.nn.init.normal_(parameter, std=0.1)
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # the balance of DeepSeek's experts
            torch.nn.init.normal_(values, std=0.1)
    model.save_pretrained(folder)
    if tokenizer is not None:
        names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
        if (tokenizer / "chat_template.jinja").exists():
            names.append("chat_template.jinja")
        for name in names:
            shutil.copy(tokenizer / name, folder)
    return folder
