"""Seconds of training and of inference (paper Appendix C): passes, pipeline, gradients, optimizer.

    update = (m + p - 1) (F + B) + p2p + gradient sync + optimizer + host
    F = layers/p * pass + head        B = 2 F, + F of the layers where activations are recomputed

with m micro-batches of a mini-batch's rows/d, rounded up: a pool that does not divide the rows
waits for its busiest rank. Gradients are reduce-scattered in float32 and weights all-gathered once
an optimizer step, over the data-parallel group, without overlap. Data-parallel engines gather the
weights instead. Arrays over strategies; parts by cause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmdflow.mapping.collective import all_gather, dp_per_node, point_to_point
from spmdflow.mapping.dataflow import Engine, Model, Workload
from spmdflow.mapping.layer import Pass, Precision, head_seconds, layer_pass
from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.strategy import Array, Cut, stage_share

Parts = dict[str, Array]
"""Seconds by cause, one entry a strategy."""

GRADIENT_BYTES = 4
ADAM_BYTES = 28
"""Of a parameter in one step: weight, two moments read and written, gradient read, in float32."""


def training_parts(model: Model, workload: Workload, cut: Cut, hw: Hardware) -> Parts:
    """One training call: all its updates."""
    rows = np.ceil(workload.num_sequences * workload.num_epochs / workload.num_updates / cut.dp)
    stage = _stage(model, workload, rows, cut, hw)
    passes, sharding = 3 + cut.recompute, model.engine.sharding
    parts = {
        "compute": stage.forward.compute * passes + 3 * stage.head,
        "memory": stage.forward.memory * passes,
        "launch": stage.forward.launch * passes,
        "tensor_parallel": stage.forward.tensor_parallel * (2 + cut.recompute),
        "pipeline": 2 * stage.hand_over,
        "weight_gather": sharding.micro_batch_gathers * stage.gather,
        "gradient_sync": sharding.micro_batch_reductions * stage.reduce,
    }
    parts = _pipelined(parts, stage.num_micro, cut)
    parts["weight_gather"] = parts["weight_gather"] + sharding.gathers * stage.gather
    parts["gradient_sync"] = parts["gradient_sync"] + sharding.reductions * stage.reduce
    local = local_parameters(model, cut)
    parts["optimizer"] = local / share_of(sharding.optimizer, cut) * ADAM_BYTES / hw.memory_rate
    parts["host"] = np.full(len(cut), hw.update_seconds)
    total = {name: seconds * workload.num_updates for name, seconds in parts.items()}
    total["host"] = total["host"] + hw.call_seconds
    return total


def inference_parts(model: Model, workload: Workload, cut: Cut, hw: Hardware) -> Parts:
    """One forward call over all rows."""
    rows = np.ceil(workload.num_sequences / cut.dp)
    stage, sharding = _stage(model, workload, rows, cut, hw), model.engine.sharding
    parts = {
        "compute": stage.forward.compute + stage.head,
        "memory": stage.forward.memory,
        "launch": stage.forward.launch,
        "tensor_parallel": stage.forward.tensor_parallel,
        "pipeline": stage.hand_over,
        "weight_gather": sharding.parameters * sharding.frees_gathered * stage.gather,
    }
    parts = _pipelined(parts, stage.num_micro, cut)
    once = sharding.parameters * (not sharding.frees_gathered)
    parts["weight_gather"] = parts["weight_gather"] + once * stage.gather
    parts["host"] = np.full(len(cut), hw.call_seconds)
    return parts


def local_parameters(model: Model, cut: Cut) -> Array:
    """Weights of a rank of the busiest stage."""
    return model.shape.num_parameters / cut.tp * stage_share(model.shape.num_layers, cut.pp)


def precision(engine: Engine) -> Precision:
    """Of an engine's passes."""
    return Precision(engine.dtype, engine.element_bytes)


def micro_batch_rows(engine: Engine, tokens: int) -> int:
    """Rows of one forward, at most."""
    if engine.micro_batch_tokens is None:
        return engine.micro_batch_rows
    return max(engine.micro_batch_tokens // tokens, 1)


def share_of(divided: bool, cut: Cut) -> Array:
    """Data-parallel ranks among which something is divided, or 1."""
    return cut.dp if divided else np.ones(len(cut))


@dataclass(frozen=True)
class _Stage:
    """What one micro-batch costs on one pipeline stage, and how many there are."""

    forward: Pass
    head: Array
    hand_over: Array
    gather: Array
    """All weights of the rank's stage, once."""
    reduce: Array
    """All its gradients, once."""
    num_micro: Array


def _stage(model: Model, workload: Workload, rows: Array, cut: Cut, hw: Hardware) -> _Stage:
    engine, shape, how = model.engine, model.shape, precision(model.engine)
    micro = np.minimum(micro_batch_rows(engine, workload.tokens), rows)
    tokens = micro * workload.tokens
    layers = np.ceil(shape.num_layers / cut.pp)
    one = layer_pass(shape, tokens, np.asarray(workload.tokens / 2), cut.tp, hw, how)
    forward = Pass(*(layers * getattr(one, name) for name in one.__dataclass_fields__))
    size = tokens * shape.hidden_size * how.element_bytes
    crosses = cut.tp * cut.pp > hw.gpus_per_node
    hand_over = point_to_point(np.where(crosses, size, size / cut.tp), crosses, hw)
    local = local_parameters(model, cut)
    per_node = dp_per_node(cut.tp * cut.pp, cut.dp, hw)
    in_float32 = engine.facts.float32_weights and not engine.sharding.parameters
    weight_bytes = GRADIENT_BYTES if in_float32 else how.element_bytes
    return _Stage(
        forward,
        head_seconds(shape, tokens, cut.tp, hw, how),
        np.where(cut.pp > 1, hand_over, 0.0),
        all_gather(local * weight_bytes, cut.dp, per_node, hw),
        all_gather(local * GRADIENT_BYTES, cut.dp, per_node, hw),
        np.ceil(rows / micro),
    )


def _pipelined(parts: Parts, num_micro: Array, cut: Cut) -> Parts:
    """Every micro-batch, and the bubble while the pipeline fills and drains."""
    one: Array = sum(parts.values(), np.zeros(len(cut)))
    whole = {name: seconds * num_micro for name, seconds in parts.items()}
    return whole | {"bubble": (cut.pp - 1) * one}
