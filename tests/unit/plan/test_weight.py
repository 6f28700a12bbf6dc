"""Weights on their way to the generator, against bytes counted here from the tensors' shapes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from spmdflow.config.schema import PPOConfig
from spmdflow.errors import PlanError
from spmdflow.hybrid_engine.reshard import (
    Copies,
    boxes_of,
    generation_tables,
    plan_reshard,
    scopes_of,
    training_tables,
)
from spmdflow.mapping.dataflow import Model, Rollout, Strategy
from spmdflow.mapping.hardware import load_hardware
from spmdflow.mapping.seconds import transition_seconds
from spmdflow.models.generator import GeneratorWorker
from spmdflow.models.policy import ActorWorker
from spmdflow.parallel.layout import Layout
from spmdflow.plan.check import check_weight_copies, check_weight_shards
from spmdflow.plan.prediction import weight_sync_seconds
from spmdflow.plan.record import Trace, TracedModel
from spmdflow.plan.weight import WeightPlan, syncs_by_step, weight_plans
from spmdflow.weights.architecture import Architecture
from tests.unit.planned import SMALL_GROUPS, traced

SIZES = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GIANT = SIZES | {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "head_dim": 128,
}
EMBEDDING = 256 * 64
NORM = 64
LAYER = 4 * 64 * 64 + 3 * 64 * 96
"""Elements of a layer's matrices; two norms come on top."""
TOTAL = 2 * EMBEDDING + 4 * (LAYER + 2 * NORM) + NORM


