"""The surface of a generator: prompts in, responses out, weights replaced between calls.

`weights_version` is the trainer's version that was loaded last, NEVER before the first load.
Whoever generates compares it with the trainer's own (hybrid_engine.sync does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import lengths_of, ragged
from spmdflow.errors import ColumnError, ConfigError, WeightSyncError
from spmdflow.rollout.sampling import Sampling
from spmdflow.weights.move import Block

NEVER = -1
Fill = Callable[[Iterable[Block]], int]
"""Writes live blocks in place; the bytes that it received."""
WakePart = Literal["weights", "kv_cache"]


class Generator(Protocol):
    """One rank's part of a generation replica; the replica holds a full copy of the weights.

    All ranks of a replica make the same calls, with the same arguments, in the same order.
    """

    weights_version: int
    dtype: torch.dtype
    """Precision of the weights; the trainer's are rounded to it."""

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """Columns `responses` (ragged int64, the end token kept), `response_mask` (ragged bool,
        all True) and `rollout_log_probs` (ragged float32) for B rows, in the order of prompts.

        prompts: ragged int64 (B rows, each of at least one token); seeds: one per row, below
        2**63. A row's response depends on its prompt, its seed and the weights, never on the
        other rows. ConfigError if a prompt and max_new_tokens exceed the model's context.
        """

    def load(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> int:
        """Overwrite the weights by Hugging Face name with full tensors; returns their bytes.

        Each rank keeps the part that it reads.

        Takes the whole stream before it complains. WeightSyncError names tensors that are
        unknown, misshapen or were not in the stream.
        """

    def blocks(self) -> Iterable[Block]:
        """(Hugging Face name, live view, its box) of what this rank's forward reads.

        Whoever overwrites them calls `renew` afterwards.
        """

    def overwrite(self, fill: Fill, *, version: int) -> int:
        """Have `fill` write this rank's blocks, then `renew`; what fill returns.

        Freed weights are had again first. The generator counts as never synced until the end.
        """

    def renew(self, version: int) -> None:
        """The weights were overwritten in place, with that version; forget what rests on them."""

    def hashes(self) -> dict[str, int]:
        """positional_hash of every whole tensor that the replica reads, by Hugging Face name."""

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV cache until `wake`, or until load or generate need it.

        weights: free the weights too. The generator then counts as never synced.
        """

    def wake(self, part: WakePart | None = None) -> None:
        """Undo `sleep`, for one part or for all; freed weights are there but must be synced."""

    def close(self) -> None:
        """Free everything."""


def check_prompts(
    prompts: Tensor, sampling: Sampling, *, seeds: Sequence[int], max_positions: int
) -> None:
    """Refuse empty prompts, a wrong number of seeds and what would outgrow the context."""
    lengths = lengths_of(prompts)
    if len(seeds) != len(lengths):
        raise ColumnError(
            f"generate: got {len(seeds)} seeds for {len(lengths)} prompts; pass one seed per prompt"
        )
    if not len(lengths):
        return
    if int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise ColumnError(
            f"generate: prompt {row} got no tokens, expected at least 1; begin prompts with a "
            f"bos token"
        )
    longest = int(lengths.max())
    if longest + sampling.max_new_tokens > max_positions:
        raise ConfigError(
            f"generate: got a prompt of {longest} tokens and rollout.max_new_tokens="
            f"{sampling.max_new_tokens}, together {longest + sampling.max_new_tokens}; expected at "
            f"most the model's {max_positions} positions; lower rollout.max_new_tokens or "
            f"data.max_prompt_tokens"
        )


def response_columns(tokens: Tensor, log_probs: Tensor, lengths: Tensor) -> TensorDict:
    """The three columns from flat tokens and log-probs (sum of lengths,) in row order."""
    return TensorDict(
        {
            "responses": ragged(tokens, lengths),
            "response_mask": ragged(torch.ones_like(tokens, dtype=torch.bool), lengths),
            "rollout_log_probs": ragged(log_probs, lengths),
        },
        batch_size=[len(lengths)],
    )


class Arrivals:
    """Watches a stream of (name, full tensor) on its way into a generator's weights."""

    def __init__(self, expected: Mapping[str, torch.Size]) -> None:
        """expected: shape of every tensor that must arrive, by Hugging Face name."""
        self.num_bytes = 0
        self._missing, self._problems = dict(expected), list[str]()

    def fitting(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The expected ones; runs to the end of the stream, a collective, in any case."""
        for name, tensor in tensors:
            shape = self._missing.pop(name, None)
            if shape is None:
                self._problems.append(f"{name} is unknown or came twice")
            elif shape != tensor.shape:
                self._problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
            else:
                self.num_bytes += tensor.numel() * tensor.element_size()
                yield name, tensor

    def check(self, version: int) -> None:
        """WeightSyncError if anything was unknown, misshapen or did not come."""
        problems = self._problems + [f"{name} did not arrive" for name in self._missing]
        if problems:
            raise WeightSyncError(
                f"weights of version {version}: got {len(problems)} problems, {problems[:5]}; "
                f"expected every tensor of the generator's model once; give trainer and generator "
                f"the same model.path and make full_tensors() yield all the engine's parameters"
            )
