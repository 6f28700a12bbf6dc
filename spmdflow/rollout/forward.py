"""The forwards of the built-in generator: a causal LM with a KV cache, rows coming and going.

`LlamaForward` (cpu.llama) covers the Llama, Mistral, Qwen2 and Qwen3 families;
`HuggingFaceForward` runs every other family, and takes new rows only when it has no others.

Of the rollout package, only this file imports transformers, inside its functions. It does not know
sampling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spmdflow.cpu.llama import LlamaForward, covers
from spmdflow.weights.folder import attention_of


class CachedForward(Protocol):
    """Rows of a KV cache, parked ones first, and the forward passes that generation needs."""

    weights: dict[str, Tensor]
    """Every tensor that the forward reads, by Hugging Face name. Tied tensors appear once."""
    max_positions: int
    refills: bool
    """Whether new rows can join rows that are being decoded, and rows can be parked."""

    def reserve(self, rows: int, slots: int) -> None:
        """Makes room for `rows` rows with `slots` tokens each after the prompt. Keeps the
        content."""

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """Logits (n, V) after the prompts of n new rows, which are appended to the cache.

        prompts: distinct prompts, on the host. source: index of each new row's prompt.
        """

    def extend(self, rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        """Logits (B, V) after more tokens of B rows. Cache entries from `starts` on are
        overwritten.

        rows: cache rows that are not parked. more: tokens of each row, at least one, on the host.
        starts: position of each row's first new token.
        """

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """Logits (n, V) after one more token (n,) of every row that is not parked.

        positions (n,): of these tokens. span: upper bound of the tokens that any row has after its
        prompt, including this one.
        """

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """Keeps only these rows, in this order. The first `num_parked` of them only keep their keys
        and values; they are not decoded."""

    def release(self) -> None:
        """Free the KV cache."""

    def renew(self) -> None:
        """Forget what was computed from the weights, because they have changed."""


def forward_of(
    path: str, *, dtype: torch.dtype, device: torch.device, empty: bool
) -> CachedForward:
    """Returns a LlamaForward if it covers the folder's model, otherwise a HuggingFaceForward.

    empty: a LlamaForward may start with zeros as weights, because a sync or `take_folder_weights`
    fills them. A HuggingFaceForward always reads the folder. Only local files are read, and no code
    of the folder is run.
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
    """Returns a folder's transformers model on `device`, in evaluation mode, without gradients.

    The folder has config.json and *.safetensors; no code of the folder is run. Also turns off the
    progress bars of transformers in this process.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar per rank and model would hide the run's log lines
    attention = attention_of(
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, trust_remote_code=False, **attention
    )
    return module.to(device).eval().requires_grad_(False)


def end_tokens(path: str) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a response; () if there are none.

    These are eos_token_id of generation_config.json, or of config.json if the former is missing or
    has none.
    """
    from transformers import AutoConfig, GenerationConfig

    end_ids = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    ).eos_token_id
    if (Path(path) / "generation_config.json").exists():
        override = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        end_ids = end_ids if override is None else override
    if end_ids is None:
        return ()
    if isinstance(end_ids, list | tuple):
        return tuple(end_ids)
    return (int(end_ids),)


def vocab_size(path: str) -> int:
    """Number of rows of the embedding according to config.json. Token ids are smaller."""
    from transformers import AutoConfig

    cfg = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return int(cfg.get_text_config().vocab_size)


class HuggingFaceForward:
    """Forward of any model family, with transformers' own module and cache."""

    refills = False

    def __init__(self, module: Any) -> None:
        """module: a transformers causal LM in evaluation mode."""
        self._module = module
        self._cache: Any = None
        self.weights: dict[str, Tensor] = {n: p.detach() for n, p in module.named_parameters()}
        self.max_positions: int = module.config.max_position_embeddings

    def reserve(self, rows: int, slots: int) -> None:
        """Does nothing, because the cache grows on its own."""

    def prefill(self, prompts: list[Tensor], source: list[int]) -> Tensor:
        """Starts a new KV cache with n rows, and returns the logits (n, V) after their prompts.

        prompts: distinct prompts, on the host. source: index of each row's prompt. Prompts are
        padded on the left, because sliding windows count cache slots.
        """
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
        """See CachedForward.extend. Never called, because no row is parked."""
        raise NotImplementedError(rows)

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """See CachedForward.step."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        return self._forward(tokens[:, None], positions[:, None])

    def keep(self, rows: list[int], num_parked: int = 0) -> None:
        """Keeps only these rows of the cache and of the attention mask, in this order.

        AssertionError unless num_parked is 0: rows cannot be parked, because they could not join
        the others again.
        """
        assert not num_parked, num_parked
        selection = torch.tensor(rows, dtype=torch.int64, device=self._mask.device)
        self._cache.batch_select_indices(selection)
        self._mask = self._mask[selection]

    def release(self) -> None:
        """Free the KV cache."""
        self._cache = None

    def renew(self) -> None:
        """Does nothing, because only the KV cache is computed from the weights."""

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
