"""Chat templates of model families, from installed packages, with small tokenizers for them.

One byte-level BPE is trained, and each family's special tokens are added to it. SmolLM2 has its own
tokenizer, if its folder is there. A template without an installed source is skipped.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spmdflow.datasets.tokenizer import load_tokenizer
from tests.smollm2 import IS_HERE, REASON, SMOLLM2


class Family(NamedTuple):
    """What is known of a family's chats."""

    template: str
    """Name of the file in TRL's package; mistral: written by mistral_common; smollm2: its own."""
    special: tuple[str, ...]
    """Special tokens; the first is bos, the last ends a turn."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    end: str = ""
    """What the template writes behind an answer; "": the last special token."""
    has_system: bool = True
    has_tools: bool = True
    rewrites: tuple[str, ...] = ()
    """Chats (by name) whose earlier turns it writes differently once others follow."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
FAMILIES = {
    "qwen2.5": Family("qwen2_5", _CHATML, _CALLS, end="<|im_end|>\n"),
    "qwen3": Family(
        "qwen3",
        _CHATML,
        (*_CALLS, "<think>", "</think>"),
        end="<|im_end|>\n",
        rewrites=("three turns", "system", "tools"),
    ),
    "llama3": Family("llama3", _LLAMA, has_tools=False),
    "llama3.2": Family("llama3_2", _LLAMA),
    "mistral": Family("mistral", _MISTRAL, rewrites=("system",)),
    "gemma": Family("gemma", _GEMMA, end="<end_of_turn>\n", has_system=False, has_tools=False),
    "gemma3": Family("gemma3", _GEMMA, end="<end_of_turn>\n", has_tools=False),
    "smollm2": Family("smollm2", _CHATML, end="<|im_end|>\n", has_tools=False),
}


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer with the family's special tokens and template; skips without a source."""
    family = FAMILIES[name]
    if name == "smollm2":
        if not IS_HERE:
            pytest.skip(REASON)
        return load_tokenizer(str(SMOLLM2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_bpe()),
        bos_token=family.special[0],
        eos_token=family.special[-1],
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special[1:-1])})
    tokenizer.add_tokens(list(family.plain))
    tokenizer.chat_template = template_of(family.template)
    return tokenizer


@cache
def byte_level_bpe() -> str:
    """A small byte-level tokenizer as JSON, without special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["the user asks the system, and the assistant answers it"] * 3, trainer)
    return str(bpe.to_str())


@cache
def template_of(name: str) -> str:
    """A template by the name of TRL's file, or mistral; skips without its package."""
    if name == "mistral":
        return mistral_template()
    trl = find_spec("trl")  # its package is not imported
    if trl is None or trl.origin is None:
        pytest.skip("trl, whose chat templates are tested, is not installed")
    return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def mistral_template() -> str:
    """What mistral_common writes for its tokenizers of version 3."""
    if find_spec("mistral_common") is None:
        pytest.skip("mistral_common, which writes Mistral's chat templates, is not installed")
    templates = importlib.import_module("mistral_common.integrations.chat_templates.chat_templates")
    base = importlib.import_module("mistral_common.tokens.tokenizers.base")
    written = templates.generate_chat_template(
        spm=False,
        tokenizer_version=base.TokenizerVersion.v3,
        image_support=False,
        audio_support=False,
        thinking_support=False,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )
    return str(written)
