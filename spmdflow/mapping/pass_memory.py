"""Bytes of the passes of one call in addition to a model's residents, by cause.

A layer keeps for each token for its backward, with element size e and t tensor-parallel ranks:

    2 norms: the input in float32, its normalised copy and the product    2 hidden (4 + 2 e)
    queries, keys, values and the mixed values                            copies (q + kv) e / t
    feed-forward network: gate, up, their activation and product          copies ffn e / t
    hidden states that experts read and return                            copies k hidden e

`EngineKind` has the number of copies. Attention's scores are not kept (flash kernels). In float32,
attention runs for one length after another, and the results of packed rows are concatenated into
one more copy of q; on a GPU, keys and values are repeated to as many heads as queries have. A
prompt that rows share counts once, but attention gets a copy of its keys and values for each of
these rows. Ranks that divide rows have 1/cp of the tokens, and of the heads in attention; where
they gather keys instead, a layer keeps the keys and values of all tokens. Under sequence
parallelism, the norms' part is divided by t too. With recomputation a layer keeps only its input,
and all of the above while its own backward runs. The first stage of a pipeline keeps min(m, p)
micro-batches (1F1B). The head of a causal LM is computed only where a response token is predicted,
and for a block of the vocabulary at a time (`objectives.log_prob`), so full logits never exist.

During the backward of a layer, an engine that stores float32 and gathers units (FSDP2) has: the
unit of embedding and head, the layer's gathered weights and their gradients, the buffer into which
the next layer is gathered, and the float32 buffer from which the previous layer's gradients are
reduced. Gradients that are reduced only with the step's last micro-batch are summed in float32
(keep_gathered, stage 1).

A pass is modelled as a few moments, of which the largest counts.
`tests/simcuda/test_traced_memory.py` compares all of it with traces of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.mapping.context import gathers_keys, passes_keys
from spmdflow.mapping.dataflow import Array, Model, Strategy, Workload
from spmdflow.mapping.seconds import (
    GRADIENT_BYTES,
    Parts,
    kv_width,
    micro_batches,
    rows_per_rank,
    total,
)
from spmdflow.mapping.share import share_of, stepped_parameters
from spmdflow.mapping.shared_prompt import packed_shares
from spmdflow.objectives.log_prob import CHUNK_ELEMENTS
from spmdflow.weights.architecture import Architecture

_SCORE_BYTES = 4
"""Of an attention score that is stored."""
_FORWARD_SCORE_BYTES = {"sinks": 10, "caps": 12}
"""Of copies of a score that exist at the same time in a forward."""
_BACKWARD_SCORE_BYTES = 8
"""Of copies of its gradient in a backward. The rounded weights have been freed by then."""


def pass_bytes(
    model: Model, workload: Workload, cut: Strategy, *, trains: bool, on_cpu: bool = False
) -> Parts:
    """Return the bytes at the peak of an update (`trains`) or of a forward call, by use.

    The peak is the largest of a few moments of the pass. Residents are not included.
    """
    rows, num_micro = micro_batches(model, workload, cut, trains=trains)
    logits = _head_bytes(model, rows * workload.response_tokens / cut.cp, cut, trains=trains)
    of_rank = rows_per_rank(workload, cut, trains=trains)
    shares = packed_shares(model, workload, of_rank, num_micro)
    average = rows * workload.tokens / cut.cp
    tokens = average * shares.most_tokens
    gathered = average * shares.most_gathered
    layer = _layer_memory(model, rows, cut, tokens=tokens, gathered=gathered, on_cpu=on_cpu)
    units = model.engine.facts.float32_weights
    plain = np.bool_(model.engine.is_plain(cut))
    if not trains:
        at_end: Parts = {"logits": logits, "activations": layer.inputs, "gather": 0.0}
        moments: list[Parts] = [{"activations": layer.forward, "gather": layer.buffers}]
        if units:
            moments, at_end["gather"] = _forward_of_units(model, layer, cut)
            for moment in (*moments, at_end):
                moment["gather"] = moment["gather"] * ~plain
        return largest([*moments, at_end], cut)
    if units:
        sharded = _update_of_units(model, layer, logits, num_micro, cut)
        alone = _update_of_plain(model, layer, logits, num_micro, cut)
        moments = []
        for moment in sharded:
            moments.append({n: x * ~plain for n, x in moment.items()})
        return largest([*moments, *({n: x * plain for n, x in m.items()} for m in alone)], cut)
    return largest(_update_of_stages(model, layer, logits, num_micro, cut), cut)


def largest(moments: Sequence[Parts], cut: Strategy) -> Parts:
    """Return the moment with the most bytes in total, by use, for each strategy.

    A use that this moment lacks is 0. Of equal moments the first counts.
    """
    zero = 0.0 * cut.dp
    which = np.argmax([total(moment) + zero for moment in moments], axis=0)
    names = dict.fromkeys(name for moment in moments for name in moment)
    result = {}
    for name in names:
        result[name] = np.choose(which, [moment.get(name, 0.0) + zero for moment in moments])
    return result


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer and micro-batch."""

    inputs: Array
    """Its input."""
    saved: Array
    """Activations that its backward needs."""
    working: Array
    """Temporaries of its backward."""
    forward: Array
    """Peak of its forward if no backward follows."""
    buffers: Array
    """Buffers of messages between tensor-parallel ranks, and between stages."""

    def stack(self, number: Array, cut: Strategy) -> Array:
        """Bytes that `number` layers keep after their forward."""
        return number * np.where(cut.recompute > 0, self.inputs, self.saved)

    def backward(self, cut: Strategy) -> Array:
        """Bytes of a layer during its backward, in addition to its part of `stack`."""
        return self.working + np.where(cut.recompute > 0, self.saved, 0.0)


