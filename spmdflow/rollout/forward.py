"""The forwards of the built-in generator: a causal LM with a KV cache, rows coming and going.

`LlamaForward` (rollout.llama) covers the Llama, Mistral, Qwen2 and Qwen3 families;
`HuggingFaceForward` runs every other one, and takes new rows only when the others have left.

transformers is imported late and, of the rollout package, only here. Knows no sampling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spmdflow.rollout.llama import LlamaForward, covers
from spmdflow.weights.folder import attention_of


class CachedForward(Protocol):
    """Rows of a KV cache, the parked ones first, and the passes that generation needs."""

    weights: dict[str, Tensor]
    """Every tensor that the forward reads, by Hugging Face name; tied ones once."""
    max_positions: int
    refills: bool
    """Whether rows can join others that are under way, and be parked."""

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for `rows` rows with `slots` tokens each after the prompt; keep the content."""

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """Logits (n, V) after the prompts of n new rows, which come behind those there are.

        prompts: different ones, on the host; source: which one each new row begins with.
        """

    def extend(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """Logits (B, V) after more tokens of B rows, from these positions on; later ones are lost.

        rows: their numbers, of rows not parked; more: on the host, each of at least one token.
        """

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """Logits (n, V) after one more token (n,) of every row not parked, at its position (n,).

        span: at least the tokens that any row has after its prompt, this one included.
        """

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """Go on with these rows only, in this order; the first ones are parked: they only keep
        their keys and values."""

    def release(self) -> None:
        """Free the KV cache."""


def forward_of(
    path: str, *, dtype: torch.dtype, device: torch.device, empty: bool
) -> CachedForward:
    """The fastest forward for the model of a folder.

    empty: its weights may be zeros, as a sync or `take_folder_weights` fills them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if not covers(module):
        return HuggingFaceForward(causal_lm(path, dtype=dtype, device=device))
    if not empty:
        module = causal_lm(path, dtype=dtype, device=device)
    return LlamaForward(module, device)


def causal_lm(path: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers module of a folder (config.json, *.safetensors), in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar per rank and model would bury the run's own lines
    attention = attention_of(
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, trust_remote_code=False, **attention
    )
    return module.to(device).eval().requires_grad_(False)


def end_tokens(path: str) -> tuple[int, ...]:
    """Token ids that end a response: generation_config.json's, else config.json's; may be none."""
    from transformers import AutoConfig, GenerationConfig

    found = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    ).eos_token_id
    if (Path(path) / "generation_config.json").exists():
        chosen = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        found = found if chosen is None else chosen
    if found is None:
        return ()
    if isinstance(found, list | tuple):
        return tuple(found)
    return (int(found),)


def vocab_size(path: str) -> int:
    """Rows of the embedding, as config.json says: token ids of the model are below."""
    from transformers import AutoConfig

    cfg = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return int(cfg.get_text_config().vocab_size)


class HuggingFaceForward:
    """Any family: transformers' own module and cache."""

    refills = False

    def __init__(self, module: Any) -> None:
        self._module = module
        self._cache: Any = None
        self.weights: dict[str, Tensor] = {n: p.detach() for n, p in module.named_parameters()}
        self.max_positions: int = module.config.max_position_embeddings

    def reserve(self, rows: int, slots: int) -> None:
        """The cache grows by itself."""

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """See CachedForward; left-padded, because sliding windows count cache slots."""
        from transformers import DynamicCache

        ones = [torch.ones_like(prompt) for prompt in prompts]
        ids, self._mask = (
            pad_sequence(rows, batch_first=True, padding_side="left").to(self._module.device)
            for rows in (prompts, ones)
        )
        self._cache = DynamicCache(config=self._module.config)
        logits = self._forward(ids, (self._mask.cumsum(1) - 1).clamp_(min=0))
        self.keep(source)
        return logits[source]

    def extend(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """See CachedForward; never asked for, as no row is parked."""
        raise NotImplementedError(rows)

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """See CachedForward."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        return self._forward(tokens[:, None], positions[:, None])

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """See CachedForward; no row is parked, as none could join the others again."""
        assert not num_parked, num_parked
        chosen = torch.tensor(rows, dtype=torch.int64, device=self._mask.device)
        self._cache.batch_select_indices(chosen)
        self._mask = self._mask[chosen]

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
        logits: Tensor = output.logits[:, -1]
        return logits
