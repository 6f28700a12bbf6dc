"""A tiny model with a vocabulary of bytes, and a chat template from an installed package."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.unit.datasets.families import byte_level_bpe, template_of

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
MOST_TOKENS = 32768


def make_model(folder: Path, template: str = "qwen3") -> Path:
    """Writes the model and its tokenizer; template: name of a file of TRL. Skips without TRL."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_bpe()),
        bos_token=_SPECIAL[0],
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        additional_special_tokens=_SPECIAL[1:2],
        model_max_length=MOST_TOKENS,
    )
    tokenizer.add_tokens(_ADDED)
    tokenizer.chat_template = template_of(template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MOST_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