def _layer_memory(
    model: Model, rows: Array, cut: Strategy, *, tokens: Array, gathered: Array, on_cpu: bool
) -> _Layer:
    """Return the bytes of one layer for a micro-batch of `rows` rows, `tokens` computed tokens.

    `saved` are the norms' inputs, queries, keys, values and mixed values, and the feed-forward
    network's copies, as in the table at the top of this file. Everything except the hidden states
    is divided over tp ranks; with sequence parallelism these are, too. In float32, packed rows need
    one more copy of the queries, and attention repeats keys and values for all heads, but not on a
    CPU.
    gathered: tokens whose keys and values attention reads. It is more than `tokens` if rows share a
    prompt: keys and values are then copied for each row that reads them.
    """
    shape = model.shape
    facts = model.engine.facts
    size = model.engine.element_bytes
    gathers_sequence = "sequence_parallel" in model.engine.options
    hidden = shape.hidden_size / (cut.tp if gathers_sequence else 1)
    queries = shape.q_size / cut.tp
    keys = kv_width(shape, cut.tp)
    heads = queries + keys
    mixed = facts.attention_copies * queries
    seen = facts.attention_copies * keys
    if facts.float32_weights and size == 4:
        mixed = mixed + queries * (model.packs * (rows > 1))
        seen = seen + 2 * (queries - keys) * (not on_cpu)
    ffn = shape.activated_size / cut.tp
    norms = (2 * hidden + shape.qk_norm * heads) * (4 + 2 * size)
    ungated = 2 * (not shape.gated)
    routed = facts.routed_copies * shape.routed_size
    saved_ffn = (facts.ffn_copies - ungated) * ffn  # freed before a norm's backward
    widest = (facts.ffn_forward_copies - ungated) * ffn * size
    messages = gathers_sequence + (2.0 * (cut.pp > 1))
    working = tokens * np.maximum(2 * ffn * size, 20 * hidden - saved_ffn * size)
    forward = tokens * np.maximum(widest + routed * size, (8 + size) * hidden)
    # attention may need more than the network if it reads many copies of a shared prompt
    copies = 2 * gathered * keys * size
    backward_of_attention = 2 * copies + tokens * (2 * queries - saved_ffn) * size
    forward_of_attention = copies + tokens * 2 * heads * size
    saved_scores = forward_scores = backward_scores = 0.0
    if shape.caps_scores or shape.has_sinks:
        # each of cp ranks has all tokens of the rows here, and 1/cp of the heads
        scores = tokens * gathered / np.maximum(rows, 1) * shape.num_heads * cut.cp / cut.tp
        saved_scores = scores * _score_bytes(shape, size)
        forward_scores = scores * _FORWARD_SCORE_BYTES["caps" if shape.caps_scores else "sinks"]
        backward_scores = scores * (_BACKWARD_SCORE_BYTES - _rounded_bytes(size))
    others = _bytes_of_other_keys(model, cut, queries, keys, freed=saved_ffn * size)
    working = np.maximum(working, tokens * others.backward)
    forward = np.maximum(forward, tokens * others.forward)
    shares = gathered > tokens
    working = np.where(shares, np.maximum(working, backward_of_attention), working)
    forward = np.where(shares, np.maximum(forward, forward_of_attention), forward)
    return _Layer(
        inputs=tokens * hidden * size,
        saved=tokens * (norms + (mixed + saved_ffn + routed) * size)
        + gathered * seen * size
        + saved_scores
        + tokens * others.saved,
        working=np.maximum(working, backward_scores) + tokens * hidden * size,
        forward=np.maximum(forward, forward_scores) + tokens * 4 * hidden * size,
        buffers=tokens * shape.hidden_size * size * messages,
    )


