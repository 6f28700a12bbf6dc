# plain_generator.py
"""A generator of a user: transformers without a KV cache, every token a pass over the whole row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow import GeneratorKind, RolloutConfig, lengths_of, register_generator, rows_of
from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.data.ragged import mask_of
from spmdflow.rollout.forward import causal_lm, end_tokens
from spmdflow.rollout.generator import NEVER, WakePart, check_prompts, response_columns
from spmdflow.rollout.sampling import Sampling, draw
from spmdflow.weights.move import Block


@register_generator(GeneratorKind("plain", "transformers without a KV cache"))
class PlainGenerator:
    """Whole weights on every rank; rows are padded on the right."""

    def __init__(self, cfg: RolloutConfig, model_path: str, device: torch.device) -> None:
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.precision)
        self.module = causal_lm(model_path, dtype=self.dtype, device=device)
        self.ends = torch.tensor(end_tokens(model_path), device=device)

    @torch.inference_mode()
    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """One token of every row at a time, until all rows have ended."""
        check_prompts(
            prompts,
            sampling,
            seeds=seeds,
            max_positions=self.module.config.max_position_embeddings,
        )
        rows = rows_of(prompts)
        lengths = lengths_of(prompts)
        count = len(rows)
        width = sampling.max_new_tokens
        ids = torch.zeros(count, int(lengths.max()) + width, dtype=torch.int64)
        ids[mask_of(lengths, ids.shape[1])] = torch.cat(rows)
        made = torch.zeros(count, width, dtype=torch.int64)
        log_probs = torch.zeros(count, width)
        counts = torch.zeros_like(lengths)
        running = torch.ones(count, dtype=torch.bool)
        streams = torch.tensor(seeds)
        places = torch.arange(count)
        for position in range(width):
            logits = self.module(input_ids=ids, use_cache=False).logits
            last = logits[places, lengths + position - 1].float()
            made[:, position], log_probs[:, position] = draw(
                last, sampling, streams, torch.full_like(streams, position)
            )
            ids[places, lengths + position] = made[:, position]
            counts += running
            running &= torch.isin(made[:, position], self.ends, invert=True)
            if not running.any():
                break
        written = mask_of(counts, width)
        return response_columns(made[written], log_probs[written], counts)

    def blocks(self) -> list[Block]:
        """Every tensor whole; tied ones once."""
        return [
            (name, weight.detach(), Box.of_shape(weight.shape))
            for name, weight in self.module.named_parameters()
        ]

    def renew(self, version: int) -> None:
        """Nothing is kept that rests on the old weights."""
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Of the tensors that the forward reads."""
        return {name: positional_hash(tensor) for name, tensor, _ in self.blocks()}

    def sleep(self, *, weights: bool = False) -> None:
        """There is no cache to free, and the weights stay."""

    def wake(self, part: WakePart | None = None) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """The weights go with the object."""
