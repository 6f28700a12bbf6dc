"""algos/safe_rlhf.py from end to end: two signals, the multiplier, the pre-training text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import RowError
from tests.algos.runs import (
    ROOT,
    SMALL,
    check_prediction,
    numbers_of,
    run_ranks,
    steps_of,
)

SAFE = ROOT / "algos" / "safe_rlhf.py"
TINY = (
    *SMALL,
    "pretrain.prompts_per_step=16",
    "cost_critic.update.mini_batch_size=8",
    "cost_critic.optimizer.schedule=constant",
    "cost_critic.optimizer.warmup_steps=0",
    "total_steps=3",
    "eval_every=0",
)
COMPARED = (
    "reward/mean",
    "cost/mean",
    "multiplier",
    "actor/pg_loss",
    "actor/pretrain_loss",
    "actor/pretrain_loss_before",
    "actor/grad_norm",
    "critic/loss",
    "cost_critic/loss",
    "cost_critic/grad_norm",
)


def run(run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    loaded = load(SAFE, None, [*TINY, *settings, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("one") / "run")


def test_without_a_kl_in_the_reward_the_policy_scores_its_tokens_in_the_update_alone(
    tmp_path: Path,
) -> None:
    words = ("advantage.kl_coef=0", "actor.update.mini_batch_size=16", "total_steps=2")
    words += ("reference.compute=always",)
    recomputed = run(tmp_path / "a", *words, "actor.update.old_log_probs=recompute")
    chosen = run(tmp_path / "b", *words)

    for one, other in zip(recomputed, chosen, strict=True):
        assert "time/compute_log_prob_seconds" in one.keys() - other.keys()
        assert [one[name] for name in COMPARED] == [other[name] for name in COMPARED]
        for name in (
            "actor/entropy",
            "rollout/drift",
            "actor/reference_kl",
        ):  # texts are none of it
            assert other[name] == pytest.approx(one[name], rel=1e-6), name


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("placement=split",), marks=pytest.mark.slow),
        pytest.param(
            (  # texts and cost values of tensor-parallel models
                "actor.engine.kind=megatron",
                "actor.engine.layout=t2",
                "cost_critic.engine.kind=megatron",
                "cost_critic.engine.layout=t2",
            ),
            marks=pytest.mark.drill,
        ),
        pytest.param(("placement=colocate",), marks=pytest.mark.slow),
        pytest.param(
            ("actor.engine.kind=megatron", "actor.engine.layout=p2"), marks=pytest.mark.slow
        ),
    ],
)
def test_two_ranks_give_the_numbers_of_one_process(
    in_one_process: list[dict[str, Any]], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, *settings, num_ranks=2, script=SAFE, small=TINY)
    check_prediction(run_dir)
    for one, two in zip(in_one_process, steps_of(run_dir), strict=True):
        for name in COMPARED:  # float32 sums in another order
            assert two[name] == pytest.approx(one[name], rel=5e-5, abs=1e-6), name
        assert two["controller/tensor_bytes"] == 0


@pytest.mark.drill
def test_multiplier_follows_the_mean_cost_of_each_step(
    in_one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    value = 1.0
    for step in in_one_process:  # limit 0.1, lr 0.5
        value *= math.exp(0.5 * value * (step["cost/mean"] - 0.1))
        assert step["multiplier"] == pytest.approx(value, rel=1e-6)

    strict = run(tmp_path / "strict", "lagrange.limit=0.0", "total_steps=1")[0]
    loose = run(tmp_path / "loose", "lagrange.limit=1.0", "total_steps=1")[0]
    assert strict["cost/mean"] == loose["cost/mean"] > 0
    assert strict["multiplier"] > 1 > loose["multiplier"]
    assert strict["actor/pg_loss"] != loose["actor/pg_loss"]


@pytest.mark.drill
def test_pre_training_text_is_unlearnt_without_its_loss_and_kept_with_it(tmp_path: Path) -> None:
    settings = ("actor.optimizer.lr=1e-3", "total_steps=4")

    mixed = run(tmp_path / "mixed", *settings, "actor.loss.pretrain_coef=1.0")
    alone = run(tmp_path / "alone", *settings, "actor.loss.pretrain_coef=0.0")

    assert mixed[0]["actor/pretrain_loss_before"] == alone[0]["actor/pretrain_loss_before"]
    assert mixed[-1]["actor/pretrain_loss"] < alone[-1]["actor/pretrain_loss"] - 0.1
    assert mixed[0]["actor/loss"] > mixed[0]["actor/pretrain_loss"] / 2 > alone[0]["actor/loss"]


def test_run_resumes_with_its_multiplier_and_its_texts(tmp_path: Path) -> None:
    run(tmp_path / "run", "total_steps=3", "save_every=1")
    whole = numbers_of(tmp_path / "run")
    halves = tmp_path / "halves"
    run(halves, "total_steps=2", "save_every=1")
    run(halves, "total_steps=3", "save_every=1")

    again = numbers_of(halves)

    assert [step["step"] for step in again] == [1, 2, 3]
    for name in COMPARED:
        assert again[2][name] == whole[2][name], name


def test_other_numbers_of_texts_and_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="^aligned_with: got 4 rows for a batch of 16, expected as"):
        run(tmp_path / "run", "pretrain.prompts_per_step=4")


def test_cost_model_scores_and_is_where_the_cost_critic_starts(tmp_path: Path) -> None:
    source = ROOT / "algos" / "arithmetic" / "model"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "cost")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "cost")
    model = (f"cost.model.path={tmp_path / 'cost'}", "cost.function=null", "lagrange.limit=-5")

    steps = run(tmp_path / "run", *model, "total_steps=1")

    assert steps[0]["cost/mean"] not in (0.0, 1.0)
    assert steps[0]["cost_critic/value_mean"] != 0  # no zero head: it starts from the cost model
    assert steps[0]["critic/value_mean"] == pytest.approx(0, abs=1e-2)


@pytest.mark.slow
def test_reward_rises_while_the_cost_is_driven_below_its_limit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, num_ranks=2, script=SAFE, small=())
    steps = steps_of(run_dir)[1:]
    first = steps[:3]
    last = steps[-3:]
    mean = {name: [sum(s[name] for s in part) / 3 for part in (first, last)] for name in COMPARED}
    assert mean["reward/mean"][1] > mean["reward/mean"][0] + 0.03
    assert mean["cost/mean"][0] > 0.15 and min(s["cost/mean"] for s in steps) < 0.095
    assert sum(step["cost/mean"] for step in steps[-10:]) / 10 < 0.1  # the limit
    largest = max(step["multiplier"] for step in steps)
    assert steps[0]["multiplier"] < largest - 0.1 and steps[-1]["multiplier"] < largest - 0.1
    assert mean["actor/pretrain_loss"][1] < mean["actor/pretrain_loss"][0]