@dataclass(frozen=True)
class _OtherKeys:
    """Bytes of a token of a rank, for the keys and values that other ranks have."""

    saved: Array
    forward: Array
    """Peak of a forward, with the queries."""
    backward: Array
    """Temporaries of a backward."""


def _bytes_of_other_keys(
    model: Model, cut: Strategy, queries: Array, keys: Array, *, freed: Array
) -> _OtherKeys:
    """Return the bytes that attention needs where ranks divide rows and each has its own queries.

    queries, keys: numbers of a token. freed: bytes of a token that a layer has saved and that its
    backward no longer needs when it gets to attention. Gathered keys and values are there twice: as
    they arrive, and as the queries see them. In a ring they are sent, received and selected;
    results, sums and gradients are float32.
    """
    size = model.engine.element_bytes
    gathered = 2 * cut.cp * keys * size * gathers_keys(model, cut)
    passed = passes_keys(model, cut)
    gather_forward = 2 * gathered + 2 * (queries + keys) * size * (gathered > 0)
    ring_forward = (2 * size + 8) * queries + 8 * size * keys
    ring_backward = (4 + 2 * size) * queries + (20 + 12 * size) * keys - freed
    return _OtherKeys(
        saved=gathered,
        forward=gather_forward + passed * ring_forward,
        backward=2 * gathered + passed * ring_backward,
    )


def _score_bytes(shape: Architecture, size: int) -> int:
    """Return the bytes of an attention score that a backward needs, if no kernel computes it.

    Scores with sinks or caps (workers.attention) are stored for every token and each token that it
    sees. Saved are the weights, in float32 and rounded to a type of `size` bytes, and the
    hyperbolic tangents of capped scores. The rows of a micro-batch count as equally long, so that
    they are computed together; the temporaries of rows that differ are fewer.
    """
    return _SCORE_BYTES * (1 + shape.caps_scores) + _rounded_bytes(size)


def _rounded_bytes(size: int) -> int:
    """Return the bytes of a weight that is rounded for its product with a value; 0 in float32."""
    return size if size < _SCORE_BYTES else 0


