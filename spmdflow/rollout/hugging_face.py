"""The seam to transformers: a causal LM from a folder, and its cached forward for any family.

transformers is imported late and only here. `HuggingFaceForward` has the surface of
`rollout.llama.LlamaForward`; it serves the families that one does not cover.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def causal_lm(path: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers module of a folder (config.json, *.safetensors), in eval mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar per rank and model would bury the run's own lines
    module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return module.to(device).eval().requires_grad_(False)


def end_tokens(path: str) -> tuple[int, ...]:
    """Token ids that end a response: generation_config.json's, else config.json's; may be none."""
    from transformers import AutoConfig, GenerationConfig

    found = AutoConfig.from_pretrained(path, local_files_only=True).eos_token_id
    if (Path(path) / "generation_config.json").exists():
        chosen = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        found = found if chosen is None else chosen
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


class HuggingFaceForward:
    """A transformers module, its KV cache and the two passes that generation needs."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.weights: dict[str, Tensor] = {n: p.detach() for n, p in module.named_parameters()}
        """Every parameter by name; tied ones once."""
        self.max_positions: int = module.config.max_position_embeddings

    def start(self, ids: Tensor, lengths: Tensor, *, num_slots: int) -> Tensor:
        """Logits (B, V) after the prompts; ids (B, P) left-padded, lengths (B,)."""
        from transformers import DynamicCache

        slots = torch.arange(ids.shape[1], device=ids.device)
        starts = (ids.shape[1] - lengths)[:, None]
        self._cache = DynamicCache(config=self._module.config)
        self._mask = (slots >= starts).long()
        self._positions = lengths
        return self._forward(ids, (slots - starts).clamp_(min=0))

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) of every row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        logits = self._forward(tokens[:, None], self._positions[:, None])
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only; rows (b,) int64 ascending."""
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def release(self) -> None:
        """Free the KV cache."""
        self._cache = None

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._module(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
