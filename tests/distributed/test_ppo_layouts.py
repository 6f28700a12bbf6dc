"""One script under every placement: same losses and gradient norms on the same rollouts.

Three steps of three optimizer steps each (37 samples, mini-batches of 13, so uneven everywhere).
Tolerance: float32 sums in another order, relative 2e-5, grown over nine optimizer steps. The
same layout twice must agree in every bit.
"""

from __future__ import annotations

import json

import pytest

from tests.distributed.programs import ppo_layouts
from tests.distributed.replayed import check_old_log_probs, planned_as_counted, settings_of_run

pytestmark = pytest.mark.drill

CASES = (
    "colocate-2", "colocate-4", "split-2", "split-4", "standalone-4", "standalone-8",
    "colocate-4-s2",
)  # fmt: skip
COMPARED = (
    "actor/pg_loss", "actor/grad_norm", "actor/approx_kl", "actor/reference_kl", "actor/entropy",
    "critic/loss", "critic/grad_norm", "critic/value_mean", "reward/mean",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, spawn_ranks):
    out = tmp_path_factory.mktemp("layouts")
    spawn_ranks(ppo_layouts.run_all, 8, str(out), seconds=400)
    return out


def steps_of(runs, case):
    return [json.loads(line) for line in (runs / case / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_norms_agree_with_a_single_rank(runs, case):
    for one, other in zip(steps_of(runs, "colocate-1"), steps_of(runs, case), strict=True):
        for name in COMPARED:
            assert other[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("first", "second"),
    [("colocate-4", "colocate-4-again"), ("colocate-4-s2", "colocate-4-s2-resumed")],
)
def test_the_same_layout_twice_agrees_in_every_bit_also_if_resumed(runs, first, second):
    for one, other in zip(steps_of(runs, first), steps_of(runs, second), strict=True):
        timed = {n for n in one.keys() | other.keys() if n.startswith(("time/", "perf/"))}
        assert {k: one[k] for k in one.keys() - timed} == {
            k: other[k] for k in other.keys() - timed
        }


@pytest.mark.parametrize("case", ("colocate-1", *CASES))
def test_no_tensor_passes_the_controller_and_bytes_moved_equal_bytes_planned(runs, case):
    for step in steps_of(runs, case):
        assert step["controller/tensor_bytes"] == 0
        assert step["transfer/bytes"] == step["transfer/planned_bytes"]


@pytest.mark.parametrize("case", ("colocate-1", *CASES))
def test_plan_has_the_bytes_that_were_counted_on_every_edge(runs, case):
    cfg = settings_of_run(runs / case)

    planned = planned_as_counted(ppo_layouts, cfg, runs / case)

    assert any(planned.edges.values()) == (case != "colocate-1")


def test_disjoint_pools_exchange_bytes_and_one_rank_none(runs):
    assert all(step["transfer/bytes"] == 0 for step in steps_of(runs, "colocate-1"))
    assert all(step["transfer/bytes"] > 0 for step in steps_of(runs, "standalone-4"))


@pytest.mark.parametrize("kind", ppo_layouts.ENGINES)
def test_old_log_probs_of_the_update_or_the_generator_teach_two_ranks_the_same(runs, kind):
    check_old_log_probs(runs / "old" / kind)
