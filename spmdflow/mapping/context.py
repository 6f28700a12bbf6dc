"""What ranks that divide rows send each other for attention: bytes and seconds.

workers.context_parallel has the kinds of attention.
"""

from __future__ import annotations

import numpy as np

from spmdflow.mapping.collective import all_gather, all_to_all
from spmdflow.mapping.dataflow import Array, Model, Strategy
from spmdflow.mapping.hardware import Hardware


def exchanges_heads(model: Model, cut: Strategy) -> Array:
    """Whether tokens are exchanged for heads (ulysses). False also where each has whole rows."""
    attention = model.engine.context_attention
    divides = np.asarray(model.shape.num_heads / cut.tp % cut.cp == 0)
    chosen = divides if attention == "auto" else attention == "ulysses"
    return np.logical_and(cut.cp > 1, chosen)


def gathers_keys(model: Model, cut: Strategy) -> Array:
    """Whether each rank gathers the keys of all tokens."""
    return np.logical_and(cut.cp > 1, model.engine.context_attention == "gather")


def passes_keys(model: Model, cut: Strategy) -> Array:
    """Whether keys pass from rank to rank (ring)."""
    others = np.logical_or(exchanges_heads(model, cut), gathers_keys(model, cut))
    return np.logical_and(cut.cp > 1, np.logical_not(others))


def attention_bytes(model: Model, cut: Strategy) -> tuple[Array, Array]:
    """Return what a layer's (forward, backward) sends for each token of a row.

    It is what all tp * cp ranks of a replica send together. ulysses: queries, keys, values and
    results, each once, of which 1/cp stay. Otherwise each rank sends its keys and values to cp - 1
    others; in a ring also for the backward, where their gradients return in addition.
    """
    shape = model.shape
    size = model.engine.element_bytes
    head_dim = shape.q_size / shape.num_heads
    keys_of_rank = np.maximum(shape.kv_size / head_dim // cut.tp, 1).astype(int)
    repeated = np.lcm(keys_of_rank, np.asarray(cut.cp, int)) * head_dim * cut.tp
    exchanged = 2 * (shape.q_size + repeated) * (cut.cp - 1) / cut.cp * size
    passed = 2 * keys_of_rank * head_dim * cut.tp * (cut.cp - 1) * size
    forward = np.where(exchanges_heads(model, cut), exchanged, passed)
    backward = forward * (1 + passes_keys(model, cut))
    return forward, backward


def attention_bytes_of_token(model: Model, cut: Strategy) -> Array:
    """Return what a token adds to the bytes that all ranks send for attention in an update."""
    forward, backward = attention_bytes(model, cut)
    return model.shape.num_layers * (forward * _forwards(model, cut) + backward)


def attention_message_seconds(
    model: Model, tokens: Array, cut: Strategy, hw: Hardware, *, computing: Array, trains: bool
) -> Array:
    """Return the seconds in which a layer waits for messages of attention; 0 without c.

    It is a forward, or all that a training step has of it. tokens: of a rank, which has 1/tp of the
    heads. computing: seconds of the attention of a forward, which a ring's messages overlap with:
    twice of that in the backward.
    """
    per_node = np.clip(hw.gpus_per_node // cut.tp, 1, cut.cp)
    forward_bytes, _ = attention_bytes(model, cut)
    sent = tokens * forward_bytes / cut.tp  # by each rank
    whole = sent * cut.cp / np.maximum(cut.cp - 1, 1)
    exchange = 2 * all_to_all(whole / 2, cut.cp, per_node, hw)
    gather = all_gather(whole, cut.cp, per_node, hw)
    scatter = all_to_all(whole, cut.cp, per_node, hw)
    exposed = np.maximum(gather - computing, 0.0)
    kinds = [exchanges_heads(model, cut), gathers_keys(model, cut), passes_keys(model, cut)]
    forward = np.select(kinds, [exchange, gather, exposed], 0.0)
    if not trains:
        return forward
    backward = np.select(kinds, [exchange, scatter, 2 * exposed], 0.0)
    return forward * _forwards(model, cut) + backward


def _forwards(model: Model, cut: Strategy) -> Array:
    """How often a training step computes the forward of attention: 2 if the backward does again."""
    return 1 + np.maximum(cut.recompute, "selective_recompute" in model.engine.options)
