"""Seconds of calls by cause (paper Appendix C): training, inference, generation.

    update = (m + p - 1) (F + B) + p2p + gradient sync + optimizer + host
    F = layers/p * pass + head        B = 2 F, + F of the head, + F of the layers if recomputed

with m micro-batches of a mini-batch's rows/d, rounded up, as a pool that does not divide the rows
waits for its busiest rank. Once per optimizer step, gradients are reduce-scattered in float32 and
weights all-gathered over the data-parallel group. Only the engine option `overlap` hides part of
it. Data-parallel engines gather the weights instead.

Generation consists of prefill, decode, waves, and the transition before it. A replica of t_g * p_g
ranks decodes its share of the sequences, in waves of equal size if its KV cache is too small for
all of them. A decode step reads the weights once (through the matrices' bytes) and every sequence's
keys and values (at the middle of its response), and reduces twice per layer over t_g. A layer
takes at least the launch time of its kernels, which is longer outside a CUDA graph. The host takes
time per step and per sequence. vLLM with asynchronous scheduling and the built-in generator work
ahead of the device: a step takes the longer of both times, plus a gap. Otherwise both add up. With
p_g stages, a step passes them one after another, and the next step starts when the previous one has
ended. An engine inside the trainer's processes (vLLM's external launcher) has only one batch in
flight, so stages save memory but no time.

Matrices: FLOPs over the rate of large matrices, plus the bytes of both operands and the result over
the memory's rate. The sum is compute-bound for many tokens and wide shards, and memory-bound for
few tokens (decoding) or narrow shards. No efficiency curve is fitted.

Every function takes one strategy and returns numbers, or many strategies and returns arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spmdflow.kind.generator import PREFILL_TOKENS
from spmdflow.mapping.collective import all_gather, all_reduce, all_to_all, point_to_point
from spmdflow.mapping.context import attention_message_seconds
from spmdflow.mapping.dataflow import Array, Engine, Model, Precision, Rollout, Strategy, Workload
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.share import (
    share_of,
    stage_parameters,
    stepped_parameters,
    trained_parameters,
    weights_of_replica,
)
from spmdflow.mapping.shared_prompt import (
    cached_tokens,
    packed_shares,
    prompt_size,
    prompts_admitted,
    rows_within,
    sequence_tokens,
)
from spmdflow.weights.architecture import Architecture

Parts = dict[str, Array]
"""Seconds by cause, or bytes by use."""

GRADIENT_BYTES = 4
_FORWARD_BYTES = (84, 10, 20, 36)
_BACKWARD_BYTES = (222, 18, 28, 94)
"""Bytes per token and layer for each unit of (hidden size, ffn size, width of queries and keys, the
same if they are normed) in bfloat16. Counted on transformers' layers, whose norms are computed in
float32 (`tests/unit/mapping/test_kernels.py` counts again)."""
LOGIT_BYTES = (46, 44)
"""Bytes that the float32 passes over a logit move in forward and backward, with a bfloat16 model.
The passes are copy, scale, max, subtract, clamp, exp and sum, and their derivatives. Counted in
`objectives/log_prob.py`."""

CHECKSUM_BYTES = 64
"""Bytes that hashing one weight moves: five passes over words of eight bytes (`blocks/hash.py`)."""


def total(parts: Parts) -> Array:
    """Sum of all parts."""
    return sum(parts.values())


def add_parts(first: Parts, second: Parts) -> Parts:
    """Return the sum of two, part by part. A part that one of them lacks counts as 0."""
    result = {}
    for name in {**first, **second}:
        result[name] = first.get(name, 0.0) + second.get(name, 0.0)
    return result


@dataclass(frozen=True)
class PassTokens:
    """What a rank computes in one micro-batch."""

    tokens: Array
    """Without further copies of a prompt that rows share and the engine computes once."""
    context: Array
    """Tokens that each token attends to on average."""
    answered: Array
    """Response tokens, for which the head runs."""


def pass_parts(
    model: Model, workload: Workload, cut: Strategy, hw: Hardware, *, trains: bool
) -> Parts:
    """Return the seconds of a training call with all its updates, or of a forward call, by cause.

    All rows have the same length (`update_parts` for one update). All updates add up, and the call
    adds call_seconds.
    """
    micro, num_micro = mean_micro_batch(model, workload, cut, trains=trains)
    forwards = workload.num_forwards
    parts = update_parts(model, micro, num_micro, cut, hw, trains=trains, num_forwards=forwards)
    if trains:
        parts = {name: seconds * workload.num_updates for name, seconds in parts.items()}
    return add_parts(parts, {"host": hw.call_seconds})


def mean_micro_batch(
    model: Model, workload: Workload, cut: Strategy, *, trains: bool
) -> tuple[PassTokens, Array]:
    """Return a micro-batch of rows of mean length, and how many a rank has in one update."""
    rows, num_micro = micro_batches(model, workload, cut, trains=trains)
    of_rank = rows_per_rank(workload, cut, trains=trains)
    shares = packed_shares(model, workload, of_rank, num_micro)
    micro = PassTokens(
        tokens=rows * workload.tokens * shares.tokens,
        context=workload.tokens / 2 * (shares.squares / shares.tokens),
        answered=rows * workload.response_tokens,
    )
    return micro, num_micro


def update_parts(
    model: Model,
    micro: PassTokens,
    num_micro: Array,
    cut: Strategy,
    hw: Hardware,
    *,
    trains: bool,
    num_forwards: int = 0,
) -> Parts:
    """Return the seconds of one optimizer step, or of a forward over the same rows, by cause.

    A micro-batch (`_micro_batch_parts`, plus weight gathers and gradient reductions that the
    engine does for each) is counted num_micro times, and the bubble (pp - 1) / virtual_size times.
    An update adds once: other gathers and reductions, the optimizer and host time. With `overlap`,
    a micro-batch's forward (a third of it) hides the gather and its backward the reduction.
    num_forwards: forwards over the same rows before an update.
    """
    sharding = model.engine.sharding
    parts = _micro_batch_parts(model, micro, cut, hw, trains=trains)
    gather, reduce, between = _weight_traffic(model, cut, hw)
    if trains:
        each = sharding.micro_batch_gathers
        once = sharding.gathers
    else:  # sharded weights are gathered; for each micro-batch if its pass frees them
        each = int(sharding.parameters and sharding.frees_gathered)
        once = int(sharding.parameters) - each
    parts["weight_gather"] = each * gather
    if trains:
        parts["gradient_sync"] = sharding.micro_batch_reductions * reduce
    one_micro_batch = total(parts)
    # a backward takes twice as long as a forward; only traffic beyond the overlap adds time
    overlapped = one_micro_batch / 3 if "overlap" in model.engine.options else 0.0
    parts = {name: seconds * num_micro for name, seconds in parts.items()}
    parts["weight_gather"] = parts["weight_gather"] + np.maximum(once * gather - overlapped, 0.0)
    # filling and draining the pipeline, for one model chunk on each stage
    parts["bubble"] = (cut.pp - 1) * one_micro_batch / model.engine.virtual_size
    if not trains:
        return parts
    reductions = np.maximum(sharding.reductions * reduce - 2 * overlapped, 0.0)
    parts["gradient_sync"] = parts["gradient_sync"] + reductions + between
    # weight and moments are read and written, the gradient is read, in float32
    size = 4 * (3 + 2 * model.engine.moments)
    parts["optimizer"] = stepped_parameters(model, cut) * size / hw.memory_rate
    for _ in range(num_forwards):
        forward = update_parts(model, micro, num_micro, cut, hw, trains=False)
        parts = add_parts(parts, forward)
    return parts | {"host": hw.update_seconds}


def micro_batches(
    model: Model, workload: Workload, cut: Strategy, *, trains: bool
) -> tuple[Array, Array]:
    """Return (rows of a micro-batch, number of micro-batches) of a rank, for a call or one update.

    A micro-batch has at most `Model.rows_at` of its `rows_per_rank`. Prompts that rows share count
    in every row here, as the workers count them.
    """
    rows = rows_per_rank(workload, cut, trains=trains)
    micro = np.minimum(model.rows_at(workload.tokens), rows)
    return micro, np.ceil(rows / micro)


def rows_per_rank(workload: Workload, cut: Strategy, *, trains: bool) -> Array:
    """Return the rows of a rank in a forward call, or in one update of a training call.

    ceil(num_sequences * epochs / updates / dp), with epochs = updates = 1 for a forward call.
    """
    epochs, updates = (workload.num_epochs, workload.num_updates) if trains else (1, 1)
    return np.ceil(workload.num_sequences * epochs / updates / cut.dp)


def _micro_batch_parts(
    model: Model, micro: PassTokens, cut: Strategy, hw: Hardware, *, trains: bool
) -> Parts:
    """Return the seconds of one micro-batch in the busiest stage, and of sending it on, by cause.

    A layer counts once for the forward, and for training twice more for the backward (once with
    adapters) and once for recomputation. The head counts four times in training, as the backward
    runs it again. It is computed for response tokens only.
    """
    engine = model.engine
    shape = model.shape
    micro = replace(micro, tokens=micro.tokens / cut.cp, answered=micro.answered / cut.cp)
    layers = np.ceil(shape.num_layers / cut.pp)
    one = layer_pass(shape, micro.tokens, micro.context, cut.tp, hw, engine, ep=cut.ep)
    passes = (2 if model.adapters else 3) + cut.recompute if trains else 1
    parts = {}
    for name, seconds in one.items():
        parts[name] = layers * seconds * passes
    if trains and "selective_recompute" in engine.options:
        flops = attention_flops(shape, micro.tokens, micro.context, cut.tp)
        parts["compute"] = parts["compute"] + layers * flops / hw.flops(engine.dtype)
    head = head_seconds(shape, micro.answered, cut.tp, hw, engine)
    parts["compute"] = parts["compute"] + (4 if trains else 1) * head  # backward runs it again
    if engine.own_kernels:
        moved = _logit_bytes(shape, micro.answered, cut.tp, trains=trains)
        if not hw.is_cpu:  # a CPU's compute_efficiency has the other kernels of a layer in it
            forward, backward = elementwise_bytes(shape, engine)
            per_token = forward
            if trains:
                per_token = forward * (1 + cut.recompute) + backward
            moved = moved + layers * micro.tokens * per_token
        parts["memory"] = parts["memory"] + moved / hw.memory_rate
    reductions = 2 + cut.recompute if trains else 1
    parts["tensor_parallel"] = layers * one["tensor_parallel"] * reductions
    computing = attention_flops(shape, micro.tokens, micro.context, cut.tp) / hw.flops(engine.dtype)
    messages = attention_message_seconds(
        model, micro.tokens, cut, hw, computing=computing, trains=trains
    )
    parts["context_parallel"] = layers * messages
    parts["experts"] = layers * _exchange_seconds(model, micro.tokens, cut, hw) * reductions
    size = micro.tokens * shape.hidden_size * engine.element_bytes
    crosses = cut.tp * cut.cp * cut.pp > hw.gpus_per_node
    hand_over = point_to_point(np.where(crosses, size, size / cut.tp), crosses, hw)
    hand_overs = (2 if trains else 1) * engine.virtual_size
    parts["pipeline"] = hand_overs * np.where(cut.pp > 1, hand_over, 0.0)
    return parts


def _exchange_seconds(model: Model, tokens: Array, cut: Strategy, hw: Hardware) -> Array:
    """Return the seconds in which a layer's tokens go to their experts and back, in a forward.

    The ep ranks exchange k copies of the tokens of each, twice. Ranks that divide an expert (tp)
    gather the copies and sum the results over each other, k times what an all-reduce of the tokens
    takes; one of these `layer_pass` has counted. 0 for a dense model and an engine that never
    divides experts.
    """
    experts = model.shape.mixture
    if experts is None or "ep" not in model.engine.facts.axes:
        return 0.0 * tokens
    size = tokens * model.shape.hidden_size * model.engine.element_bytes
    copies = experts.num_chosen * size
    per_node = np.clip(hw.gpus_per_node // (cut.tp * cut.pp), 1, cut.ep)
    exchange = 2 * all_to_all(copies / cut.tp, cut.ep, per_node, hw)
    inside = all_reduce(copies - size, cut.tp, np.minimum(cut.tp, hw.gpus_per_node), hw)
    return (exchange + inside) * (experts.num_layers / max(model.shape.num_layers, 1))


def _logit_bytes(shape: Architecture, tokens: Array, tp: Array, *, trains: bool) -> Array:
    """Bytes that a rank's kernels move for the logits of so many tokens; 0 for a scalar head."""
    if shape.head != "causal_lm":
        return 0.0 * tokens
    per_logit = sum(LOGIT_BYTES) if trains else LOGIT_BYTES[0]
    return tokens * shape.vocab_size / tp * per_logit