def _forward_of_units(model: Model, layer: _Layer, cut: Strategy) -> tuple[list[Parts], float]:
    """Return (moments, gathered bytes at the head) of a forward that gathers units.

    The moments are: gathering the first layer, gathering a later one, and running it. An untrained
    model on one rank copies weights to where they are used. Sharded weights of any other model need
    buffers to gather into in addition.
    """
    unit, root, all_gathered = _units(model, cut)
    size = model.engine.element_bytes
    alone = (cut.num_ranks == 1) * (not model.trained)
    divided = model.engine.sharding.parameters * (1 - alone)
    first = size * (root + unit)
    later = size * _gathered_or(all_gathered, root + unit)
    buffer = divided * size * unit
    return [
        {"gather": first * (1 + divided), "activations": layer.inputs},
        {"gather": later + 2 * buffer, "activations": 2 * layer.inputs},
        {"gather": later + buffer, "activations": layer.forward},
    ], size * _gathered_or(all_gathered, root)


def _units(model: Model, cut: Strategy) -> tuple[Array, Array, Array | None]:
    """Return numbers of weights: of a layer, outside all layers, and of the whole model.

    The last is None unless weights are sharded and stay gathered for the whole pass. Of divided
    experts only those of a rank count: no rank gathers others.
    """
    shape = model.shape
    sharding = model.engine.sharding
    root = shape.num_parameters - shape.num_layers * shape.layer_parameters
    stays = sharding.parameters and not sharding.frees_gathered
    elsewhere = shape.expert_parameters * (1 - 1 / cut.ep)
    layer = shape.layer_parameters - elsewhere / max(shape.num_layers, 1)
    every = shape.num_parameters - elsewhere
    return layer, root + 0.0 * layer, every if stays else None


def _gathered_or(gathered: Array | None, weights: Array) -> Array:
    """The weights that stay gathered; if none do, the other number."""
    return weights if gathered is None else gathered


@dataclass(frozen=True)
class _TrainedWeights:
    """Numbers of trained weights."""

    layer: Array
    head: Array
    root: Array
    """Outside all layers, including the head."""
    total: float
    """Of the model."""
    of_rank: Array
    """Whose gradients a rank has before they are summed over ranks."""


def _count_trained(model: Model, cut: Strategy) -> _TrainedWeights:
    """Return how many weights of each part have gradients: all, or only the adapters.

    Of divided experts only those of a rank count, except in the total. Adapters are spread evenly
    over the layers. A scalar head counts as 0.
    """
    shape = model.shape
    if model.adapters:
        each = model.adapters / shape.num_layers
        return _TrainedWeights(each, 0.0, 0.0, total=model.adapters, of_rank=model.adapters)
    layer, root, _ = _units(model, cut)
    head = shape.vocab_size * shape.hidden_size * (shape.head != "scalar")
    of_rank = root + shape.num_layers * layer
    return _TrainedWeights(layer, head, root, shape.num_parameters, of_rank)


def _update_of_units(
    model: Model, layer: _Layer, logits: Array, num_micro: Array, cut: Strategy
) -> list[Parts]:
    """Return the moments of an update of an engine that gathers units (FSDP2), each by use.

    They are: backward of the head, of the last layer, of the one before it, and of the first; the
    last reduction; the optimizer step. With several micro-batches, gradients of earlier ones are
    kept in float32: sharded or, if they are reduced only with the last micro-batch, whole.
    """
    shape = model.shape
    sharding = model.engine.sharding
    size = model.engine.element_bytes
    unit, root, all_gathered = _units(model, cut)
    layers = shape.num_layers
    many = num_micro > 1
    waits = many * (not sharding.micro_batch_reductions)
    trained = _count_trained(model, cut)
    shard = GRADIENT_BYTES * trained.total / share_of(sharding.parameters, model, cut)
    before = np.where(waits, GRADIENT_BYTES * trained.of_rank, many * shard)
    head = size * trained.head
    fresh = size * trained.layer + head
    next_unit = size * unit * sharding.frees_gathered
    reduced = GRADIENT_BYTES * trained.layer * (1 + (not sharding.parameters))
    at_layer = size * (root + unit)
    return [
        {
            "gradients": before + head,
            "gather": size * _gathered_or(all_gathered, root) + next_unit,
            "activations": layer.stack(layers, cut),
            "logits": logits,
        },
        {
            "gradients": before + fresh,
            "gather": size * _gathered_or(all_gathered, root + unit) + next_unit,
            "activations": layer.stack(layers, cut) + layer.backward(cut),
        },
        {
            "gradients": before + fresh - waits * GRADIENT_BYTES * trained.layer,
            "gather": size * _gathered_or(all_gathered, root + unit) + next_unit + reduced,
            "activations": layer.stack(layers - 1, cut) + layer.backward(cut),
        },
        {
            "gradients": shard + fresh,
            "gather": at_layer + GRADIENT_BYTES * trained.layer,
            "activations": layer.stack(1, cut) + layer.backward(cut),
        },
        {
            "gradients": shard + size * trained.root,  # its gathered weights are freed before
            "gather": GRADIENT_BYTES * (trained.root + trained.layer),
        },
        {"gradients": shard, "optimizer": model.engine.step_copies * shard},
    ]


