"""Bytes of a rank in each phase: the resident state of all models of a pool, and a call's needs.

Megatron's distributed optimizer keeps full weights and float32 gradients on every data-parallel
rank and shards the optimizer: 6 + 12/d bytes a parameter in bfloat16 (2 + 4, and 4 + 4 + 4 over d),
8 + 8/d in float32, which needs no second copy of the weights. FSDP and ZeRO 2, 3 divide all of it.
Like ZeRO 1 they have gradients only while they train.

`pass_memory` has the memory of passes. The models of a pool take turns, so the largest call counts.
Functions take one strategy, or many at once as in `seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from spmdflow.kind.generator import PREFILL_TOKENS
from spmdflow.mapping.dataflow import Array, Dataflow, Kind, Model, Strategy, Workload
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.pass_memory import pass_bytes
from spmdflow.mapping.seconds import (
    Parts,
    add_parts,
    cache_bytes,
    kv_width,
    rows_per_replica,
    total,
)
from spmdflow.mapping.share import (
    local_parameters,
    resident_parameters,
    share_of,
    stepped_parameters,
    trained_parameters,
)
from spmdflow.mapping.shared_prompt import prompts_admitted
from spmdflow.weights.ranks import BUCKET_BYTES

KEPT_WHILE_TRAINING = {"flat", "adapter"}
"""Values of rollout.weights with which the generator keeps its weights during updates."""
LOGIT_BYTES = 8
"""Additional bytes per logit: divided by the temperature, and its softmax, in float32."""


def resident_bytes(model: Model, cut: Strategy) -> Parts:
    """Return the bytes that a model keeps on a rank between calls, by part.

    A part in host memory (engine.moved) counts as 0. Models that episodes call count on every rank,
    though only the first one of a replica has them.
    """
    moved = model.engine.moved
    parts = state_bytes(model, cut)
    result = {}
    for name, size in parts.items():
        result[name] = (name not in moved) * size
    if model.rollout is not None and model.rollout.frozen_bytes:
        result["frozen_models"] = model.rollout.frozen_bytes + 0.0 * cut.dp
    return result


def visiting_bytes(model: Model, kind: Kind, cut: Strategy) -> Parts:
    """Return the bytes of offloaded parts that are loaded for a call, by part.

    Training loads all of them, inference and a generation's weight sync only the parameters.
    """
    moved = []
    for part in model.engine.moved:
        if kind == "train" or part == "parameters":
            moved.append(part)
    state = state_bytes(model, cut)
    return {part: state[part] for part in moved}


def state_bytes(model: Model, cut: Strategy) -> Parts:
    """Return the bytes of one rank's parameters, gradient buffer and optimizer, wherever they are.

    Trained weights have 4 bytes if the engine stores float32, otherwise the compute dtype; the
    optimizer then has a float32 copy in addition to its float32 moments. Parts that the engine
    shards are divided by the ranks of a shard. Gradients count (float32) only if their buffer
    persists. A separate generator has only weights in its own dtype. A model that uses another's
    weights has nothing.
    """
    engine = model.engine
    sharding = model.engine.sharding
    local = local_parameters(model, cut)
    parts = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0 * local)
    if model.weights_from is not None and model.rollout is not None:
        return parts | {"parameters": local * model.rollout.element_bytes}
    if model.shares:
        return parts
    trained = trained_parameters(model, cut)
    if model.trained and engine.facts.float32_weights:
        size = 4
    else:
        size = engine.element_bytes
    resident = resident_parameters(model, cut)
    if model.adapters:
        adapters = size * trained / share_of(sharding.parameters, model, cut)
        parts["parameters"] = engine.element_bytes * resident + adapters
    else:
        parts["parameters"] = size * resident
    if model.trained and engine.facts.keeps_gradients:
        parts["gradients"] = trained * 4
    if model.trained:
        second_copy = 4 if size < 4 else 0
        bytes_per_weight = 4 * engine.moments + second_copy
        parts["optimizer"] = stepped_parameters(model, cut) * bytes_per_weight
    return parts


def call_bytes(
    model: Model, kind: Kind, workload: Workload, cut: Strategy, *, on_cpu: bool = False
) -> Parts:
    """Return the bytes that a call needs in addition to what is kept between calls, by use.

    A generation's are without its KV cache and the weight sync before it.
    """
    if kind == "generate":
        return _generation_bytes(model, workload, cut)
    parts = pass_bytes(model, workload, cut, trains=kind == "train", on_cpu=on_cpu)
    return add_parts(parts, visiting_bytes(model, kind, cut))


def sync_bytes(model: Model, workload: Workload, cut: Strategy) -> Parts:
    """Return the bytes that a weight sync needs in addition to what is always kept, by use.

    These are the generator's own weights, the gather buffer and parameters that are loaded for it.
    With adapters and rollout.weights=copy, merged weights are added. There is no KV cache yet.
    """
    parts = _generation_bytes(model, workload, cut)
    coming = {}
    for name in ("generation_weights", "gather"):
        coming[name] = parts[name]
    if model.adapters and model.rollout is not None and model.rollout.weights == "copy":
        merged = model.engine.element_bytes * resident_parameters(model, cut)
        coming["gather"] = coming["gather"] + merged
    return add_parts(coming, visiting_bytes(model, "generate", cut))


def save_bytes(model: Model, cut: Strategy) -> Parts:
    """Bytes of a checkpoint in addition to all residents: the offloaded parts, loaded to be copied.

    The exported folder is written from files, without device memory.
    """
    return add_parts(visiting_bytes(model, "train", cut), {"gather": 0.0 * cut.dp})


def build_moments(
    earlier: Sequence[tuple[Model, Strategy]], model: Model, cut: Strategy
) -> list[Parts]:
    """Return the bytes of a rank while it builds a model, by use; `earlier` were built before it.

    The first moment is the end of the engine, which is built as a whole, before parts of it are
    offloaded. The second, of a model that generates, is the end of its generator, with a KV cache
    of fixed size if it has one. The earlier models have their residents. They have freed their KV
    caches, and generation weights as for training.
    """
    moments = [state_bytes(model, cut)]
    if model.rollout is not None:
        generator: Parts = {"generation_weights": weights_at_start(model, cut)}
        if model.rollout.facts.fixed_cache and model.rollout.kv_cache_bytes is not None:
            generator["kv_cache"] = model.rollout.kv_cache_bytes + 0.0 * cut.dp
        moments.append(add_parts(resident_bytes(model, cut), generator))
    of_earlier: Parts = {}
    for one, strategy in earlier:
        of_earlier = add_parts(of_earlier, resident_bytes(one, strategy))
        kept = generator_weights(one, strategy, "train")
        of_earlier = add_parts(of_earlier, {"generation_weights": kept})
    return [add_parts(moment, of_earlier) for moment in moments]


def weights_at_start(model: Model, cut: Strategy) -> Array:
    """Return the bytes of a generator's weights when it has just been built.

    One that will share the trainer's storage still has the weights that it was built with.
    """
    return generator_weights(model, cut, "infer") + _replaced_weights(model, cut)


def generator_weights(model: Model, cut: Strategy, kind: Kind) -> Array:
    """Return the bytes of the generator's own weights during any other call on its ranks.

    They are 0 without a rollout. Training frees them unless rollout.weights is `flat`, whose
    addresses must not change, or `adapter`.
    kind: of the other call.
    """
    rollout = model.rollout
    if rollout is None or (kind == "train" and rollout.weights not in KEPT_WHILE_TRAINING):
        return 0.0 * cut.dp
    return _separate_weights(model, cut)


def pool_memory(
    members: Sequence[tuple[Model, Strategy]], dataflow: Dataflow, hardware: Hardware
) -> dict[str, dict[str, float]]:
    """Return the bytes of a pool's rank in each phase, by use: phase -> use -> bytes.

    A phase is the start of a model (`model.build`), a call (`model.method`), the weight sync before
    a generation on the trainer's ranks (`model.sync`), or the checkpoint of a trained model
    (`model.save`). During a start there are the members before it, which are those that the script
    spawns first. In the other phases the residents of all members add up, and each phase adds its
    own needs. A generation's KV cache has its
    `kv_cache_bytes`, whether or not it fits; without these, it gets the rest of the usable memory
    (negative if there is none). Of calls with the same title, such as a greedy and a sampled
    generation, the largest counts.
    """
    resident = reduce(add_parts, (resident_bytes(model, strategy) for model, strategy in members))
    pool = {model.name: (model, strategy) for model, strategy in members}
    phases: dict[str, dict[str, float]] = {}
    for position, (model, strategy) in enumerate(members):
        moments = build_moments(members[:position], model, strategy)
        parts = max(moments, key=lambda moment: float(total(moment)))
        phases[f"{model.name}.build"] = {name: float(size) for name, size in parts.items()}
    most: dict[str, float] = {}
    for call in dataflow.calls:
        if call.model not in pool:
            continue
        model, strategy = pool[call.model]
        needed = call_bytes(model, call.kind, call.workload, strategy, on_cpu=hardware.is_cpu)
        parts = add_parts(resident, needed)
        if model.shares in pool:
            lender, cut = pool[model.shares]
            parts = add_parts(parts, visiting_bytes(lender, call.kind, cut))
        for one, cut in members:
            if call.kind != "generate" or one is not model:
                parts = add_parts(
                    parts, {"generation_weights": generator_weights(one, cut, call.kind)}
                )
        used = total(parts)
        if used < most.get(call.title, 0.0):
            continue
        most[call.title] = used
        if call.kind == "generate" and model.weights_from is None:
            coming = add_parts(resident, sync_bytes(model, call.workload, strategy))
            phases[f"{model.name}.sync"] = {name: float(size) for name, size in coming.items()}
        if model.rollout is not None and call.kind == "generate":
            fixed = model.rollout.kv_cache_bytes
            parts["kv_cache"] = hardware.usable_bytes - used if fixed is None else fixed
        phases[call.title] = {name: float(size) for name, size in parts.items()}
    for model, strategy in members:
        if model.trained:
            parts = add_parts(resident, save_bytes(model, strategy))
            phases[f"{model.name}.save"] = {name: float(size) for name, size in parts.items()}
    return phases


def least_cache_bytes(model: Model, workload: Workload, cut: Strategy) -> Array:
    """Return the bytes of the least KV cache of one rank with which a placement fits.

    This is the size that is set, or room for `min_batch_size` sequences, or for all sequences of a
    replica if it has fewer.
    """
    assert model.rollout is not None, model.name
    if model.rollout.kv_cache_bytes is not None:
        return model.rollout.kv_cache_bytes + 0.0 * cut.dp
    least = np.minimum(rows_per_replica(workload, cut), model.rollout.min_batch_size)
    return cache_bytes(model, workload, cut, least)


def full_cache_bytes(model: Model, workload: Workload, cut: Strategy) -> Array:
    """KV cache of one rank for all sequences of its replica at once."""
    return cache_bytes(model, workload, cut, rows_per_replica(workload, cut))


def offload_seconds(model: Model, kind: Kind, cut: Strategy, hardware: Hardware) -> Array:
    """Seconds to load the offloaded parts for a call, and to copy them back after training.

    Gradients are not copied.
    """
    parts = visiting_bytes(model, kind, cut)
    copied = sum((size for name, size in parts.items() if name != "gradients"), 0.0 * cut.dp)
    return (2 if kind == "train" else 1) * copied / hardware.host_bandwidth


def _generation_bytes(model: Model, workload: Workload, cut: Strategy) -> Parts:
    """Return the bytes of a generation by use: weights, gather buffer, activations, logits.

    The generator's own weights are without what it reads in the trainer's storage (Table 2: at the
    peak M/(t_g p_g)). A prefill pass of at most PREFILL_TOKENS (of a generator that shares prompts:
    of those of its first rows, each once) needs a layer's input, the residual
    and attention's result, and the largest of: gate, up and their product; that product, the
    network's result and its sum over ranks; queries, keys, values and attention's result, with its
    sum over ranks. Sampling then needs the logits.
    """
    rollout = model.rollout
    shape = model.shape
    assert rollout is not None, model.name
    size = rollout.element_bytes
    rows = rows_per_replica(workload, cut)
    extra = _separate_weights(model, cut)
    drawn = np.minimum(rows, rollout.max_batch_size or rows)
    admitted = rows
    if rollout.facts.shares_prompts:
        admitted = prompts_admitted(model, workload, drawn, drawn)
    tokens = np.minimum(admitted * workload.prompt_tokens, PREFILL_TOKENS)
    hidden = shape.hidden_size
    ffn = shape.activated_size / cut.gen_tp
    summed = cut.gen_tp > 1
    attention = summed * hidden + 2 * (shape.q_size / cut.gen_tp + kv_width(shape, cut.gen_tp))
    network = np.maximum(3 * ffn, (1 + summed) * hidden + ffn)
    width = 3 * hidden + np.maximum(network, attention)
    return {
        "generation_weights": extra,
        "gather": np.minimum(extra, BUCKET_BYTES),
        "activations": tokens * width * size,
        "logits": drawn * shape.vocab_size * (size + LOGIT_BYTES),
    }


def _replaced_weights(model: Model, cut: Strategy) -> Array:
    """Return the bytes of the weights that a generator is built with and then frees.

    A generator that shares the trainer's storage (rollout.weights flat or blocks) is first built
    with weights of its own.
    """
    rollout = model.rollout
    assert rollout is not None, model.name
    if rollout.weights not in ("flat", "blocks") or model.weights_from is not None:
        return 0.0 * cut.dp
    return model.shape.num_parameters * rollout.element_bytes / (cut.gen_tp * cut.gen_pp)


def _separate_weights(model: Model, cut: Strategy) -> Array:
    """Return the bytes of generation weights that are not in the trainer's storage.

    All of M/(t_g p_g), or what exceeds the trainer's M/(t p) if generator and trainer share storage
    (rollout.weights flat or blocks, with an engine that can). 0 for a separate generator, whose
    weights are its state.
    """
    rollout = model.rollout
    shape = model.shape
    assert rollout is not None, model.name
    if model.weights_from is not None:
        return 0.0 * cut.dp
    needed = shape.num_parameters * rollout.element_bytes / (cut.gen_tp * cut.gen_pp)
    available = shape.num_parameters * rollout.element_bytes / (cut.tp * cut.pp)
    shares = rollout.weights in ("flat", "blocks") and model.engine.facts.shares_storage
    if shares:
        return np.maximum(needed - available, 0.0)
    return needed + 0.0 * cut.dp
