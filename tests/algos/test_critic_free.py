"""ReMax, RLOO and REINFORCE++ from end to end: in one process, on two ranks, and their formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.runs import FEW_SUMS, ROOT, check_same_numbers, run_ranks, steps_of

SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=6",
    "actor.rollout.temperature=2.5",  # so that samples of a prompt differ
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "run.sample_every=0",
    "total_steps=2",
    "eval_every=2",
)
SCRIPTS = {
    "remax": (  # two ranks cut the third prompt's samples, whose greedy response is on one of them
        "data.prompts_per_step=5",
        "data.samples_per_prompt=3",
        "actor.update.mini_batch_size=15",
    ),
    "rloo": ("actor.update.mini_batch_size=24",),
    "reinforce_pp": ("actor.update.mini_batch_size=6",),
}
"""Script -> what its tiny run needs besides SMALL."""
COMPARED = ("reward/mean", "actor/pg_loss", "actor/grad_norm", "greedy/mean", "eval/accuracy")


def run(name: str, run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    script = ROOT / "algos" / f"{name}.py"
    words = [*SMALL, *SCRIPTS[name], *settings, f"run.dir={run_dir}"]
    loaded = load(script, None, words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "remax" else pytest.mark.slow) for name in SCRIPTS],
)
def test_two_ranks_give_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    one = run(name, tmp_path / "one")
    run_dir = tmp_path / "two"
    small = (*SMALL, *SCRIPTS[name])

    run_ranks(run_dir, num_ranks=2, script=ROOT / "algos" / f"{name}.py", small=small)
    two = check_same_numbers(run_dir, one, COMPARED)
    assert [step["step"] for step in two] == [0, 1, 2]
    assert two[1]["actor/grad_norm"] > 0


def test_remax_learns_nothing_from_a_sample_that_is_the_greedy_response(tmp_path: Path) -> None:
    steps = run("remax", tmp_path / "run", "actor.rollout.top_k=1", "advantage.kl_coef=0")

    for step in steps[1:]:
        assert step["reward/mean"] == pytest.approx(step["greedy/mean"])  # of 15 and of 5 rows
        assert step["reward/accuracy"] == pytest.approx(step["greedy/accuracy"])
        assert step["reward/mean"] > 0
        assert step["actor/pg_loss"] == step["actor/grad_norm"] == 0


def test_remax_keeps_the_scores_of_samples_and_greedy_responses_apart(tmp_path: Path) -> None:
    words = ("total_steps=1", "eval_every=0", "data.prompts_per_step=30")
    step = run("remax", tmp_path / "run", *words)[0]

    assert step["greedy/mean"] > step["reward/mean"]  # at a temperature of 2.5


def test_remax_has_one_greedy_response_for_each_prompt(tmp_path: Path) -> None:
    short = ("total_steps=1", "eval_every=0")
    alone = ("data.samples_per_prompt=1", "actor.update.mini_batch_size=5")

    three = run("remax", tmp_path / "3", *short)[0]
    one = run("remax", tmp_path / "1", *short, *alone)[0]

    per_prompt = one["rollout/prompt_tokens"] / 2  # a sample and a greedy response
    assert three["rollout/prompt_tokens"] == (3 + 1) * per_prompt
    assert three["greedy/mean"] == one["greedy/mean"]


def test_rloo_learns_nothing_from_samples_that_are_alike(tmp_path: Path) -> None:
    settings = ("actor.rollout.top_k=1", "advantage.kl_coef=0", "total_steps=1", "eval_every=0")

    step = run("rloo", tmp_path / "run", *settings)[0]

    assert step["actor/pg_loss"] == step["actor/grad_norm"] == 0


def test_reinforce_pp_has_its_baseline_variant_by_name(tmp_path: Path) -> None:
    groups = ("data.samples_per_prompt=4", "actor.update.mini_batch_size=24", "total_steps=1")
    plain = run("reinforce_pp", tmp_path / "plain", *groups)
    variant = "advantage.estimator=reinforce_pp_baseline"
    loss = ("advantage.kl_coef=0", "actor.loss.kl_coef=0.01", "actor.loss.kl_estimator=k2")
    centred = run("reinforce_pp", tmp_path / "centred", *groups, variant, *loss)

    assert centred[1]["actor/grad_norm"] != pytest.approx(plain[1]["actor/grad_norm"], rel=1e-2)
    assert "actor/kl_loss" in centred[1] and "actor/kl_loss" not in plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_learns_the_bundled_task(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, num_ranks=2, script=ROOT / "algos" / f"{name}.py", small=())
    accuracy = {s["step"]: s["eval/accuracy"] for s in steps_of(run_dir) if "eval/accuracy" in s}
    assert accuracy[max(accuracy)] >= 0.9 > accuracy[0] + 0.2
