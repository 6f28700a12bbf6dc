"""The vLLM generator: one engine per process, with the weights cut over the generation replica.

Uses vLLM's scheduler, paged KV cache and kernels. Tokens are drawn by the same function as in the
built-in generator, so the same seeds give the same responses except where logits differ in their
last bits. Only this file and the files rollout.vllm_* use vLLM.

All ranks of a replica make the same calls with the same rows and get the same tokens; both are
checked by hash. Each rank runs its own scheduler over the same requests and draws every token
itself, from the same logits and seeds. Pipeline stages are vLLM's own: the last one broadcasts its
logits, and while one stage computes the others wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.rollout.forward import end_tokens
from spmdflow.rollout.generator import (
    NEVER,
    Finished,
    Replica,
    Request,
    RequestGenerator,
    WakePart,
    no_routes_error,
)
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm_adapter import PolicyAdapter
from spmdflow.rollout.vllm_blocks import Shards, install
from spmdflow.rollout.vllm_contract import check_contract, disable_flashinfer_sampler, walk
from spmdflow.rollout.vllm_derived import derive_tables
from spmdflow.rollout.vllm_engine import RowSampler, explain_errors, keeps_folder, start_llm
from spmdflow.rollout.vllm_process import (
    Groups,
    SleepingMemory,
    preserve_process_state,
    release,
    replace_attribute,
    trim_weights,
)
from spmdflow.rollout.vllm_routes import VllmRoutes
from spmdflow.rollout.vllm_weights import read_stock_weights
from spmdflow.router import as_column
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, Storages
from spmdflow.weights.table import ShardTable

_CHECK_EVERY = 8
"""Steps between two checks of the text for stop strings, if there are any."""
_RUNNER = "engine_core.model_executor.driver_worker.worker.model_runner"


class VllmGenerator(RequestGenerator):
    """Generator on a vLLM engine. rollout.generator.Generator documents its guarantees.

    A process has at most one at a time.
    """

    is_guided = True
    keeps_noise = False
    """Whether vLLM's own sampler chooses the tokens."""

    def __init__(
        self, cfg: RolloutConfig, model_path: str, device: torch.device, replica: Replica
    ) -> None:
        """All ranks of the replica build it together.

        ConfigError if this vLLM lacks a name that is used here, or cannot run the model or its
        sizes. One token is generated as a check, because some models fail only in their first
        forward.
        """
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.precision)
        self.device = device
        self.replica = replica
        self._model_path = model_path
        self._numbers = count()
        self._on_cpu = device.type == "cpu"
        self._shared = False
        self._asleep: dict[str, Storages | SleepingMemory] = {}
        self._end_tokens = end_tokens(model_path)
        self._routes: VllmRoutes | None = None
        """Made with the engine if the settings replay routes."""
        with preserve_process_state(own_variables="VLLM_"), ExitStack() as undo:
            check_contract()
            if not self.keeps_noise:
                disable_flashinfer_sampler()
            self._groups = Groups(replica, device)
            undo.callback(self._groups.close)
            with explain_errors(model_path, replica):
                on_load = self._make_routes if cfg.router == "replay" else None
                self._llm = start_llm(cfg, model_path, self._groups, on_load)
                self._attach(cfg)
                self.add(Request(torch.tensor([0]), 0, Sampling(max_new_tokens=1)))
                while self._sampler.requests:
                    self.step()
            undo.pop_all()
        configuration = import_module("vllm.config").set_current_vllm_config
        with explain_errors(model_path, replica), configuration(self._runner.vllm_config):
            self._reading = read_stock_weights(self.model, model_path, replica, self._adapter)
        self.has_folder_weights = keeps_folder(cfg, model_path)
        """False: all weights are zeros until a sync, or until `take_folder_weights` reads them."""
        if not self.has_folder_weights:
            with torch.no_grad():  # not random numbers: padding is never synced
                for parameter in self.model.parameters():
                    parameter.zero_()

    def _attach(self, cfg: RolloutConfig) -> None:
        """Looks up the engine's internal parts and replaces its sampler with a `RowSampler`.

        Sets self._core, self._runner, self._sampler and self._adapter (None unless syncs bring
        adapters). On later pipeline stages, also makes the input buffers if vLLM has not made them.
        ConfigError if a part that is read by name is missing.
        """
        client = self._llm.llm_engine.engine_core
        if hasattr(client, "_finalizer"):  # absent in 0.27; it would end the default process group
            client._finalizer.detach()
        self._core = client.engine_core
        runner = self._runner = walk(client, _RUNNER)
        for name in ("input_batch.req_ids", "requests", "seq_lens"):  # what RowSampler reads
            walk(runner, name)
        lora = cfg.lora if cfg.weights == "adapter" else None
        self._adapter = None if lora is None else PolicyAdapter(runner, lora)
        self._sampler = runner.sampler = RowSampler(
            runner, ends=self._end_tokens, keeps_noise=self.keeps_noise
        )
        if self.replica.pp_rank > 0 and runner.intermediate_tensors is None:
            # made by the warm-up, which CPU skips
            runner.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=self.device,
            )

    @property
    def model(self) -> Any:
        """The module that generates; this rank's part of it if the replica has several ranks."""
        return self._runner.model

    @property
    def max_positions(self) -> int:
        """Context length of the engine, in tokens."""
        return int(self._runner.max_model_len)

    def _make_routes(self, runner: Any) -> None:
        """Let the routers of a model that has just been loaded pass on what they select.

        ConfigError for several pipeline stages, each of which has only its own layers.
        """
        if self.replica.pp_size > 1:
            raise ConfigError.of(
                "actor.update.router=replay",
                f"vLLM on {self.replica.pp_size} pipeline stages",
                "p1, where a rank has all routers",
                "set actor.update.router=own, or another actor.rollout.engine or layout",
            )
        for name in ("query_start_loc.np", "max_num_tokens", "requests"):  # what VllmRoutes reads
            walk(runner, name)
        self._routes = VllmRoutes(runner)
        if not self._routes.num_layers:
            raise no_routes_error(self)

    def return_routes(self) -> None:
        """See RequestGenerator.return_routes. ConfigError unless it was built to replay routes."""
        if self._routes is None:
            raise no_routes_error(self)
        self._sampler.routes = self._routes

    def own_routes(self, num_tokens: int) -> Tensor | None:
        """See RequestGenerator.own_routes."""
        routes = self._sampler.routes
        if routes is None:
            return None
        return as_column(routes.own_routes(num_tokens), routes.num_experts)

    def add(self, request: Request) -> int:
        """Passes a request to vLLM and returns its id; errors as in RequestGenerator.add.

        vLLM gets temperature 0 because RowSampler draws the tokens; with keeps_noise it gets
        temperature, top_p and top_k. A response ends at an end token of the folder or at
        max_new_tokens.
        """
        requests = self._sampler.requests
        sampling = request.sampling
        self.admit(request, list(requests.values())[:1])
        self._sampler.sampling = sampling
        number = next(self._numbers)
        choice = {
            "temperature": 0.0
        }  # vLLM then does nothing to the logits; RowSampler does it all
        if self.keeps_noise and not sampling.greedy:
            names = ("temperature", "top_p", "top_k")
            choice = {}
            for name in names:
                choice[name] = getattr(sampling, name)
        parameters = import_module("vllm.sampling_params")
        self._llm.llm_engine.add_request(
            str(number),
            {"prompt_token_ids": request.prompt.tolist()},
            parameters.SamplingParams(
                **choice,
                max_tokens=sampling.max_new_tokens,
                detokenize=False,
                ignore_eos=True,  # the model config's; those of stop_token_ids count
                stop_token_ids=list(self._end_tokens),
                output_kind=parameters.RequestOutputKind.FINAL_ONLY,
                extra_args={"number": number},
            ),
            **({} if self._adapter is None else {"lora_request": self._adapter.request}),
        )
        requests[number] = request  # only after vLLM has accepted it
        return number

    def abort(self, request_id: int) -> Finished | None:
        """Drops a request from vLLM and returns its tokens so far; None if it has ended."""
        if request_id not in self._sampler.requests:
            return None
        self._llm.llm_engine.abort_request([str(request_id)])
        (drawn,) = self._sampler.tokens_so_far([request_id])
        return self._sampler.take(request_id, len(drawn))

    def step(self) -> list[Finished]:
        """Runs one engine step, and returns the responses that have ended, possibly none.

        With stop strings, runs up to 8 steps and then checks the new text of every request. A
        request that completed a stop string ends with that token: vLLM aborts it, and later tokens
        are dropped. If no request is left, steps that async scheduling has started are finished.
        Wakes weights and cache first.
        """
        self.wake()
        engine = self._llm.llm_engine
        requests = self._sampler.requests
        numbers = [number for number, each in requests.items() if each.sampling.stop]
        known = dict(zip(numbers, map(len, self._sampler.tokens_so_far(numbers)), strict=True))
        sizes: dict[int, int] = {}
        for _ in range(_CHECK_EVERY if numbers else 1):
            if len(sizes) < len(requests):
                outputs = (output for output in engine.step() if output.finished)
                sizes |= {int(o.request_id): len(o.outputs[0].token_ids) for o in outputs}
        if numbers:
            tokens = self._sampler.tokens_so_far(numbers)
            rows = []
            for (number, num_checked), row in zip(known.items(), tokens, strict=True):
                rows.append((requests[number], row[: sizes.get(number)], num_checked))
            stopped = {}
            for number, end in zip(numbers, self.find_stops(rows), strict=True):
                if end is not None:
                    stopped[number] = end
            engine.abort_request([str(number) for number in stopped if number not in sizes])
            sizes |= stopped
        finished = []
        for number, size in sizes.items():
            finished.append(self._sampler.take(number, size))
        while not requests and getattr(self._core, "batch_queue", None):
            engine.step()  # finish the step that async scheduling has started
        return finished

    def tokens_so_far(self, request_ids: Sequence[int]) -> list[list[int]]:
        """See RequestGenerator.tokens_so_far."""
        return self._sampler.tokens_so_far(request_ids)

    def share(self, shards: Shards, *, tp_size: int, vocab_multiple: int) -> None:
        """Makes the model read the trainer's shards from now on, and frees vLLM's own weights.

        These are freed for good. shards: see rollout.vllm_blocks. tp_size, vocab_multiple: the
        trainer's. weights_version is NEVER until `mark_shared`. ConfigError if the shards do not
        fit.
        """
        replica = self.replica
        self._reading = install(
            self.model,
            Architecture.dense_from_folder(self._model_path),
            shards,
            replica,
            lambda columns: torch.cat(replica.gather(columns, replica.tp_ranks), -1),
            tp_size=tp_size,
            vocab_multiple=vocab_multiple,
        )
        if not self._on_cpu:  # on a CPU the memory was freed with the weights
            trim_weights()
        self.weights_version = NEVER
        self._shared = True

    def mark_shared(self, version: int) -> None:
        """States that the shards now hold the trainer's weights of this version."""
        assert self._shared, "call share() first"
        self.renew(version)

    def blocks(self) -> Sequence[Block]:
        """This rank's views of vLLM's parameters; see Generator.blocks."""
        self.wake("weights")
        return self._reading.blocks

    def renew(self, version: int) -> None:
        """See Generator.renew. Cached prefixes are dropped."""
        if "kv_cache" not in self._asleep:  # a cache that wakes is empty
            self._reset_prefixes()
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Returns Hugging Face name -> hash of each complete tensor that the replica's layers read.

        All ranks of the replica call it together. Padding does not count. WeightSyncError if ranks
        with the same part have different values, or if vLLM has lost the policy's adapter;
        weights_version is then NEVER. Reallocates freed weights first.
        """
        self.wake("weights")
        try:
            if self._adapter is not None:
                self._adapter.check()
            return self._reading.hashes(self.replica, self.device)
        except WeightSyncError:
            self.weights_version = NEVER
            raise

    def sleep(self, *, weights: bool = False) -> None:
        """Frees the KV cache; with `weights`, frees the weights too.

        weights_version is then NEVER. Weights are not freed if they are the trainer's, or if syncs
        bring adapters only. Parts that are already asleep are skipped.
        """
        if "kv_cache" not in self._asleep:
            self._free("kv_cache", self._runner.kv_caches, [])
        if weights and not self._shared and self._adapter is None:
            self.weights_version = NEVER
            if "weights" not in self._asleep:
                trained: list[Tensor] = []
                others = list(self.model.buffers())
                for name, parameter in self.model.named_parameters():
                    if name in self._reading.constants:
                        others.append(parameter)
                    else:
                        trained.append(parameter)
                self._free("weights", trained, others)

    def _free(self, part: WakePart, tensors: Iterable[Tensor], preserved: Iterable[Tensor]) -> None:
        """Frees the memory of one part, and records it in self._asleep until `wake`.

        tensors: all tensors whose memory is freed; `wake` sets them to zero. preserved: tensors in
        the same memory of a GPU whose values `wake` restores. On a CPU, those are not freed.
        """
        memory: Storages | SleepingMemory
        if self._on_cpu:
            memory = Storages(tensors)
        else:
            memory = SleepingMemory(part, tensors, preserved)
        memory.free()
        self._asleep[part] = memory

    def wake(self, part: WakePart | None = None) -> None:
        """Reallocates what `sleep` has freed: one part, or weights and cache if part is None.

        Weights are then zeros until a sync, and the cache is empty. Does nothing for a part that is
        awake.
        """
        for name in ("weights", "kv_cache"):
            if name in self._asleep and part in (None, name):
                self._asleep.pop(name).restore()
                if name == "kv_cache":
                    self._reset_prefixes()

    def close(self) -> None:
        """Shuts the engine down and frees its memory and its private process group.

        The trainer's groups stay. A new engine can then be built in this process.
        """
        if not self._on_cpu:
            self.wake()  # vLLM would otherwise unmap sleeping memory a second time
        module = import_module("vllm.v1.engine.core")
        with replace_attribute(module, "cleanup_dist_env_and_memory", release):
            self._core.shutdown()
        del self._reading, self._llm, self._core, self._runner, self._sampler
        gc.collect()
        self._groups.close()

    def _reset_prefixes(self) -> None:
        """Drops cached prefixes, because weights that have changed computed them."""
        done = self._llm.reset_prefix_cache()
        assert done, "prefix cache in use between calls"


class BatchSampledVllm(VllmGenerator):
    """vLLM with its own sampler. The recorded log-probabilities are still those of the policy."""

    keeps_noise = True

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        *,
        conversations: Sequence[int] | None = None,
    ) -> TensorDict:
        """Returns responses drawn with vLLM's own random numbers; see Generator.generate.

        torch is seeded with the hash of all seeds, so each response depends on all rows and seeds
        together. torch's random states are restored afterwards.
        """
        devices = [] if self._on_cpu else [self.device]  # not all devices that this process sees
        with torch.random.fork_rng(devices):  # ranks of a replica must draw from equal states
            torch.manual_seed(hash(tuple(seeds)))
            return super().generate(prompts, sampling, seeds, limits, conversations=conversations)


def derived_table(model_path: str) -> ShardTable:
    """Return what vLLM's model of a folder has on one rank, as its own loader says.

    Starts vLLM in this process, on the CPU, and ends it. ConfigError if vLLM refuses the model, or
    if one of its tensors is no copy of the folder's.
    """
    replica = Replica.alone()
    settings = RolloutConfig(engine="vllm", max_batch_size=1, max_new_tokens=1)
    generator = VllmGenerator(settings, model_path, torch.device("cpu"), replica)
    (table,) = derive_tables(generator.model, model_path, replica).tables
    generator.close()
    return table
