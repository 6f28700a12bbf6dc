"""algos/grpo_async.py from end to end: a generator on ranks of its own, one step ahead."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError
from tests.algos.runs import FEW_SUMS, ROOT, check_prediction, run_ranks, steps_of

ASYNC = ROOT / "algos" / "grpo_async.py"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=6",
    "data.samples_per_prompt=4",
    "actor.rollout.temperature=2.5",  # so that samples of a prompt differ
    "actor.update.mini_batch_size=12",  # two optimizer steps a step
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "run.sample_every=0",
    "total_steps=4",
    "eval_every=2",
)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, ()),
        pytest.param(
            4,
            (
                "actor.engine.kind=megatron",
                "actor.engine.layout=t2",
                "actor.rollout.engine=vllm",
                "actor.rollout.layout=t2",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            3,
            (
                "placement={a: {roles: [actor, reference, reward], ranks: [0, 1]}, "
                "b: {roles: [generator], ranks: [2]}}",
                "actor.engine.kind=zero1",
                "actor.rollout.engine=vllm",
                "actor.rollout.dtype=bfloat16",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            3,
            (
                "placement={a: {roles: [actor, reference, reward], ranks: [0]}, "
                "b: {roles: [generator], ranks: [1, 2]}}",
                "actor.rollout.engine=vllm",
                "actor.rollout.layout=t2",
                "actor.rollout.weights=copy",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_samples_are_one_update_old_and_weights_arrive_as_they_were_sent(
    tmp_path: Path, num_ranks: int, settings: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    weighted = "actor.update.old_log_probs=recompute"  # auto: the ratio itself is of older weights
    words = (*settings, weighted)

    run_ranks(run_dir, *words, num_ranks=num_ranks, script=ASYNC, small=SMALL)
    check_prediction(run_dir)
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
    for step in steps[1:]:
        assert step["rollout/weights_verified"] == 1
        assert step["rollout/synced_bytes"] > 0
        assert step["controller/tensor_bytes"] == 0
        assert step["transfer/bytes"] == step["transfer/planned_bytes"] > 0
        # made during this step, for the next one, by the policy before this step's update
        assert step["rollout/weights_version"] == 2 * (step["step"] - 1)
    assert steps[1]["rollout/drift"] < steps[2]["rollout/drift"]  # the same weights, then older
    assert steps[2]["rollout/weight_mean"] != 1


def test_rows_with_prompts_of_different_lengths_end_where_they_began(tmp_path: Path) -> None:
    """Two replicas generate by cost: both calls of a row must go to the same one."""
    train = tmp_path / "train.jsonl"
    with open(train, "w") as file:
        for number in range(12, 36):
            shown = f"{number}+{number}=" if number % 6 else "+".join(["11"] * 12) + "="
            file.write(json.dumps({"prompt": shown, "answer": str(2 * number)}) + "\n")
    words = (
        f"data.train_path={train}",
        "data.max_prompt_tokens=48",
        "eval_every=0",
        "actor.engine.micro_batch_rows=null",  # a limit on tokens: other calls balance lengths
        "placement={a: {roles: [actor, reference, reward], ranks: [0]}, "
        "b: {roles: [generator], ranks: [1, 2]}}",
    )

    run_ranks(tmp_path / "run", *words, num_ranks=3, script=ASYNC, small=SMALL)

    check_prediction(tmp_path / "run")
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_policy_and_generator_on_common_ranks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    words = [*SMALL, "placement=colocate", f"run.dir={tmp_path / 'run'}"]
    loaded = load(ASYNC, None, words)

    with pytest.raises(
        ConfigError, match=r"connect: got ranks \[0\] in actor and generator, .*split"
    ):
        run_flow(loaded.script, loaded.cfg, inproc=True)


@pytest.mark.slow
def test_grpo_async_learns_the_bundled_task(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, num_ranks=2, script=ASYNC, small=())
    accuracy = {s["step"]: s["eval/accuracy"] for s in steps_of(run_dir) if "eval/accuracy" in s}
    assert accuracy[max(accuracy)] >= 0.9 > accuracy[0] + 0.2
