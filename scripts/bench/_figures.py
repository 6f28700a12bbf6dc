"""Figures of the HybridFlow paper beside its placements: transitions, scaling, shares of a step."""

from __future__ import annotations

from bench._cells import ALL, WORKLOAD, Cell
from bench._dataflows import NOMINAL, ppo
from bench._given import evaluate
from spmdflow.mapping.dataflow import Engine, Model, Rollout, Strategy
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.partition_search import find_mapping
from spmdflow.mapping.placed import Placed
from spmdflow.mapping.seconds import transition_bytes, transition_seconds

VOLUMES = {
    "7B": (Strategy(8, 1, 2, 2, 1), 5.25e9),
    "13B": (Strategy(8, 1, 2, 4, 1), 3.25e9),
    "34B": (Strategy(8, 4, 4, 8, 1), 6.375e9),
    "70B": (Strategy(8, 8, 2, 8, 1), 15.3125e9),
}
"""Training and generation sizes, and the bytes that each GPU receives by Table 2."""

SCALES = {"7B": (8, 128), "13B": (16, 128), "34B": (32, 128), "70B": (64, 128)}
"""Fewest and most GPUs of section 8.2's strong scaling."""

TWO_COPIES_REPLICAS = 8
"""Figure 14, 70B on 128 GPUs: half of them generate, with t_g = 8."""


def volumes() -> dict[str, tuple[float, float]]:
    """Model -> (bytes received by each GPU, what Table 2 says)."""
    return {
        name: (float(transition_bytes(policy(name), strategy)), wanted)
        for name, (strategy, wanted) in VOLUMES.items()
    }


def transition_ratio(hardware: Hardware) -> tuple[float, float]:
    """Figure 14, 70B: seconds of the hybrid engine, and of two copies.

    Two copies: rank 0's machine sends the whole model to every generation replica, one after
    another, as OpenRLHF did over gloo then (vllm-project/vllm issue 5723).
    """
    ours = float(transition_seconds(policy("70B"), VOLUMES["70B"][0], hardware))
    whole = 2 * NOMINAL["70B"].num_parameters
    return ours, TWO_COPIES_REPLICAS * whole / hardware.network_rate


def scaling(hardware: Hardware, *, log_prob: bool) -> dict[str, float]:
    """Strong scaling efficiency of the best placements, by model."""
    found = {}
    for name, (few, many) in SCALES.items():
        flow = Cell(name, name, few, (ALL,), (few,)).dataflow(log_prob=log_prob)
        seconds = [find_mapping(flow, hardware, n, keep=1).best[0].seconds for n in (few, many)]
        found[name] = seconds[0] / seconds[1] / (many / few)
    return found


def generation_seconds(name: str, hardware: Hardware) -> dict[int, float]:
    """Figure 15: t_g -> seconds of transition and generation, four models on 16 GPUs, 1-8-2."""
    found = {}
    for size in (1, 2, 4, 8):
        shape = NOMINAL[name]
        rollout = Rollout(layout=(size, 1), min_batch_size=1)
        actor = Model("actor", shape, True, Engine(layout=(8, 1)), rollout)
        flow = ppo(actor, shape, reference=shape, reward=shape, workload=WORKLOAD)
        found[size] = evaluate(flow, hardware, [(ALL, range(16))]).stage_seconds["generation"]
    return found


def actor_share(placed: Placed) -> float:
    """Part of a step in which the actor generates or trains."""
    actor = {
        number: estimate.seconds
        for pool in placed.pools
        for number, estimate in pool.estimates.items()
        if placed.calls[number].title in ("actor.generate_sequences", "actor.update_actor")
    }
    return sum(actor.values()) / placed.seconds


def policy(name: str) -> Model:
    """An actor of a nominal size."""
    return Model("actor", NOMINAL[name], trained=True, rollout=Rollout())