def elementwise_bytes(shape: Architecture, engine: Engine) -> tuple[float, float]:
    """Return the bytes that kernels besides matrix products move per token and layer.

    They are (of a forward, of a backward), for an engine whose kernels are separate; otherwise 0.
    Each operator reads its operands and writes its result: norms and residual sums as wide as the
    hidden states, rotations and norms as wide as queries and keys, the gated activation.
    """
    if not engine.facts.separate_kernels:
        return 0.0, 0.0
    heads = shape.q_size + shape.kv_size
    scale = engine.element_bytes / 2
    moved = []
    for hidden, ffn, turned, normed in (_FORWARD_BYTES, _BACKWARD_BYTES):
        wide = ffn * shape.activated_size + (turned + normed * shape.qk_norm) * heads
        moved.append(hidden * shape.hidden_size + scale * wide)
    return moved[0], moved[1]


def _weight_traffic(model: Model, cut: Strategy, hw: Hardware) -> tuple[Array, Array, Array]:
    """Return the seconds of a weight gather, a gradient reduction and one between shard groups.

    These are an all-gather of a stage's weights and a reduce-scatter of its float32 gradients, both
    in the group that shares one copy, and an all-reduce of a rank's shard of the gradients with the
    other groups (0 with one group). Experts that are divided over ep ranks have groups of their
    own, of dp * cp / ep ranks.
    """
    engine = model.engine
    others, experts = stage_parameters(model, cut)
    is_divided = cut.ep > 1
    local = np.where(is_divided, others, others + experts)
    per_node = np.clip(hw.gpus_per_node // (cut.tp * cut.pp), 1, cut.weight_ranks)
    in_float32 = engine.facts.float32_weights and not engine.sharding.parameters
    weight_bytes = GRADIENT_BYTES if in_float32 else engine.element_bytes
    size = engine.shard_size or cut.weight_ranks
    trained = trained_parameters(model, cut) if model.adapters else local
    gradients = trained * GRADIENT_BYTES
    copies = cut.weight_ranks / size
    copies_in_node = np.maximum(per_node / size, 1)
    per_node = np.minimum(per_node, size)
    between = 2 * all_gather(gradients / size, copies, copies_in_node, hw)
    gather = all_gather(local * weight_bytes, size, per_node, hw)
    reduce = all_gather(gradients, size, per_node, hw)
    group = cut.weight_ranks / cut.ep
    near = np.clip(hw.gpus_per_node // (cut.tp * cut.pp * cut.ep), 1, group)
    own = experts / cut.ep
    of_experts = all_gather(own * weight_bytes, group, near, hw)
    gather = gather + np.where(is_divided, of_experts, 0.0)
    of_experts = all_gather(own * GRADIENT_BYTES, group, near, hw)
    return gather, reduce + np.where(is_divided, of_experts, 0.0), between


def generation_parts(
    model: Model, workload: Workload, cut: Strategy, hw: Hardware, *, kv_bytes: Array
) -> Parts:
    """Return the seconds of a generation with `kv_bytes` of cache per rank, by cause.

    The busiest replica decodes its sequences in ceil(rows / concurrency) waves of equal size, each
    of response_tokens steps, after the prefill of all prompts. Infinite if no sequence fits. A
    prompt that rows share is run and read once if the generator does so.
    """
    rows = rows_per_replica(workload, cut)
    concurrent = concurrency(model, workload, cut, kv_bytes)
    with np.errstate(divide="ignore", invalid="ignore"):
        waves = np.where(concurrent >= 1, np.ceil(rows / np.maximum(concurrent, 1)), np.inf)
        batch = rows / waves
    prompts = prompts_admitted(model, workload, rows, concurrent)
    context = workload.prompt_tokens + workload.response_tokens / 2
    read = None
    if prompt_size(model, workload) > 1:
        read = workload.prompt_tokens * prompts / rows + workload.response_tokens / 2
    parts = decode_parts(model, cut, hw, batch=np.maximum(batch, 1e-9), context=context, read=read)
    steps = waves * workload.response_tokens
    parts = {name: seconds * steps for name, seconds in parts.items()}
    tokens = prompts * workload.prompt_tokens
    parts["prefill"] = prefill_seconds(model, tokens, workload.prompt_tokens / 2, cut, hw)
    parts["host"] = parts["host"] + hw.call_seconds
    return parts


def rows_per_replica(workload: Workload, cut: Strategy) -> Array:
    """Number of sequences of the busiest generation replica."""
    replicas = cut.num_ranks / (cut.gen_tp * cut.gen_pp)
    return np.ceil(workload.num_sequences / replicas)


def concurrency(model: Model, workload: Workload, cut: Strategy, kv_bytes: Array) -> Array:
    """Return how many sequences a replica decodes at once, in [0, its number of sequences].

    As many as the cache has room for when all are complete, at most max_batch_size.
    kv_bytes: cache of a rank; a smaller rollout.kv_cache_bytes counts instead.
    """
    rollout = _rollout(model)
    if rollout.kv_cache_bytes is not None:
        kv_bytes = np.minimum(kv_bytes, rollout.kv_cache_bytes)
    if prompt_size(model, workload) == 1:
        most = np.floor(kv_bytes / sequence_bytes(model, workload, cut))
    else:
        most = rows_within(model, workload, kv_bytes / _token_bytes(model, cut))
    if rollout.max_batch_size is not None:
        most = np.minimum(most, rollout.max_batch_size)
    return np.clip(most, 0, rows_per_replica(workload, cut))


def sequence_bytes(model: Model, workload: Workload, cut: Strategy) -> Array:
    """KV cache of one full sequence on one rank."""
    return sequence_tokens(model, workload) * _token_bytes(model, cut)


def cache_bytes(model: Model, workload: Workload, cut: Strategy, num_rows: Array) -> Array:
    """KV cache of num_rows full sequences on one rank, a shared prompt as often as it is kept."""
    return cached_tokens(model, workload, num_rows) * _token_bytes(model, cut)


def _token_bytes(model: Model, cut: Strategy) -> Array:
    """Keys and values of one token on one rank."""
    layers = np.ceil(model.shape.num_layers / cut.gen_pp)
    return 2 * layers * kv_width(model.shape, cut.gen_tp) * _rollout(model).element_bytes


def transition_seconds(model: Model, cut: Strategy, hw: Hardware) -> Array:
    """Return the seconds to reshard weights from the training to the generation layout once.

    An all-gather in the group of ranks whose shards make one generation shard: the shard group of a
    sharding engine, otherwise tp / gen_tp * pp / gen_pp ranks. A separate generator receives over
    the network, which the ranks of a node share. 0 if no rank receives anything.
    """
    received = transition_bytes(model, cut)
    if model.weights_from is not None:
        node = received * np.minimum(hw.gpus_per_node, cut.num_ranks)
        return node / hw.network_rate + hw.collective_base_seconds
    if model.engine.sharding.parameters:
        group = share_of(True, model, cut)
        per_node = np.minimum(group, hw.gpus_per_node)
    else:
        tensor = cut.tp / cut.gen_tp
        stages = cut.pp / cut.gen_pp
        group = np.maximum(tensor * stages, 1)
        near = np.clip(hw.gpus_per_node // cut.tp, 1, np.maximum(stages, 1))
        per_node = np.clip(np.floor(tensor * near), 1, np.minimum(group, hw.gpus_per_node))
    gathered = np.where(group > 1, received * group / np.maximum(group - 1, 1), 0.0)
    return np.where(received > 0, all_gather(gathered, group, per_node, hw), 0.0)


def checksum_seconds(model: Model, cut: Strategy, hw: Hardware) -> Array:
    """Return the seconds in which both sides of a weight sync hash their weights.

    A rank hashes its shards of the trainer's weights, unless the generator has ranks of its own,
    and all weights of the generator.
    """
    rollout = _rollout(model)
    elements = model.shape.num_parameters / (cut.gen_tp * cut.gen_pp)
    if model.weights_from is None:
        shards = cut.tp * cut.pp * share_of(model.engine.sharding.parameters, model, cut)
        elements = elements + weights_of_replica(model.shape, cut) / shards
    return rollout.checks_per_sync * elements * CHECKSUM_BYTES / hw.memory_rate


def transition_bytes(model: Model, cut: Strategy) -> Array:
    """Return the bytes that each rank receives when weights are resharded for generation.

    What it needs, M/(t_g p_g), minus its own M/(t p) (Table 2: (d_g - 1)/(t p) M) or, with sharded
    weights, minus its share of what it needs. A separate generator receives all that it needs. M
    counts only the adapters if only these are sent.
    """
    rollout = _rollout(model)
    if rollout.weights == "adapter":
        sent = model.adapters
    else:
        sent = model.shape.num_parameters
    weights = sent * rollout.element_bytes
    needed = weights / (cut.gen_tp * cut.gen_pp)
    if model.weights_from is not None:
        return needed
    if model.engine.sharding.parameters:
        return needed * (1 - 1 / share_of(True, model, cut))
    own = weights_of_replica(model.shape, cut) * rollout.element_bytes
    if rollout.weights == "adapter":
        own = weights
    return np.maximum(needed - own / (cut.tp * cut.pp), 0.0)


def _rollout(model: Model) -> Rollout:
    assert model.rollout is not None, f"{model.name} does not generate"
    return model.rollout


def decode_parts(
    model: Model,
    cut: Strategy,
    hw: Hardware,
    *,
    batch: Array,
    context: Array,
    read: Array | None = None,
) -> Parts:
    """Return the seconds of one decode step of `batch` sequences on a replica, by cause.

    `launch` is the part of a layer's launch time (longer if eager) that its compute, memory and
    kv_read time do not cover. `host` is the host's time. If the host works ahead
    (`Rollout.overlaps_host`, on a device, with one stage), it is only what the device's time does
    not cover, plus step_gap_seconds; eager launches then belong to the host's time.
    context: tokens that the new token of a sequence attends to.
    read: tokens whose keys and values are read, for each sequence; None: `context`. They are fewer
    if sequences share a prompt that is read once.
    """
    shape = model.shape
    how = _rollout(model)
    if read is None:
        read = context
    one = layer_pass(shape, batch, context, cut.gen_tp, hw, how)
    width = kv_width(shape, cut.gen_tp)
    kv = 2 * batch * read * width * how.element_bytes / hw.kv_rate
    ahead = np.logical_and(how.overlaps_host and not hw.is_cpu, cut.gen_pp == 1)
    eager = hw.eager_layer_seconds if how.eager else hw.layer_floor_seconds
    floor = np.where(ahead, hw.layer_floor_seconds, eager)
    launch = np.maximum(floor - one["compute"] - one["memory"] - kv, 0)
    head = head_seconds(shape, batch, cut.gen_tp, hw, how)
    parts = {
        "compute": shape.num_layers * one["compute"],
        "weights": shape.num_layers * one["memory"] + head,
        "kv_read": shape.num_layers * kv,
        "launch": shape.num_layers * launch,
        "tensor_parallel": shape.num_layers * one["tensor_parallel"],
        "pipeline": _hand_over_seconds(model, cut, hw, batch),
    }
    host = _host_seconds(model, hw, batch)
    launches = shape.num_layers * eager * how.eager
    uncovered = np.maximum(host + launches - total(parts), 0) + hw.step_gap_seconds
    return parts | {"host": np.where(ahead, uncovered, host)}


def _host_seconds(model: Model, hw: Hardware, batch: Array) -> Array:
    """Host time of one decode step of `batch` sequences.

    A generator that calls its operators from Python takes operator_seconds for each on a device.
    Others schedule requests: step_seconds + sequence_step_seconds * batch.
    """
    facts = _rollout(model).facts
    if facts.layer_operators and not hw.is_cpu:
        operators = model.shape.num_layers * facts.layer_operators + facts.step_operators
        return operators * hw.operator_seconds + 0.0 * batch
    return hw.step_seconds + hw.sequence_step_seconds * batch


def prefill_seconds(
    model: Model, tokens: Array, context: Array, cut: Strategy, hw: Hardware
) -> Array:
    """Return the seconds of prompts of `tokens` tokens in all, in passes of at most PREFILL_TOKENS.

    context: tokens that each token attends to on average.
    """
    passes = np.ceil(tokens / PREFILL_TOKENS)
    each = tokens / passes
    one = layer_pass(model.shape, each, context, cut.gen_tp, hw, _rollout(model))
    hand_overs = _hand_over_seconds(model, cut, hw, each)
    return passes * (model.shape.num_layers * total(one) + hand_overs)


def _hand_over_seconds(model: Model, cut: Strategy, hw: Hardware, tokens: Array) -> Array:
    """Seconds to send activations from each generation stage to the next."""
    size = tokens * model.shape.hidden_size * _rollout(model).element_bytes
    crosses = cut.gen_tp * cut.gen_pp > hw.gpus_per_node
    return (cut.gen_pp - 1) * point_to_point(size, crosses, hw)


def kv_width(shape: Architecture, tp: Array) -> Array:
    """Width of a rank's keys; kv heads are replicated if there are fewer than tp."""
    return np.maximum(shape.kv_size / tp, shape.head_dim)


def attention_flops(shape: Architecture, tokens: Array, context: float, tp: Array) -> Array:
    """FLOPs of one layer's attention scores and their products with the values."""
    return 4 * tokens * context * shape.q_size / tp


def layer_pass(
    shape: Architecture,
    tokens: Array,
    context: float,
    tp: Array,
    hw: Hardware,
    how: Precision,
    *,
    ep: Array = 1,
) -> Parts:
    """Return the seconds of one layer over `tokens` tokens on tp ranks, by cause.

    compute: FLOPs of the matrices and of attention over their rate. memory: bytes of operands and
    results over the memory's rate. launch: launch overhead that these two do not hide.
    tensor_parallel: two all-reduces of the hidden states. ep: ranks that divide the experts; each
    computes as many tokens as before, with its own experts.
    context: tokens that each token attends to on average.
    how: the engine or rollout whose dtype is used.
    """
    hidden = shape.hidden_size
    ffn = shape.activated_size / tp
    queries = shape.q_size / tp
    keys = kv_width(shape, tp)
    matrices = [
        (hidden, queries + 2 * keys),
        (queries, hidden),
        (hidden, (1 + shape.gated) * ffn),
        (ffn, hidden),
    ]
    flops = attention_flops(shape, tokens, context, tp)
    moved = 0.0 * tokens
    for inner, outer in matrices:
        flops = flops + 2 * tokens * inner * outer
        moved = moved + tokens * inner + inner * outer + tokens * outer
    moved = moved + _further_experts(shape, tokens, ep) * (2 + shape.gated) * hidden / tp
    compute = flops / hw.flops(how.dtype)
    memory = moved * how.element_bytes / hw.memory_rate
    launch = np.maximum(hw.layer_floor_seconds - compute - memory, 0)
    size = tokens * hidden * how.element_bytes
    per_node = np.minimum(tp, hw.gpus_per_node)
    parts = {"compute": compute, "memory": memory, "launch": launch}
    return parts | {"tensor_parallel": 2 * all_reduce(size, tp, per_node, hw)}


def _further_experts(shape: Architecture, tokens: Array, ep: Array) -> Array:
    """Return the inner width of the experts that are read in addition to a single token's.

    Of E experts, n tokens with k each use E (1 - (1 - k / E)^n) if all are as likely. A rank with
    E / ep of them computes those of ep n tokens. 0 for a dense model.
    """
    experts = shape.mixture
    if experts is None:
        return 0.0 * tokens
    unused = (1 - experts.num_chosen / experts.num_experts) ** (tokens * ep)
    read = experts.num_experts / ep * (1 - unused) - experts.num_chosen
    share = experts.num_layers / max(shape.num_layers, 1)
    return np.maximum(read, 0) * experts.expert_size * share


def head_seconds(
    shape: Architecture, tokens: Array, tp: Array, hw: Hardware, how: Precision
) -> Array:
    """Return the seconds of the output layer over `tokens` tokens; 0 for a scalar head.

    FLOPs over their rate plus bytes of operands and results over the memory's rate, with the
    vocabulary divided over tp ranks.
    how: the engine or rollout whose dtype is used.
    """
    if shape.head == "scalar":
        return 0.0 * (tokens + tp)
    inner = shape.hidden_size
    outer = shape.vocab_size / tp
    flops = 2 * tokens * inner * outer / hw.flops(how.dtype)
    moved = tokens * inner + inner * outer + tokens * outer
    return flops + moved * how.element_bytes / hw.memory_rate
