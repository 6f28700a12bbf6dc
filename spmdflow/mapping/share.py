"""Which weights a rank of a strategy has, trains and steps.

Every function takes one strategy and returns numbers, or many strategies and returns arrays.
"""

from __future__ import annotations

import numpy as np

from spmdflow.mapping.dataflow import Array, Model, Strategy
from spmdflow.weights.architecture import Architecture


def local_parameters(model: Model, cut: Strategy) -> Array:
    """Return the number of weights of a rank of the busiest stage."""
    others, experts = stage_parameters(model, cut)
    return others + experts / cut.ep


def stage_parameters(model: Model, cut: Strategy) -> tuple[Array, Array]:
    """Return the weights of a rank of the busiest stage: outside experts, and of all its experts.

        ((weights of layers) * ceil(layers / pp) / layers + embedding) / tp

    The first stage has the embedding, the last an untied head of the same size. A single stage has
    both, so that the head is added. The experts are those of 1/tp of the stage, before they are
    divided over ep ranks.
    """
    shape = model.shape
    words = shape.vocab_size * shape.hidden_size
    ends = words * (1 + (shape.head == "causal_lm" and not shape.tied))
    share = np.ceil(shape.num_layers / cut.pp) / shape.num_layers
    layers = (shape.num_parameters - shape.expert_parameters - ends) * share
    others = (layers + np.where(cut.pp > 1, words, ends)) / cut.tp
    return others, shape.expert_parameters * share / cut.tp


def resident_parameters(model: Model, cut: Strategy) -> Array:
    """Return the number of weights that a rank has between calls: those of `local_parameters`, or
    its share of all weights if the engine shards them."""
    if model.engine.sharding.parameters:
        return sum(stage_parameters(model, cut)) / share_of(True, model, cut)
    return local_parameters(model, cut)


def trained_parameters(model: Model, cut: Strategy) -> Array:
    """Trained weights of a rank: those of `local_parameters`, or only its adapters and modules to
    save."""
    if model.adapters:
        divided = model.divided_adapters
        return model.adapters - divided + divided / cut.tp + 0.0 * cut.dp
    return local_parameters(model, cut)


def stepped_parameters(model: Model, cut: Strategy) -> Array:
    """Return the trained weights whose moments a rank has.

    If the optimizer is divided, dp * cp ranks divide all weights outside experts among them. The
    experts of a rank are on dp * cp / ep ranks, which divide them.
    """
    trained = trained_parameters(model, cut)
    if not model.engine.sharding.optimizer:
        return trained
    if not model.adapters:
        trained = sum(stage_parameters(model, cut))
    return trained / share_of(True, model, cut)


def share_of(divided: bool, model: Model, cut: Strategy) -> Array:
    """Number of data-parallel ranks that share one copy if it is divided, otherwise 1."""
    if divided:
        return model.engine.shard_size or cut.weight_ranks
    return 1.0


def weights_of_replica(shape: Architecture, cut: Strategy) -> Array:
    """The weights of the tp * pp ranks of a replica together: of the experts only 1/ep."""
    experts = shape.expert_parameters
    return shape.num_parameters - experts + experts / cut.ep