def _update_of_plain(
    model: Model, layer: _Layer, logits: Array, num_micro: Array, cut: Strategy
) -> list[Parts]:
    """Return the moments of an update of a plain float32 module on one rank, each by use.

    They are: backward of the head, of the last layer and of the first; the optimizer step.
    """
    layers = model.shape.num_layers
    trained = _count_trained(model, cut)
    unit = GRADIENT_BYTES * trained.layer
    all_gradients = GRADIENT_BYTES * trained.total
    before = np.where(num_micro > 1, all_gradients, 0)
    head = GRADIENT_BYTES * trained.head
    stack = layer.stack(layers, cut)
    backward = layer.backward(cut)
    return [
        {"gradients": before + head, "activations": stack, "logits": logits},
        {"gradients": np.maximum(before, head) + unit, "activations": stack + backward},
        {"gradients": all_gradients + unit, "activations": layer.stack(1, cut) + backward},
        {"gradients": all_gradients, "optimizer": model.engine.step_copies * all_gradients},
    ]


def _update_of_stages(
    model: Model, layer: _Layer, logits: Array, num_micro: Array, cut: Strategy
) -> list[Parts]:
    """Return the moments of an update of a pipeline engine, each by use.

    They are: backward of the first stage with min(m, p) micro-batches in flight (more with virtual
    stages), loss of the last stage, optimizer step.
    """
    parts = model.engine.virtual_size
    first = cut.pp
    if parts > 1:  # forward passes of the first stage's chunks before its first backward
        first = (2 * (cut.pp - 1) + (parts - 1) * cut.pp + 1) / parts
    layers = np.ceil(model.shape.num_layers / cut.pp)
    in_flight = np.minimum(num_micro, first)
    stepped = stepped_parameters(model, cut)
    return [
        {
            "activations": layer.stack(layers * in_flight, cut) + layer.backward(cut),
            "gather": layer.buffers,
        },
        {"activations": layer.stack(layers, cut), "gather": layer.buffers, "logits": logits},
        {"optimizer": model.engine.step_copies * GRADIENT_BYTES * stepped},
    ]


def _head_bytes(model: Model, tokens: Array, cut: Strategy, *, trains: bool) -> Array:
    """Return the bytes of the head over `tokens` response tokens; 0 for a scalar head.

    These are the hidden states and two float32 copies of a block of logits, or three for the
    entropy that a policy reports of its forward call. Backward adds the gradients of the hidden
    states, in float32, and of a stage's weight.
    """
    shape = model.shape
    size = model.engine.element_bytes
    if shape.head == "scalar":
        return 0.0 * tokens
    block = 4 * np.minimum(tokens * shape.vocab_size / cut.tp, CHUNK_ELEMENTS)
    states = tokens * shape.hidden_size
    words = shape.vocab_size / cut.tp * shape.hidden_size
    if not trains:
        return states * size + (3 if model.trained else 2) * block
    staged = 0.0 if model.engine.facts.float32_weights else size * words
    return states * (size + 4) + 2 * block + staged
