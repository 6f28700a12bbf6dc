"""Translates a traced step into the terms of `mapping`: hardware, models, strategies and calls.

Calls of models with weights, on rows with tokens, are simulated. Map functions, fetches and reward
functions are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch

from spmdflow.config.episode import KEY, EpisodeConfig
from spmdflow.config.episode_models import AT_STEP, FrozenModel, episode_models
from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.kind.engine import engine_kind, engines_that_cut
from spmdflow.kind.generator import generator_kind
from spmdflow.kind.table import optimizer_kind
from spmdflow.mapping.dataflow import (
    Dataflow,
    Engine,
    Kind,
    Model,
    ModelCall,
    Rollout,
    Strategy,
    Workload,
)
from spmdflow.mapping.hardware import BY_DEVICE, Hardware, load_hardware, packaged_hardware
from spmdflow.mapping.shared_prompt import cached_tokens
from spmdflow.mapping.unequal import SharedRows
from spmdflow.models.preference import PairWorker
from spmdflow.parallel.device import CPU, own_device
from spmdflow.plan.record import Key, Tokens, Trace, TracedModel
from spmdflow.runtime.call import Call
from spmdflow.weights.adapter import is_adapter, is_b
from spmdflow.weights.architecture import Architecture, Head
from spmdflow.weights.table import shapes_by_name


def hardware_of(
    name: str | None, node_size: int | None = None, *, world_size: int | None = None
) -> Hardware:
    """Return the named hardware; without a name, the hardware of this node.

    Raises ConfigError if there is no such hardware. A CPU file was measured for a number of ranks;
    more ranks share its rates and memory.
    node_size: ranks of a node. Without it, the hardware file determines it, or on CPUs the whole
    world is one node.
    """
    hardware = load_hardware(name or _local_hardware())
    if not hardware.is_cpu:
        if node_size is None:
            return hardware
        return hardware.with_node(node_size)
    cores = hardware.gpus_per_node
    ranks = next((n for n in (node_size, world_size) if n is not None), int(cores))
    share = cores / max(ranks, cores)
    shared = replace(hardware, cores=cores, memory_bytes=share * hardware.memory_bytes)
    return shared.with_node(ranks)


def nodes_of(world: tuple[int, ...], hardware: Hardware) -> tuple[int, ...]:
    """The node of each rank."""
    return tuple(rank // int(hardware.gpus_per_node) for rank in world)


def _local_hardware() -> str:
    """Return the name of the packaged hardware file for this node's device: "cpu" without a GPU.

    Raises ConfigError if no file matches the device's name.
    """
    kind = own_device()
    if kind == CPU:
        return "cpu"
    device = torch.get_device_module(kind).get_device_name()
    name = packaged_hardware(device)
    if name is not None:
        return name
    raise ConfigError(
        f"hardware: got {device}, expected a device that a packaged file describes "
        f"({', '.join(BY_DEVICE.values())}); measure it with scripts/calibrate.py --device "
        f"{kind.type} and set run.hardware (of a plan: --hardware) to that file, or to the nearest "
        f"of these"
    )


STAGES: dict[Kind, str] = {"generate": "generation", "infer": "preparation", "train": "learning"}


@dataclass(frozen=True)
class Simulated:
    """The part of a step that the simulators can predict."""

    dataflow: Dataflow | None
    """None if no model of the script has weights."""
    strategies: Mapping[str, Strategy]
    calls: Mapping[Key, ModelCall]
    """The dataflow's calls by their index in the trace."""
    without: Mapping[str, str]
    """Models without a simulator, each with the reason."""


