"""Table 2, measured: every system in every layout against `cost_of` and the paper, to the byte.

Nothing is told to the counters: bytes on the wire are counted at torch.distributed, bytes held by
looking at every tensor of the process, peaks by torch's allocator (programs/hybrid_systems.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import Any

import pytest
from bench._cost import SYSTEMS, Cost, paper

from spmdflow.weights.table import parameters
from tests.distributed.programs import hybrid_systems
from tests.distributed.programs.hybrid_systems import MODELS, Setting

pytestmark = pytest.mark.drill

Measured = list[tuple[Setting, Cost, dict[int, dict[str, Any]]]]
"""Settings with what is predicted and what each rank saw."""
WORLD_4 = ("qwen3",)


def measure(spawn_ranks: Any, world: int, models: tuple[str, ...], seconds: float) -> Measured:
    """All settings that apply, each with at least one rank."""
    by_rank = spawn_ranks(hybrid_systems.measure_all, world, models, seconds=seconds)
    found: Measured = []
    for number, setting in enumerate(hybrid_systems.settings(world, models)):
        seen = {rank: rows[number] for rank, rows in enumerate(by_rank) if rows[number]}
        if seen:
            found.append((setting, setting.cost(), seen))
        else:  # one kv head is refused with three ranks
            assert setting.model == "one kv head" and setting.case.layout.tp_size == 3, setting
    return found


@pytest.fixture(scope="module")
def four(spawn_ranks: Any) -> Measured:
    """Worlds of at most four ranks."""
    return measure(spawn_ranks, 4, WORLD_4, seconds=840)


@pytest.fixture(scope="module")
def other_models(spawn_ranks: Any) -> Measured:
    """Worlds of at most four ranks, the models that are left."""
    rest = tuple(name for name in MODELS if name not in WORLD_4)
    return measure(spawn_ranks, 4, rest, seconds=840)


@pytest.fixture(scope="module")
def eight(spawn_ranks: Any) -> Measured:
    """Worlds of at most eight ranks."""
    return measure(spawn_ranks, 8, ("qwen3",), seconds=1500)


def every_rank(measured: Measured) -> Iterator[tuple[Setting, Cost, int, dict[str, Any]]]:
    """Rank by rank."""
    for setting, cost, seen in measured:
        assert sorted(seen) == sorted(cost.received), setting
        for rank, found in seen.items():
            yield setting, cost, rank, found


def judge(measured: Measured) -> None:
    """Everything that each rank received, held and read is as predicted."""
    for setting, cost, rank, found in every_rank(measured):
        predicted = {
            "wire": cost.received[rank].total,
            "returned": cost.received[rank].total,
            "training": cost.training[rank].total,
            "height": hybrid_systems.height_of(cost, rank),
            "generation": cost.generation[rank].total,
            "released": cost.training[rank].total,
            "wrong": [],
        }
        where = (setting.key, setting.model, str(setting.case.layout), rank)
        assert {name: found[name] for name in predicted} == predicted, where
        most = found["height"] + cost.staging[rank] + hidden(setting, rank)
        assert found["height"] <= found["peak"] <= most, where
        assert found["peak"] == most or setting.model != "qwen3", where
    for setting, _, seen in measured:
        sent, arrived = (sum(each[name] for each in seen.values()) for name in ("sent", "wire"))
        assert sent == arrived, setting


def hidden(setting: Setting, rank: int) -> int:
    """Bytes that gloo's all-gather allocates for itself: its whole output once more."""
    case = setting.case
    group = case.layout.axis_group(rank, "micro_dp") if case.gathers_rows else ()
    if len(group) < 2:
        return 0
    longest = max(case.storage_numel[peer] for peer in group)
    return len(group) * longest * case.element_bytes


def judge_paper(measured: Measured) -> None:
    """Measured bytes less the named extras are the paper's formulas, exactly."""
    for setting, cost, seen in measured:
        case = setting.case
        if not case.layout.nests:
            continue  # no formula: shards of several training replicas
        name = setting.key.split()[0]
        formula = paper(name, case.layout)
        model = Fraction(sharded_bytes(setting))
        ranks = [rank for rank in seen if cost.peak[rank].total]
        extra = {rank: cost.received[rank].total - cost.received[rank].sharded for rank in ranks}
        held = {rank: cost.peak[rank].total - cost.peak[rank].sharded for rank in ranks}
        beside = {rank: cost.redundant[rank].total for rank in ranks}
        if name == "two_copies":
            beside = dict.fromkeys(ranks, 0)

        received = Fraction(sum(seen[r]["wire"] - extra[r] for r in ranks), len(ranks))
        peak = Fraction(sum(seen[r]["height"] - beside[r] - held[r] for r in ranks), len(ranks))

        where = (setting.key, str(case.layout))
        assert received == formula.received * model, where
        assert peak == formula.peak * model, where


def sharded_bytes(setting: Setting) -> int:
    """M of the formulas: the weights that t and p divide."""
    sizes = [4 * prod(p.shape) for p in parameters(setting.case.arch) if "norm" not in p.name]
    return sum(sizes)


def test_every_system_moves_and_holds_the_predicted_bytes_in_every_layout_of_four_ranks(
    four: Measured,
) -> None:
    assert {setting.key for setting, _, _ in four} == set(SYSTEMS)
    judge(four)


def test_measured_bytes_of_sharded_weights_are_the_papers_in_every_layout_of_four_ranks(
    four: Measured,
) -> None:
    judge_paper(four)


def test_one_copy_holds_a_generation_shard_and_blocks_only_a_training_shard_while_training(
    four: Measured,
) -> None:
    for setting, cost, seen in four:
        layout = setting.case.layout
        model = Fraction(sharded_bytes(setting))
        if setting.key not in ("hybridflow flat", "hybridflow blocks"):
            continue
        extra = {
            phase: sum(amount.total - amount.sharded for amount in amounts.values())
            for phase, amounts in (("training", cost.training), ("generation", cost.generation))
        }

        held = {
            phase: Fraction(sum(found[phase] for found in seen.values()) - extra[phase], len(seen))
            for phase in extra
        }

        shard = model / (layout.gen_tp_size * layout.gen_pp_size)
        own = model / (layout.tp_size * layout.pp_size)
        assert held["generation"] == shard
        assert held["training"] == (shard if setting.key == "hybridflow flat" else own)


@pytest.mark.slow
def test_few_kv_heads_and_tied_embeddings_are_predicted_to_the_byte_too(
    other_models: Measured,
) -> None:
    judge(other_models)
    one_copy = ("hybridflow flat", "hybridflow blocks")
    few = [row for row in other_models if row[0].model == "one kv head"]
    judge_paper([row for row in few if row[0].key in one_copy])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_system_in_every_layout_of_eight_ranks(eight: Measured) -> None:
    judge(eight)
    judge_paper(eight)
