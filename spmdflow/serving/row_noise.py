"""Row noise in a vLLM server: tokens drawn as in process, from the seed and position of the row.

A request that carries `ROW` in its extra_args (`row_facts`) is drawn by `rollout.sampling.draw`.
So its tokens do not depend on the server or on the other rows of the batch, but for near ties.
Other requests keep vLLM's sampler. `install` replaces the sampler of each model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from spmdflow.rollout.generator import Request
from spmdflow.rollout.sampling import Sampling, draw
from spmdflow.rollout.vllm_engine import install_plain_layers

ROW = "spmdflow"
"""Key of the row's facts in the extra_args of a request."""
_SAMPLING = ("temperature", "top_p", "top_k", "greedy", "policy_temperature")


def row_facts(request: Request) -> dict[str, Any]:
    """Return the plain data from which a server draws the tokens of a request."""
    facts: dict[str, Any] = {"seed": request.seed, "num_drawn": request.num_drawn}
    facts["prompt_tokens"] = len(request.prompt)
    for name in _SAMPLING:
        facts[name] = getattr(request.sampling, name)
    return facts


@dataclass(frozen=True)
class _DrawnRow:
    """A row of a batch that is drawn here."""

    index: int
    """Its index in the batch."""
    seed: int
    prompt_tokens: int
    num_drawn: int
    sampling: Sampling

    @classmethod
    def of(cls, index: int, facts: Mapping[str, Any]) -> _DrawnRow:
        """The row with these facts; see `row_facts`."""
        choices = {name: facts[name] for name in _SAMPLING}
        return cls(
            index=index,
            seed=facts["seed"],
            prompt_tokens=facts["prompt_tokens"],
            num_drawn=facts["num_drawn"],
            sampling=Sampling(max_new_tokens=1, **choices),
        )


class RowNoiseSampler(nn.Module):
    """Replaces the sampler of vLLM's model runner."""

    def __init__(self, runner: Any) -> None:
        """runner: the model runner, whose model is loaded."""
        super().__init__()
        self._runner = runner
        self._stock = runner.sampler
        self._names = list[str]()
        self._groups = list[tuple[Sampling, Tensor, Tensor]]()
        """Of rows with equal sampling: their indices (n,), and their facts (3, n): seed, prompt
        tokens, tokens drawn before."""
        self._num_drawn_here = 0
        outputs = import_module("vllm.v1.outputs")
        self._output = outputs.SamplerOutput
        self._logprobs = outputs.LogprobsTensors
        processor = import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
        for module in runner.model.modules():
            if isinstance(module, processor):
                module.use_all_gather = True  # each rank draws, from the whole vocabulary's logits

    def __getattr__(self, name: str) -> Any:
        """An attribute of vLLM's sampler, if this module does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_stock"), name)

    def forward(self, logits: Tensor, sampling_metadata: Any, **arguments: Any) -> Any:
        """Return vLLM's SamplerOutput for logits (B, V), in the row order of the runner's batch.

        arguments: those of later vLLM versions, for its own sampler.
        """
        names = self._runner.input_batch.req_ids
        if names != self._names:
            self._arrange(list(names))
        if not self._groups:
            return self._stock(logits=logits, sampling_metadata=sampling_metadata, **arguments)
        stock = None
        if self._num_drawn_here < len(names):
            stock = self._stock(
                logits=logits.clone(), sampling_metadata=sampling_metadata, **arguments
            )
        tokens = torch.zeros(len(names), dtype=torch.int64, device=logits.device)
        log_probs = torch.zeros(len(names), device=logits.device)
        lengths = self._runner.seq_lens
        positions = getattr(lengths, "gpu", lengths)[: len(names)].long()
        for sampling, rows, facts in self._groups:
            seeds, prompts, drawn = facts
            draw_positions = (positions[rows] - prompts).clamp(min=0) + drawn
            is_all = len(rows) == len(names)
            chosen = draw(logits if is_all else logits[rows], sampling, seeds, draw_positions)
            tokens[rows], log_probs[rows] = chosen
        return self._merge(tokens, log_probs, stock, sampling_metadata.max_num_logprobs)

    def _merge(
        self, tokens: Tensor, log_probs: Tensor, stock: Any, max_num_logprobs: int | None
    ) -> Any:
        """Return the output of the batch: the stock one, if any, with our rows replaced."""
        num_rows = len(tokens)
        width = (max_num_logprobs or 0) + 1
        ids = tokens.int()[:, None]
        if stock is None:
            log_prob_table = log_probs.new_full((num_rows, width), float("-inf"))
            id_table = ids.repeat(1, width)
            ranks = torch.zeros(num_rows, dtype=torch.int64, device=tokens.device)
            sampled = ids
        else:
            sampled = stock.sampled_token_ids.clone()
            if stock.logprobs_tensors is not None:
                id_table, log_prob_table, ranks = stock.logprobs_tensors[:3]
            for _, rows, _ in self._groups:
                sampled[rows] = ids[rows].to(sampled.dtype)
        if max_num_logprobs is None:
            return self._output(sampled_token_ids=sampled, logprobs_tensors=None)
        for _, rows, _ in self._groups:
            id_table[rows, 0] = ids[rows, 0].to(id_table.dtype)
            log_prob_table[rows, 0] = log_probs[rows]
        tensors = self._logprobs(id_table, log_prob_table, ranks)
        return self._output(sampled_token_ids=sampled, logprobs_tensors=tensors)

    def _arrange(self, names: list[str]) -> None:
        """Store the rows of vLLM's new batch, grouped by their sampling settings."""
        rows = list[_DrawnRow]()
        for index, name in enumerate(names):
            parameters = self._runner.requests[name].sampling_params
            facts = ((parameters and parameters.extra_args) or {}).get(ROW)
            if facts is not None:
                rows.append(_DrawnRow.of(index, facts))
        self._names = names
        self._num_drawn_here = len(rows)
        self._groups = []
        for sampling in dict.fromkeys(row.sampling for row in rows):
            some = [row for row in rows if row.sampling == sampling]
            self._groups.append((sampling, *self._tensors_of(some)))

    def _tensors_of(self, rows: Sequence[_DrawnRow]) -> tuple[Tensor, Tensor]:
        """The indices and the facts of some rows, on the device."""
        device = self._runner.device
        indices = torch.tensor([row.index for row in rows], device=device)
        facts = torch.tensor(
            [(row.seed, row.prompt_tokens, row.num_drawn) for row in rows], device=device
        )
        return indices, facts.T


def install() -> None:
    """Let each model runner of this process draw with row noise, once it has loaded its model.

    On a CPU, layers also keep plain weights, so that weight updates take effect. Repeated calls do
    nothing.
    """
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    classes = [runner]
    platform = import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        install_plain_layers()
        classes.append(import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner)
    for each in classes:
        load = each.__dict__.get("load_model")
        if load is not None and not hasattr(load, "draws_row_noise"):
            each.load_model = _with_row_noise(load)


def _with_row_noise(load: Callable[..., None]) -> Callable[..., None]:
    """Return `load` (load_model of a runner class) with the sampler replaced afterwards."""

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        load(self, *arguments, **named)
        if not isinstance(self.sampler, RowNoiseSampler):
            self.sampler = RowNoiseSampler(self)

    load_model.draws_row_noise = True  # type: ignore[attr-defined]
    return load_model