def simulate_calls(trace: Trace, step_calls: Sequence[Call]) -> Simulated:
    """Return the models and calls of one step in the terms of the simulators.

    A model without weights, an engine or known sizes goes to `without`, with the reason. A KV cache
    without a fixed size gets room for the step's rows that are decoded together.
    """
    models: dict[str, Model] = {}
    without: dict[str, str] = {}
    sources = {}
    for policy, generator in trace.links:
        sources[generator] = policy
    for name, traced in trace.models.items():
        try:
            models[name] = _model(traced, weights_from=sources.get(name))
        except ConfigError as err:
            without[name] = str(err)
    if not models:
        return Simulated(None, {}, {}, without)
    calls = {}
    for call in step_calls:
        model_call = _model_call_or_none(trace, call, models)
        if model_call is not None:
            calls[call.key] = model_call
    for key, model_call in calls.items():
        if model_call.kind == "generate":
            name = model_call.model
            longest = _longest_rows(model_call.workload, trace.tokens[key])
            models[name] = _with_cache(models[name], longest, trace.models[name])
    strategies = {}
    for name, model in models.items():
        strategies[name] = Strategy.of_layout(
            trace.models[name].layout,
            generates=model.rollout is not None,
            recompute="recompute" in model.engine.options,
        )
    flow = Dataflow(tuple(models.values()), tuple(calls.values()))
    return Simulated(flow, strategies, calls, without)


def _model(traced: TracedModel, *, weights_from: str | None) -> Model:
    """Return a worker group as a model for the simulators: sizes, engine, adapters, generator.

    A separate generator has no engine; its weights stay in the generation layout and dtype. Raises
    ConfigError if the group has no weights or no engine section.
    weights_from: the policy of a separate generator.
    """
    cfg = traced.settings
    layout = traced.layout
    model = getattr(cfg, "model", None)
    if model is None or not hasattr(cfg, "engine"):
        got = "no model of weights"
        do = "its calls count as host time only"
        raise ConfigError.of(traced.name, got, "one for a prediction", do)
    own_head = getattr(traced.worker_class, "head", "causal_lm")  # a generator declares none
    head: Head = "causal_lm" if own_head == "causal_lm" else "scalar"
    sizes = layout.tp_size, layout.pp_size
    engine = Engine(
        kind=cfg.engine.kind,
        layout=sizes if engine_kind(cfg.engine.kind).cuts_model else None,
        shard_size=layout.shard_size if layout.shard_size < layout.weight_size else 0,
        virtual_size=layout.virtual_size,
        context_size=layout.cp_size,
        context_attention=cfg.engine.context_attention,
        expert_size=layout.expert_size,
        options=tuple(cfg.engine.options),
        micro_batch_rows=min(cfg.engine.micro_batch_size_per_rank, 1 << 20),
        micro_batch_tokens=cfg.engine.max_micro_batch_tokens,
        dtype=model.precision,
        moved=cfg.engine.offloaded_parts,
        own_kernels=True,
    )
    if hasattr(cfg, "optimizer"):
        facts = optimizer_kind(cfg.optimizer.name)
        moments = facts.moments_with(cfg.optimizer.betas)
        engine = replace(engine, moments=moments, step_copies=int(not facts.fused))
    if traced.only_generates:  # no engine: its weights stay where it generates, in that precision
        kind = engines_that_cut()[0]
        dtype = cfg.rollout.precision
        engine = replace(engine, kind=kind, layout=sizes, options=(), dtype=dtype, moved=())
    return Model(
        traced.name,
        Architecture.sizes_from_folder(model.path, head=head),
        trained=hasattr(cfg, "update") and not traced.only_generates,
        engine=engine,
        rollout=_rollout(traced) if traced.generates else None,
        weights_from=weights_from,
        adapters=0 if traced.only_generates else adapter_parameters(model),
        divided_adapters=0 if traced.only_generates else divided_adapter_parameters(model),
        shares=getattr(cfg, "shares", None) or "",
    )


def adapter_parameters(model: ModelConfig) -> int:
    """Return the number of parameters that are trained with LoRA adapters.

    Those of modules to save are included. 0 without adapters, or if the project has no table of
    weights for the architecture.
    """
    return sum(map(prod, _trained_shapes(model).values()))


