"""The vLLM generator: one engine in this process, on a copy of the full weights.

Takes vLLM's scheduler, paged KV cache and kernels; draws tokens with the same function as the
built-in generator, so the same seeds give the same responses but where logits differ in their
last bits. vLLM itself is touched in rollout.vllm_engine only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import rows_of
from spmdflow.rollout.generator import NEVER, Arrivals, check_prompts, response_columns
from spmdflow.rollout.hugging_face import end_tokens
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm_engine import Engine
from spmdflow.rollout.vllm_weights import hugging_face_views


class VllmGenerator:
    """Generator over a vLLM engine; see rollout.generator.Generator for the promises."""

    def __init__(self, cfg: RolloutConfig, model_path: str, device: torch.device) -> None:
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.dtype)
        self._device, self._awake = device, True
        self._end_tokens = end_tokens(model_path)
        self._engine = Engine(
            model_path,
            device,
            dtype=cfg.dtype,
            max_num_seqs=cfg.max_batch_size,
            kv_cache_memory_bytes=cfg.kv_cache_bytes,
        )
        self._weights = hugging_face_views(self._engine.model)

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """Responses to B prompts; see Generator.generate."""
        self.wake()
        check_prompts(prompts, sampling, seeds=seeds, max_positions=self._engine.max_positions)
        rows = [row.tolist() for row in rows_of(prompts)]
        answers = self._engine.generate(rows, sampling, seeds=seeds, end_tokens=self._end_tokens)
        lengths = torch.tensor([len(tokens) for tokens, _ in answers], dtype=torch.int64)
        flat = [token for tokens, _ in answers for token in tokens]
        flat_log_probs = [value for _, log_probs in answers for value in log_probs]
        return response_columns(
            torch.tensor(flat, dtype=torch.int64, device=self._device),
            torch.tensor(flat_log_probs, dtype=torch.float32, device=self._device),
            lengths.to(self._device),
        )

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> int:
        """Overwrite the weights; see Generator.load."""
        self.wake()
        arrivals = Arrivals({name: view.shape for name, view in self._weights.items()})
        self._engine.model.load_weights(arrivals.fitting(tensors))
        arrivals.check(version)
        self._engine.forget()
        self.weights_version = version
        return arrivals.num_bytes

    def hashes(self) -> dict[str, int]:
        """Hashes of the tensors that vLLM's layers read, fused ones apart, padding left out."""
        return {name: positional_hash(view, 0) for name, view in self._weights.items()}

    def sleep(self) -> None:
        """Free the KV cache."""
        if self._awake:
            self._engine.sleep()
        self._awake = False

    def wake(self) -> None:
        """Undo sleep."""
        if not self._awake:
            self._engine.wake()
        self._awake = True

    def close(self) -> None:
        """Free the engine; the process can build another."""
        self._weights.clear()
        self._engine.close()
