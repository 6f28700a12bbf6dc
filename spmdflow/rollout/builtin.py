"""The built-in generator: batched decoding with a KV cache, on a copy of the full weights.

Rows are sorted by prompt length and decoded `max_batch_size` at a time; a batch is left-padded,
finished rows leave it, and results return in the order of the prompts. Needs no engine beside
torch; the model's arithmetic is rollout.forward's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import box_sum, read_sums
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import lengths_of, mask_of, rows_of
from spmdflow.rollout.forward import causal_lm, end_tokens, forward_of
from spmdflow.rollout.generator import (
    NEVER,
    WakePart,
    check_prompts,
    response_columns,
    stop_strings_of,
)
from spmdflow.rollout.sampling import Sampling, draw
from spmdflow.weights.move import Block, Storages

_LEAVE_BELOW = 0.75
"""Share of unfinished rows below which the others leave: copying the cache costs steps too."""


class BuiltinGenerator:
    """Generator over a cached forward; see rollout.generator.Generator for the promises."""

    def __init__(self, cfg: RolloutConfig, model_path: str, device: torch.device) -> None:
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.precision)
        self._max_batch_size = cfg.max_batch_size
        module = causal_lm(model_path, dtype=self.dtype, device=device)
        self._forward = forward_of(module)
        self._device = device
        self._asleep: Storages | None = None
        self._end_tokens = torch.tensor(end_tokens(model_path), dtype=torch.int64, device=device)

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """Responses to B prompts; see Generator.generate."""
        self.wake()
        check_prompts(prompts, sampling, seeds=seeds, max_positions=self._forward.max_positions)
        rows, lengths = rows_of(prompts), lengths_of(prompts)
        tokens = torch.zeros(
            len(rows), sampling.max_new_tokens, dtype=torch.int64, device=self._device
        )
        log_probs = torch.zeros(tokens.shape, device=self._device)
        counts = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        order = lengths.argsort(descending=True, stable=True).tolist()
        for start in range(0, len(order), self._max_batch_size):
            batch = order[start : start + self._max_batch_size]
            streams = torch.tensor([seeds[row] for row in batch], device=self._device)
            answer = self._decode([rows[row] for row in batch], sampling, streams)
            tokens[batch], log_probs[batch], counts[batch] = answer
        written = mask_of(counts, sampling.max_new_tokens)
        return response_columns(tokens[written], log_probs[written], counts)

    @torch.inference_mode()
    def _decode(
        self, prompts: list[Tensor], sampling: Sampling, seeds: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (b, N), log-probs (b, N) and response lengths (b,) of one batch."""
        size, width = len(prompts), sampling.max_new_tokens
        tokens = torch.zeros(width, size, dtype=torch.int64, device=self._device)
        log_probs, counts = torch.zeros(width, size, device=self._device), torch.zeros_like(seeds)
        live = torch.arange(size, device=self._device)  # rows of the batch still in the forward
        unfinished = torch.ones_like(live, dtype=torch.bool)  # those of them without an end token
        stop = stop_strings_of(sampling)
        logits = self._start(prompts, width)
        for position in range(width):
            chosen, chosen_log_probs = draw(
                logits, sampling, seeds, torch.full_like(seeds, position)
            )
            tokens[position].index_copy_(0, live, chosen)
            log_probs[position].index_copy_(0, live, chosen_log_probs)
            counts.index_add_(0, live, unfinished.long())
            unfinished &= torch.isin(chosen, self._end_tokens, invert=True)
            if stop is not None:
                said = tokens[: position + 1, live].T.tolist()
                for place, row in enumerate(live.tolist()):
                    if unfinished[place] and stop.ends(prompts[row].tolist(), said[place]):
                        unfinished[place] = False
            num_unfinished = int(unfinished.sum())
            if num_unfinished == 0 or position + 1 == width:
                break
            if num_unfinished < _LEAVE_BELOW * len(live):
                self._forward.keep(unfinished.nonzero().squeeze(1))
                live, seeds, chosen = live[unfinished], seeds[unfinished], chosen[unfinished]
                unfinished = unfinished[unfinished]
            logits = self._forward.step(chosen)
        return tokens.T, log_probs.T, counts

    def _start(self, prompts: list[Tensor], max_new_tokens: int) -> Tensor:
        """Logits (b, V) after the prompts, left-padded to the longest."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=self._device)
        ids[mask_of(lengths, width).flip(1)] = torch.cat(prompts).to(self._device)
        return self._forward.start(ids, lengths, num_slots=width + max_new_tokens)

    def blocks(self) -> list[Block]:
        """Every tensor whole; see Generator.blocks."""
        self.wake("weights")
        weights = self._forward.weights.items()
        return [(name, tensor, Box.of_shape(tensor.shape)) for name, tensor in weights]

    def renew(self, version: int) -> None:
        """See Generator.renew; no cache outlives a batch."""
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Hashes of the tensors that the forward reads."""
        self.wake("weights")
        weights = self._forward.weights.items()
        return read_sums({name: box_sum(x, Box.of_shape(x.shape)) for name, x in weights})

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV cache, and the weights if asked."""
        self._forward.release()
        if weights and self._asleep is None:
            self._asleep = Storages(self._forward.weights.values())
            self._asleep.free()
            self.weights_version = NEVER

    def wake(self, part: WakePart | None = None) -> None:
        """Reallocate the weights; the next batch allocates its own cache."""
        if self._asleep is not None and part != "kv_cache":
            self._asleep.restore()
            self._asleep = None

    def close(self) -> None:
        """Free the KV cache; the weights go with the object."""
        self._forward.release()