def divided_adapter_parameters(model: ModelConfig) -> int:
    """Return the number of those of `adapter_parameters` that tensor-parallel ranks divide.

    These are the B of a layer whose rows are divided and the A of one whose columns are, and
    matrices of modules to save.
    """
    divided = 0
    for name, shape in _trained_shapes(model).items():
        has_columns = any(end in name for end in _COLUMN_LAYERS)
        is_divided = is_b(name) != has_columns if is_adapter(name) else len(shape) > 1
        if is_divided:
            divided += prod(shape)
    return divided


_COLUMN_LAYERS = (".o_proj.", ".down_proj.")
"""Layers of a dense family whose columns tensor-parallel ranks divide; of others the rows."""


def _trained_shapes(model: ModelConfig) -> dict[str, Sequence[int]]:
    """Name -> shape of what is trained with adapters; {} as `adapter_parameters` says."""
    arch = Architecture.sizes_from_folder(model.path)
    lora = getattr(model, "lora", None)
    if lora is None or arch.obstacle:
        return {}
    shapes = shapes_by_name(replace(arch, adapters=lora.adapters))
    return {name: shape for name, shape in shapes.items() if lora.adapters.is_trained(name)}


def _rollout(traced: TracedModel) -> Rollout:
    """Return the generator of a worker group for the simulators.

    kv_cache_bytes is set only if the generator has a cache of fixed size and the settings give it.
    Everything except copies runs outside CUDA graphs.
    """
    rollout = traced.settings.rollout
    layout = traced.layout
    has_size = rollout.kv_cache_gib is not None and generator_kind(rollout.generator).fixed_cache
    mode = "copy" if traced.only_generates else sync_mode(traced.settings, layout)
    return Rollout(
        kind=rollout.generator,
        layout=(layout.gen_tp_size, layout.gen_pp_size),
        weights="flat" if traced.only_generates else mode,
        eager=mode != "copy",
        dtype=rollout.precision,
        kv_cache_bytes=float(rollout.cache_bytes) if has_size else None,
        max_batch_size=rollout.max_batch_size,
        overlaps_host=generator_kind(rollout.generator).overlaps_host,
        checks_per_sync=1 / rollout.verify_every if rollout.verify_every else 0.0,
        frozen_bytes=_frozen_bytes(traced.settings),
    )


def _frozen_bytes(settings: Any) -> float:
    """Return the bytes of the weights of other models that episodes call by name.

    They are in the generator's precision; their KV caches are not counted. Checkpoints count as
    often as they may be loaded at once.
    """
    episode = getattr(settings.rollout, "episode", None)
    if not isinstance(episode, EpisodeConfig):
        return 0.0
    element_bytes = getattr(torch, settings.rollout.precision).itemsize
    total = 0.0
    for model in episode_models(f"{KEY}.models", episode.models).values():
        if isinstance(model, FrozenModel):
            folder = model.path or settings.model.path
            sizes = Architecture.sizes_from_folder(folder)
            copies = model.loaded if model.name == AT_STEP else 1
            total += copies * sizes.num_parameters * element_bytes
    return total


def _longest_rows(workload: Workload, tokens: Tokens) -> Workload:
    """Return the workload with the longest prompt and response of its rows instead of the means."""
    if tokens.by_row is None:
        return workload
    return replace(
        workload,
        prompt_tokens=max(workload.prompt_tokens, int(tokens.by_row.prompts.max())),
        response_tokens=max(workload.response_tokens, int(tokens.by_row.responses.max())),
    )


