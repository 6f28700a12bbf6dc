"""The vLLM generator: one engine in each process, the weights cut over the generation replica.

Takes vLLM's scheduler, paged KV cache and kernels; draws tokens with the same function as the
built-in generator, so the same seeds give the same responses but where logits differ in their
last bits. vLLM itself is touched in the files rollout.vllm_* only.

All ranks of a replica make the same calls with the same rows, and get the same tokens; both are
checked by hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import rows_of
from spmdflow.errors import WeightSyncError
from spmdflow.rollout.forward import end_tokens
from spmdflow.rollout.generator import NEVER, WakePart, check_prompts, response_columns
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm_blocks import Shards, block_reading, install
from spmdflow.rollout.vllm_engine import Engine
from spmdflow.rollout.vllm_weights import stock_reading
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block


class VllmGenerator:
    """Generator over a vLLM engine; see rollout.generator.Generator for the promises."""

    def __init__(
        self, cfg: RolloutConfig, model_path: str, device: torch.device, replica: Replica
    ) -> None:
        """All ranks of the replica build it together."""
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.dtype)
        self._device, self._replica, self._model_path = device, replica, model_path
        self._asleep: set[str] = set()
        self._end_tokens = end_tokens(model_path)
        eager = {"enforce_eager": True} if cfg.weights in ("blocks", "flat") else {}
        self._engine = Engine(
            model_path,
            device,
            replica,
            dtype=cfg.dtype,
            max_num_seqs=cfg.max_batch_size,
            kv_cache_memory_bytes=cfg.kv_cache_bytes,
            **eager,
        )
        self._reading = stock_reading(self._engine.model, model_path, replica)
        self._shared = False

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """Responses to B prompts; see Generator.generate."""
        self.wake()
        check_prompts(prompts, sampling, seeds=seeds, max_positions=self._engine.max_positions)
        rows = [row.tolist() for row in rows_of(prompts)]
        self._check_equal("prompts, seeds or settings", (rows, list(seeds), sampling))
        answers = self._engine.generate(rows, sampling, seeds=seeds, end_tokens=self._end_tokens)
        self._check_equal("tokens", [tokens for tokens, _ in answers])
        lengths = torch.tensor([len(tokens) for tokens, _ in answers], dtype=torch.int64)
        flat = [token for tokens, _ in answers for token in tokens]
        flat_log_probs = [value for _, log_probs in answers for value in log_probs]
        return response_columns(
            torch.tensor(flat, dtype=torch.int64, device=self._device),
            torch.tensor(flat_log_probs, dtype=torch.float32, device=self._device),
            lengths.to(self._device),
        )

    def share(self, shards: Shards, *, tp_size: int, vocab_multiple: int) -> None:
        """Read the trainer's shards from now on; vLLM's own weights are freed for good.

        shards: see rollout.vllm_blocks. tp_size, vocab_multiple: the trainer's. The generator
        counts as never synced until `shared`. ConfigError if the shards cannot stand in.
        """
        arch = Architecture.from_folder(self._model_path)
        self._reading = block_reading(
            arch, shards, self._replica, tp_size=tp_size, vocab_multiple=vocab_multiple
        )
        install(self._engine.model, arch, shards, self._replica, self._joined)
        self._engine.trim()
        self.weights_version, self._shared = NEVER, True

    def shared(self, version: int) -> None:
        """The shards now hold the trainer's weights of that version."""
        assert self._shared, "share() comes first"
        self.renew(version)

    def blocks(self) -> Sequence[Block]:
        """This rank's views of vLLM's parameters; see Generator.blocks."""
        self.wake("weights")
        return self._reading.blocks

    def renew(self, version: int) -> None:
        """See Generator.renew: cached prefixes are forgotten."""
        if "kv_cache" not in self._asleep:  # a cache that wakes is empty
            self._engine.forget()
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Hashes of the whole tensors that the replica's layers read, padding left out.

        WeightSyncError if ranks that hold the same part differ.
        """
        self.wake("weights")
        try:
            return self._reading.hashes(self._replica, self._device)
        except WeightSyncError:
            self.weights_version = NEVER
            raise

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV cache, and the weights if asked (never those that are shared)."""
        weights = weights and not self._shared
        parts = {"kv_cache", "weights"} if weights else {"kv_cache"}
        if parts <= self._asleep:
            return
        self.wake()  # vLLM puts to sleep what is awake
        self._asleep = self._engine.sleep(weights=weights)
        if weights:
            self.weights_version = NEVER

    def wake(self, part: WakePart | None = None) -> None:
        """Undo sleep."""
        for each in ("weights", "kv_cache"):
            if each in self._asleep and part in (None, each):
                self._asleep.remove(each)
                self._engine.wake(each)

    def close(self) -> None:
        """Free the engine; the process can build another."""
        del self._reading
        self._engine.close()

    def _joined(self, columns: Tensor) -> Tensor:
        """The last dimension over the tensor-parallel group."""
        parts = [torch.empty_like(columns) for _ in self._replica.tp_ranks]
        backend = "nccl" if columns.is_cuda else "gloo"
        group = self._replica.group(self._replica.tp_ranks, backend)
        dist.all_gather(parts, columns, group=group)
        return torch.cat(parts, -1)

    def _check_equal(self, what: str, facts: object) -> None:
        if self._replica.size == 1:
            return
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big", signed=True)
        self._replica.check_equal(what, torch.tensor([number], device=self._device))