def planned(
    folder: Path,
    layout: Layout,
    *,
    kind: str = "megatron",
    engine: str = "vllm",
    node_size: int = 2,
    generator: Layout | None = None,
    sizes: dict | None = None,
    weights: str = "copy",
) -> WeightPlan:
    """The way of an actor's copies in bfloat16, on nodes of some ranks."""
    (folder / "config.json").write_text(json.dumps(sizes or SIZES))
    cfg = PPOConfig().actor
    cfg.model.path = str(folder)
    cfg.engine.kind = kind
    cfg.rollout.engine = engine
    cfg.rollout.dtype = "bfloat16"
    cfg.rollout.weights = weights
    cfg.model.dtype = "bfloat16"
    models = {"actor": TracedModel("actor", ActorWorker, cfg, layout, "pool")}
    if generator is not None:
        models["generator"] = TracedModel("generator", GeneratorWorker, cfg, generator, "pool")
    world = tuple(rank for model in models.values() for rank in model.layout.ranks)
    nodes = tuple(rank // node_size for rank in world)
    links = (("actor", "generator"),) if generator is not None else ()
    trace = Trace(world, nodes, {}, models, links, (), {}, {}, (1,))
    return weight_plans(trace)[-1]


def grid(t: int, p: int, d: int, *, gen: tuple[int, int] = (1, 1), start: int = 0) -> Layout:
    ranks = tuple(range(start, start + t * p * d))
    return Layout(ranks, tp_size=t, pp_size=p, dp_size=d, gen_tp_size=gen[0], gen_pp_size=gen[1])


def test_fsdp_to_whole_copies_brings_what_the_other_ranks_hold(tmp_path: Path) -> None:
    found = planned(tmp_path, grid(1, 1, 4), kind="fsdp", engine="builtin")

    each = 2 * TOTAL * 3 // 4
    assert dict(found.received) == dict.fromkeys(range(4), each)
    assert len(found.edges) == 12
    assert found.inter_bytes == 4 * 2 * (2 * TOTAL // 4)


@pytest.mark.parametrize("kind", ["zero1", "megatron"])
@pytest.mark.parametrize("gen", [(1, 1), (4, 1)])
def test_ranks_that_hold_all_weights_receive_none(
    tmp_path: Path, kind: str, gen: tuple[int, int]
) -> None:
    found = planned(tmp_path, grid(1, 1, 4, gen=gen), kind=kind)

    assert dict(found.received) == dict.fromkeys(range(4), 0)
    assert not found.edges and found.inter_bytes == 0


def test_megatron_t4_to_t2_brings_a_quarter_of_the_matrices_from_one_peer(tmp_path: Path) -> None:
    found = planned(tmp_path, grid(4, 1, 1, gen=(2, 1)))

    quarter = 2 * (2 * EMBEDDING + 4 * LAYER) // 4
    assert dict(found.received) == dict.fromkeys(range(4), quarter)
    assert set(found.edges.values()) == {quarter} and found.scope == "micro_dp"
    far = sum(a // 2 != b // 2 for a, b in found.edges)
    assert found.inter_bytes == far * quarter


def test_megatron_t2p2_to_t1_brings_all_that_a_rank_does_not_hold(tmp_path: Path) -> None:
    found = planned(tmp_path, grid(2, 2, 1))

    first = EMBEDDING // 2 + 2 * (LAYER // 2 + 2 * NORM)
    last = first + NORM
    held = {0: first, 1: first, 2: last, 3: last}
    assert dict(found.received) == {rank: 2 * (TOTAL - own) for rank, own in held.items()}
    other = {0: last, 1: last, 2: first, 3: first}
    norms = {0: 4 * NORM + NORM, 1: 4 * NORM + NORM, 2: 4 * NORM, 3: 4 * NORM}
    crossing = sum(2 * (2 * (other[rank] - norms[rank]) + norms[rank]) for rank in range(4))
    assert found.inter_bytes == crossing


@pytest.mark.parametrize("sizes", [(4, 1, (2, 1)), (2, 2, (1, 1)), (4, 2, (2, 2)), (8, 1, (2, 1))])
def test_replicas_are_what_a_plan_of_all_ranks_says(
    tmp_path: Path, sizes: tuple[int, int, tuple[int, int]]
) -> None:
    t, p, gen = sizes
    layout = grid(t, p, 3, gen=gen)

    found = planned(tmp_path, layout)

    arch = Architecture.from_folder(str(tmp_path))
    whole = plan_reshard(
        boxes_of(training_tables(arch, layout, kind="megatron")),
        boxes_of(generation_tables(arch, layout, engine="vllm")),
        scopes=scopes_of(layout, layout),
        element_bytes=2,
        bucket_bytes=1 << 20,
    )
    assert dict(found.received) == {rank: whole.received_bytes(rank) for rank in layout.ranks}
    assert found.inter_bytes <= sum(found.received.values())


def test_twice_the_replicas_move_twice_the_weights_within_and_between_nodes(
    tmp_path: Path,
) -> None:
    half, full = (planned(tmp_path, grid(4, 2, d, gen=(2, 1))) for d in (8, 16))

    assert sum(full.received.values()) == 2 * sum(half.received.values()) > 0
    assert full.inter_bytes == 2 * half.inter_bytes > 0
    assert len(full.edges) == 2 * len(half.edges)


def proved(way: WeightPlan) -> bool:
    """Whether the way has a proof, and it holds."""
    if isinstance(way.parts, Copies):
        return not check_weight_copies(way.parts, label="weights")
    return way.parts is not None and not check_weight_shards(way.parts, label="weights")


@pytest.mark.parametrize(
    ("layout", "kind", "weights"),
    [
        (grid(1, 1, 16, gen=(8, 1)), "fsdp", "copy"),
        (grid(8, 4, 1, gen=(4, 1)), "megatron", "copy"),
        (grid(8, 4, 4, gen=(8, 1)), "megatron", "blocks"),
        (grid(8, 4, 4, gen=(8, 1)), "megatron", "flat"),
        *[
            pytest.param(*case, marks=pytest.mark.drill)
            for case in (
                (grid(1, 1, 128, gen=(8, 1)), "fsdp", "copy"),
                (grid(8, 4, 32, gen=(4, 1)), "megatron", "copy"),
                (grid(4, 1, 256, gen=(8, 1)), "megatron", "copy"),
                (grid(8, 4, 32, gen=(8, 1)), "megatron", "flat"),
            )
        ],
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.size} ranks",
)
def test_a_giant_model_is_planned_and_proved_in_seconds(
    tmp_path: Path, layout: Layout, kind: str, weights: str
) -> None:
    started = time.process_time()

    found = planned(tmp_path, layout, kind=kind, sizes=GIANT, node_size=8, weights=weights)

    assert proved(found)
    assert time.process_time() - started < 60, "about 2 s on an idle core"
    assert set(found.received) == set(layout.ranks)
    assert found.edges and found.inter_bytes >= 0


MIXTURE = SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}


@pytest.mark.parametrize("gen", [(2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "phi3"])
def test_weights_of_a_recorded_family_are_proved_where_ranks_divide_it(
    tmp_path: Path, family: str, gen: tuple[int, int]
) -> None:
    sizes = MIXTURE | {"model_type": family, "pad_token_id": 2, "eos_token_id": 2}

    found = planned(tmp_path, grid(1, 1, 4, gen=gen), kind="fsdp", sizes=sizes)

    assert not found.is_derived and proved(found)
    assert set(found.received) == set(range(4)) and min(found.received.values()) > 0


def test_weights_of_a_family_that_is_not_recorded_are_left_to_the_start(tmp_path: Path) -> None:
    sizes = MIXTURE | {"model_type": "minimax_m2"}

    found = planned(tmp_path, grid(1, 1, 4, gen=(2, 1)), kind="fsdp", sizes=sizes)

    assert found.is_derived and "not recorded" in found.note
    alone = planned(tmp_path, grid(1, 1, 4), kind="fsdp", sizes=sizes)
    assert not alone.is_derived and proved(alone)


@pytest.mark.parametrize("gen_tp_size", [2, 4])
def test_what_several_ranks_of_a_node_lack_enters_it_once(tmp_path: Path, gen_tp_size: int) -> None:
    far = planned(tmp_path, grid(1, 1, 8, gen=(gen_tp_size, 1)), kind="fsdp", node_size=4)
    near = planned(tmp_path, grid(1, 1, 8, gen=(gen_tp_size, 1)), kind="fsdp", node_size=8)

    assert proved(far) and proved(near)
    assert far.received == near.received, "nodes change who sends, not what arrives"
    assert near.inter_bytes == 0
    # a node of four ranks needs the model once, and holds half of it
    assert far.inter_bytes == sum(far.entering.values()) == 2 * 2 * TOTAL // 2


@pytest.mark.parametrize("ranks", [16, pytest.param(128, marks=pytest.mark.drill)])
def test_a_giant_generator_apart_is_planned_in_seconds(tmp_path: Path, ranks: int) -> None:
    policy = grid(1, 1, ranks, gen=(1, 1))
    generator = grid(8, 1, ranks // 8, gen=(8, 1), start=ranks)
    started = time.process_time()

    found = planned(tmp_path, policy, kind="fsdp", sizes=GIANT, generator=generator)

    assert proved(found)
    assert time.process_time() - started < 60, "about 3 s on an idle core"
    assert set(found.received) == set(generator.ranks) and found.edges


def test_generator_apart_receives_all_that_it_needs(tmp_path: Path) -> None:
    policy = grid(2, 1, 2)
    generator = grid(2, 1, 2, gen=(2, 1), start=4)

    exact = planned(tmp_path, policy, generator=generator)

    half = 2 * ((2 * EMBEDDING + 4 * LAYER) // 2 + 9 * NORM)
    assert dict(exact.received) == dict.fromkeys(generator.ranks, half)
    assert exact.inter_bytes < 4 * half, "norms enter a node once"


@pytest.mark.parametrize(
    ("layout", "node_size", "least"),
    [
        (grid(4, 1, 2, gen=(2, 1)), 8, 0.95),
        (grid(8, 1, 1, gen=(2, 1)), 8, 0.95),
        (grid(2, 4, 1, gen=(2, 1)), 8, 0.95),
        (grid(8, 2, 2, gen=(8, 1)), 8, 0.95),
        (grid(8, 4, 1, gen=(8, 1)), 8, 0.95),
        (grid(4, 4, 2, gen=(4, 1)), 8, 0.5),
        (grid(2, 8, 1, gen=(1, 1)), 8, 0.5),
    ],
    ids=str,
)
def test_seconds_of_planned_bytes_are_those_of_the_formula_where_layouts_nest(
    tmp_path: Path, layout: Layout, node_size: int, least: float
) -> None:
    """Within 5 % (norms, whole stages) where the ranks that share weights lie on one machine, or
    each on its own. Else less, at least half: the formula is of a ring, which also brings a
    machine's own shards back to it, while the planner's broadcasts enter it once."""
    hardware = load_hardware("a100_80gb").with_node(node_size)

    way = planned(tmp_path, layout, sizes=GIANT, node_size=node_size)
    found = weight_sync_seconds(way, hardware).seconds

    shape = Architecture.from_folder(str(tmp_path))
    model = Model("actor", shape, trained=True, rollout=Rollout(layout=None))
    sizes = (layout.tp_size, layout.pp_size, layout.dp_size)
    strategy = Strategy(*sizes, layout.gen_tp_size, layout.gen_pp_size)
    formula = transition_seconds(model, strategy, hardware)
    assert least * formula <= found <= 1.05 * formula


def test_way_that_no_planner_finds_is_a_note_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PlanError("reshard: got nothing")

    monkeypatch.setattr("spmdflow.hybrid_engine.reshard.plan_reshard", refuses)

    found = planned(tmp_path, grid(4, 1, 1, gen=(2, 1)))

    assert found.note == "not planned: reshard: got nothing"
    assert not found.received and found.inter_bytes == -1


def test_generator_whose_weights_come_from_files_has_no_sync() -> None:
    alone = traced("evaluate", 4, "data.eval_prompts=12", "data.eval_samples=2")
    apart = traced("grpo_async", 4, *SMALL_GROUPS)

    assert (weight_plans(alone), syncs_by_step(alone)) == ([], {1: {}})
    assert [(way.source, way.target) for way in weight_plans(apart)] == [("actor", "generator")]
    assert syncs_by_step(apart)[1].keys() == {"generator"}