def _with_cache(model: Model, workload: Workload, traced: TracedModel) -> Model:
    """Return the model with a KV cache for all rows that one replica decodes together.

    These are its share of the call's rows, at most max_batch_size. A larger cache of an earlier
    call stays. A generator with a cache of fixed size is returned as it is.
    workload: of the call, with its longest lengths, to which the cache is padded.
    """
    rollout = model.rollout
    if rollout is None or rollout.facts.fixed_cache:
        return model
    share = -(-workload.num_sequences // traced.layout.generation_dp_size)
    rows = min(share, rollout.max_batch_size or share)
    tokens = cached_tokens(model, workload, rows)
    size = tokens * model.shape.kv_bytes_per_token(rollout.element_bytes)
    cache = max(float(size), rollout.kv_cache_bytes or 0.0)
    return replace(model, rollout=replace(rollout, kv_cache_bytes=cache))


def _model_call_or_none(trace: Trace, call: Call, models: Mapping[str, Model]) -> ModelCall | None:
    """Return a call as one of the dataflow, with its rows, mean lengths (rounded up) and updates.

    None if its model has no simulator, if it has no rows or no tokens, or if a separate generator
    only accepts rows for a later generation. All calls of a script with a separate generator share
    the stage "step", as its pools overlap.
    """
    tokens = trace.tokens.get(call.key)
    if call.operation != "call" or call.model not in models or tokens is None:
        return None
    if not tokens.num_rows or tokens.prompts + tokens.responses <= 0:
        return None
    traced = trace.models[call.model]
    kind = traced.kind_of(call.method)
    if traced.only_generates and kind != "generate":
        return None  # it accepts rows, and samples for them later
    minis = []
    for plain in call.commands.values():
        minis.append(len(plain.get("mini", ())))
    per_row = 1 if tokens.by_row is None else tokens.by_row.num_sequences
    workload = Workload(
        num_sequences=tokens.num_rows * per_row,
        prompt_tokens=max(1, ceil(tokens.prompts / per_row)),
        response_tokens=ceil(tokens.responses / per_row),
        num_updates=max(1, *minis) if kind == "train" else 1,
        num_epochs=traced.cfg.update.num_epochs if kind == "train" else 1,
        num_forwards=_forwards_of_update(traced) if kind == "train" else 0,
        rows_per_prompt=tokens.by_row.rows_per_prompt if tokens.by_row is not None else 1,
    )
    # a script whose generator has its own ranks overlaps generation with everything else
    return ModelCall(
        call.model, kind, "step" if trace.links else STAGES[kind], workload, call.method
    )


def _forwards_of_update(traced: TracedModel) -> int:
    """Return the forwards over all rows before each optimizer step.

    Pairs are scored first, and so are other rows' answers next to labelled ones. Data-parallel
    engines count the tokens of each expert first where an auxiliary loss has a weight.
    """
    if issubclass(traced.worker_class, PairWorker):
        return 1
    counts = getattr(traced.cfg.update, "router_balance_coef", 0.0) > 0
    return int(counts and not engine_kind(traced.settings.engine.kind).cuts_model)


def rows_by_rank(trace: Trace, call: Call, kind: Kind) -> tuple[SharedRows, ...]:
    """Return the rows of each rank in each optimizer step of a call, with their own lengths.

    () if they are not known. Ranks of one replica have the same rows and count once.
    """
    tokens = trace.tokens.get(call.key)
    if tokens is None or tokens.by_row is None:
        return ()
    by_ids: dict[int, Mapping[str, Any]] = {}
    for plain in call.commands.values():
        if plain.get("ids") is None:
            return ()
        if len(plain["ids"]):
            by_ids.setdefault(id(plain["ids"]), plain)
    commands = list(by_ids.values())
    counted = tokens.by_row.responses
    if kind != "generate":
        counted = counted + tokens.by_row.prompts
    if not commands or not counted.all():
        return ()
    if kind != "train":
        shares = [tokens.by_row.of(plain["ids"]) for plain in commands]
        return (SharedRows(tuple(shares), commands[0].get("micro", 1)),)
    result = []
    minis = [plain.get("mini", ()) for plain in commands]
    for steps in zip(*minis, strict=False):
        shares = []
        for plain, (index, _) in zip(commands, steps, strict=True):
            if len(index):
                shares.append(tokens.by_row.of(plain["ids"][index]))
        result.append(SharedRows(tuple(shares), steps[0][1]))
    return tuple(result)
