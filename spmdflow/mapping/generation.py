"""Seconds of generation (paper Appendix C): prefill, decode, waves, and the transition before it.

A replica of t_g * p_g ranks decodes its share of the sequences; where its KV cache holds fewer than
all of them, they come in waves of equal size. A decode step reads the weights once (through the
matrices' bytes), every sequence's keys and values (at the middle of its response), reduces twice a
layer over t_g, and costs host time per step and per sequence. With p_g stages a step passes them
one after another and the next step starts when the last one is done: an engine inside the trainer's
processes (vLLM's external launcher) has one batch under way, so stages save memory and not time.
"""

from __future__ import annotations

import numpy as np

from spmdflow.mapping.collective import all_gather, point_to_point
from spmdflow.mapping.dataflow import Model, Rollout, Workload
from spmdflow.mapping.layer import Precision, head_seconds, kv_width, layer_pass
from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.strategy import Array, Cut
from spmdflow.mapping.training import Parts

PREFILL_TOKENS = 8192
"""Tokens that one prefill pass takes at most."""


def generation_parts(
    model: Model, workload: Workload, cut: Cut, hw: Hardware, *, kv_bytes: Array
) -> Parts:
    """One generation call with `kv_bytes` of cache on each rank; infinite where none fits."""
    rollout = _rollout(model)
    how = Precision(rollout.dtype, rollout.element_bytes)
    rows = rows_per_replica(workload, cut)
    held = concurrency(model, workload, cut, kv_bytes)
    with np.errstate(divide="ignore", invalid="ignore"):
        waves = np.where(held >= 1, np.ceil(rows / np.maximum(held, 1)), np.inf)
        batch = rows / waves
    parts = _decode(model, workload, cut, hw, how, np.maximum(batch, 1e-9))
    steps = waves * workload.response_tokens
    parts = {name: seconds * steps for name, seconds in parts.items()}
    parts["prefill"] = _prefill(model, workload, cut, hw, how, rows)
    parts["host"] = parts["host"] + hw.call_seconds
    return parts


def rows_per_replica(workload: Workload, cut: Cut) -> Array:
    """Sequences of the busiest generation replica."""
    replicas = cut.tp * cut.pp * cut.dp / (cut.gen_tp * cut.gen_pp)
    return np.ceil(workload.num_sequences / replicas)


def concurrency(model: Model, workload: Workload, cut: Cut, kv_bytes: Array) -> Array:
    """Whole sequences that a replica holds at once, at most those it has."""
    rollout = _rollout(model)
    if rollout.kv_cache_bytes is not None:
        kv_bytes = np.minimum(kv_bytes, rollout.kv_cache_bytes)
    most = np.floor(kv_bytes / sequence_bytes(model, workload, cut))
    if rollout.max_batch_size is not None:
        most = np.minimum(most, rollout.max_batch_size)
    return np.clip(most, 0, rows_per_replica(workload, cut))


def sequence_bytes(model: Model, workload: Workload, cut: Cut) -> Array:
    """KV cache of one whole sequence on one rank."""
    layers = np.ceil(model.shape.num_layers / cut.gen_pp)
    width = kv_width(model.shape, cut.gen_tp)
    return 2 * layers * width * workload.tokens * _rollout(model).element_bytes


def transition_seconds(model: Model, cut: Cut, hw: Hardware) -> Array:
    """Weights from training's layout to generation's, once before a step's generation."""
    received = transition_bytes(model, cut)
    if model.weights_from is not None:
        node = received * np.minimum(hw.gpus_per_node, cut.tp * cut.pp * cut.dp)
        return node / hw.network_rate + hw.collective_base_seconds
    if model.engine.sharding.parameters:
        group = cut.dp
        per_node = np.minimum(group, hw.gpus_per_node)
    else:
        tensor, stages = cut.tp / cut.gen_tp, cut.pp / cut.gen_pp
        group = np.maximum(tensor * stages, 1)
        near = np.clip(hw.gpus_per_node // cut.tp, 1, np.maximum(stages, 1))
        per_node = np.clip(np.floor(tensor * near), 1, np.minimum(group, hw.gpus_per_node))
    whole = np.where(group > 1, received * group / np.maximum(group - 1, 1), 0.0)
    return np.where(received > 0, all_gather(whole, group, per_node, hw), 0.0)


def transition_bytes(model: Model, cut: Cut) -> Array:
    """Received by each rank (Table 2): (d_g - 1)/(t p) M; from other engines what it lacks."""
    weights = model.shape.num_parameters * _rollout(model).element_bytes
    needed = weights / (cut.gen_tp * cut.gen_pp)
    if model.weights_from is not None:
        return needed
    if model.engine.sharding.parameters:
        return needed * (cut.dp - 1) / cut.dp
    return np.maximum(needed - weights / (cut.tp * cut.pp), 0.0)


def _rollout(model: Model) -> Rollout:
    assert model.rollout is not None, f"{model.name} does not generate"
    return model.rollout


def _decode(
    model: Model, workload: Workload, cut: Cut, hw: Hardware, how: Precision, batch: Array
) -> Parts:
    """One token for every sequence of a wave, by cause."""
    shape, context = model.shape, workload.prompt_tokens + workload.response_tokens / 2
    one = layer_pass(shape, batch, np.asarray(context), cut.gen_tp, hw, how)
    width = kv_width(shape, cut.gen_tp)
    kv = 2 * batch * context * width * how.element_bytes / hw.kv_rate
    launch = np.maximum(hw.layer_floor_seconds - one.compute - one.memory - kv, 0)
    head = head_seconds(shape, batch, cut.gen_tp, hw, how)
    return {
        "compute": shape.num_layers * one.compute,
        "weights": shape.num_layers * one.memory + head,
        "kv_read": shape.num_layers * kv,
        "launch": shape.num_layers * launch,
        "tensor_parallel": shape.num_layers * one.tensor_parallel,
        "pipeline": _hand_overs(model, cut, hw, how, batch),
        "host": hw.step_seconds + hw.sequence_step_seconds * batch,
    }


def _prefill(
    model: Model, workload: Workload, cut: Cut, hw: Hardware, how: Precision, rows: Array
) -> Array:
    """All prompts of a replica, in passes of at most PREFILL_TOKENS."""
    shape, tokens = model.shape, rows * workload.prompt_tokens
    passes = np.ceil(tokens / PREFILL_TOKENS)
    one = layer_pass(
        shape, tokens / passes, np.asarray(workload.prompt_tokens / 2), cut.gen_tp, hw, how
    )
    hand_overs = _hand_overs(model, cut, hw, how, tokens / passes)
    return passes * (shape.num_layers * one.total + hand_overs)


def _hand_overs(model: Model, cut: Cut, hw: Hardware, how: Precision, tokens: Array) -> Array:
    """Activations from each generation stage to the next."""
    size = tokens * model.shape.hidden_size * how.element_bytes
    crosses = cut.gen_tp * cut.gen_pp > hw.gpus_per_node
    return (cut.gen_pp - 1) * point_to_point(size, crosses, hw)
