"""algos/grpo.py from end to end: groups that lie on two ranks, its named choices, learning."""

from __future__ import annotations

import difflib
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.runs import FEW_SUMS, ROOT, SCRIPT, check_same_numbers, run_ranks, steps_of

GRPO = ROOT / "algos" / "grpo.py"
OWN = ROOT / "tests" / "algos" / "programs" / "own_estimator.py"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=5",
    "data.samples_per_prompt=4",  # 20 rows: a group lies on two ranks
    "actor.rollout.temperature=2.5",  # so that samples of a prompt differ
    "actor.update.mini_batch_size=20",
    "actor.update.num_epochs=2",  # the second step's samples are off-policy, so clips matter
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "run.sample_every=0",
    "total_steps=2",
    "eval_every=2",
)
COMPARED = ("reward/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "eval/accuracy")


def run(script: Path, run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    words = [*SMALL, *settings, f"run.dir={run_dir}"]
    loaded = load(script, GRPO.with_suffix(".yaml"), words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(GRPO, tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize("placement", [pytest.param("colocate", marks=pytest.mark.slow), "split"])
def test_groups_over_two_ranks_give_the_numbers_of_one_process(
    in_one_process: list[dict[str, Any]], tmp_path: Path, placement: str
) -> None:
    run_dir = tmp_path / "run"
    settings = (f"placement={placement}", "run.profile_steps=[2]")

    run_ranks(run_dir, *settings, num_ranks=2, script=GRPO, small=SMALL)
    steps = check_same_numbers(run_dir, in_one_process, COMPARED)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[1]["actor/grad_norm"] > 0
    (profile,) = (run_dir / "profile").iterdir()
    assert profile.name == "step_2_rank_0.json.gz"
    names = {
        event["name"] for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    }
    assert {"actor.generate_sequences", "actor.update_actor"} <= names
    assert {"mkldnn::_linear_pointwise", "aten::mm"} & names, "products, by oneDNN if it is there"


@pytest.mark.parametrize(
    "settings",
    [
        ("advantage.estimator=dr_grpo", "actor.loss.aggregation=sequence-mean-token-sum-by-budget"),
        ("actor.loss.surrogate=gspo", "actor.loss.clip_ratio=3e-4"),
        ("actor.loss.surrogate=cispo", "actor.loss.clip_ratio_high=0.28"),
        ("advantage.estimator=rloo", "actor.loss.surrogate=plain"),
        ("advantage.estimator=opo", "actor.loss.dual_clip=3.0"),
        ("advantage.estimator=reinforce_pp_baseline", "advantage.whiten=true"),
        ("advantage.estimator=reinforce_pp", "advantage.whiten=true", "advantage.kl_coef=0.01"),
    ],
)
def test_named_choice_trains_and_differs_from_grpo(
    in_one_process: list[dict[str, Any]], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    steps = run(GRPO, tmp_path / "run", *settings, "total_steps=1")

    grpo = in_one_process[1]["actor/grad_norm"]
    own = steps[1]["actor/grad_norm"]
    assert own > 0 and own != pytest.approx(grpo, rel=1e-2)


def test_setting_of_the_update_corrects_rollouts_without_a_line_in_the_script(
    in_one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    words = ("actor.update.correction.kind=token", "actor.rollout.dtype=bfloat16")

    (_, step) = run(GRPO, tmp_path / "run", *words, "total_steps=1", "eval_every=2")

    assert step["rollout/drift"] > 1e-4, "bfloat16 differs from the trainer's float32"
    assert step["rollout/trainer_kl"] > 0 and step["rollout/weight_std"] > 0
    assert step["rollout/weight_mean"] == pytest.approx(1, abs=0.1)
    assert step["rollout/log_ppl_diff_min"] < step["rollout/log_ppl_diff_max"]
    assert step["actor/grad_norm"] > 0
    assert not any(name.startswith("rollout/weight_") for name in in_one_process[1])


def test_estimator_and_loss_of_a_script_are_chosen_by_name(tmp_path: Path) -> None:
    steps = run(
        OWN,
        tmp_path / "run",
        "actor.loss.surrogate=unclipped",
        "actor.loss.kl_coef=0",
        "eval_every=0",
    )

    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/weight_mean"] == pytest.approx(1, abs=1e-4)  # the same weights
        assert step["rollout/weight_ess"] == pytest.approx(1, abs=1e-4)
        assert step["actor/clip_fraction"] == 0


def test_script_reads_as_a_diff_against_ppo() -> None:
    texts = [path.read_text().split("Config = GRPOConfig")[-1] for path in (SCRIPT, GRPO)]
    ppo, grpo = (text[text.index("def main(") :].splitlines() for text in texts)

    changed = [
        line for line in difflib.unified_diff(ppo, grpo, n=0, lineterm="") if line[:1] in "+-"
    ]

    assert len(changed) - 2 <= 10, "\n".join(changed)


@pytest.mark.slow
def test_grpo_learns_the_bundled_task(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, num_ranks=2, script=GRPO, small=())
    accuracy = {s["step"]: s["eval/accuracy"] for s in steps_of(run_dir) if "eval/accuracy" in s}
    assert accuracy[max(accuracy)] >= 0.9 > accuracy[0] + 0.2
