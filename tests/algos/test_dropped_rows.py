"""reward.on_error=drop in whole runs: counted, left out of every mean, refused above its share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import RewardError
from spmdflow.tracking.reading import RunFiles
from tests.algos.runs import (
    FEW_SUMS,
    ROOT,
    check_prediction,
    finish,
    log_of,
    run_ranks,
    steps_of,
    torchrun,
)

GRPO = ROOT / "algos" / "grpo.py"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=8",
    "data.samples_per_prompt=4",
    "actor.rollout.temperature=2.5",
    "actor.update.mini_batch_size=16",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "run.sample_every=1",
    "total_steps=2",
    "eval_every=1",
    "data.eval_prompts=12",
    "data.eval_samples=2",
)
FAILS_SOMETIMES = """
def score(prompt, response, row, *, digits):
    if str(row["answer"])[-1] in digits:
        raise ValueError("no judge for " + str(row["answer"]))
    return 1.0
"""


def settings(folder: Path, digits: str, most: float = 0.1) -> list[str]:
    """Every answer scores 1, but those that end with one of the digits fail."""
    (folder / "judge.py").write_text(FAILS_SOMETIMES)
    function = f"reward.function=\"{folder}/judge.py:score(digits='{digits}')\""
    drop = ("reward.on_error=drop", f"reward.max_failed_fraction={most}")
    return [function, *drop, f"run.dir={folder}/run"]


def run(script: Path, words: list[str]) -> int:
    loaded = load(script, None, words)
    check(loaded.cfg, 1)
    return run_flow(loaded.script, loaded.cfg, inproc=True)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dropped")
    assert run(GRPO, [*SMALL, *settings(folder, "23", most=0.9)]) == 0
    return folder / "run"


def test_failed_rows_are_counted_and_in_no_mean(in_one_process: Path) -> None:
    start, *steps = steps_of(in_one_process)

    assert sum(step["reward/dropped"] for step in steps) > 0
    for step in steps:
        share = step["reward/dropped"] / 32
        assert step["reward/dropped_share"] == pytest.approx(share) and share < 0.9
        assert step["reward/mean"] == 1.0, "as a zero it would be below"
        assert step["reward/penalised_mean"] == 1.0
        assert "reward/errors" not in step
    assert 0 < start["eval/dropped"] < 12 and start["eval/mean"] == 1.0
    assert start["eval/pass@2"] == 1.0, "prompts with a failed row are left out"


def test_tokens_of_failed_rows_are_counted_apart_from_trained_ones(in_one_process: Path) -> None:
    _, *steps = steps_of(in_one_process)

    for step, tokens in zip(steps, RunFiles(in_one_process).throughput, strict=True):
        assert tokens["failed"]["rows"] == step["reward/dropped"]
        assert tokens["trained"]["rows"] == 32 - step["reward/dropped"]
        assert tokens["dropped"]["rows"] == 0, "all rows were given to the update"
        for name in ("prompt_tokens", "response_tokens"):
            both = tokens["trained"][name] + tokens["failed"][name]
            assert both == step[f"rollout/{name}"]


def test_a_sample_that_failed_has_no_score(in_one_process: Path) -> None:
    lines = (in_one_process / "samples.jsonl").read_text().splitlines()
    samples: list[dict[str, Any]] = [json.loads(line) for line in lines]

    failed = [sample for sample in samples if sample["terms"]["errors"]]
    assert {sample["score"] for sample in failed} <= {None}
    assert {sample["score"] for sample in samples if sample not in failed} == {1.0}


def test_a_run_in_which_too_many_rows_fail_ends_with_the_first_failure(tmp_path: Path) -> None:
    words = [*SMALL, "eval_every=0", *settings(tmp_path, "01234567")]

    with pytest.raises(RewardError) as caught:
        run(GRPO, words)

    first, second, *_ = str(caught.value).splitlines()
    assert (
        first.startswith("reward.max_failed_fraction: got ")
        and " failed rows among the 32 of one" in first
    )
    assert "), expected at most 0.1; fix the function, or set a larger fraction, such as" in first
    assert second.startswith("the first failure: reward.function ")
    assert "raised ValueError: no judge for" in second


@pytest.mark.slow
def test_two_ranks_count_and_refuse_as_one(in_one_process: Path, tmp_path: Path) -> None:
    words = settings(tmp_path, "23", most=0.9)
    run_ranks(tmp_path / "run", *words, num_ranks=2, script=GRPO, small=SMALL)
    check_prediction(tmp_path / "run")
    one = steps_of(in_one_process)[:2]
    two = steps_of(tmp_path / "run")[:2]
    for name in ("reward/dropped", "reward/dropped_share", "reward/mean"):
        assert [step.get(name) for step in two] == [step.get(name) for step in one]
    assert two[0]["eval/dropped"] == one[0]["eval/dropped"]

    refused = tmp_path / "refused"
    refused.mkdir()
    words = settings(refused, "01234567")
    process = torchrun(refused / "run", *words, num_ranks=2, script=GRPO, small=SMALL)
    assert finish(process) != 0
    log = log_of(refused / "run").read_text()
    assert "failed rows among the 12 of one call" in log, "both ranks' rows of the evaluation"
    assert "the first failure: reward.function" in log


@pytest.mark.slow
def test_an_evaluation_leaves_out_prompts_with_a_failed_row(tmp_path: Path) -> None:
    small = ["data.eval_prompts=12", "data.eval_samples=2", "actor.model.path=" + str(MODEL)]
    words = settings(tmp_path, "23", most=0.9)

    assert run(ROOT / "algos" / "evaluate.py", [*small, *words]) == 0

    lines = (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    failed = [prompt for prompt in prompts if prompt["row"]["answer"][-1] in "23"]
    assert len(prompts) == 12 and 0 < len(failed) < 12
    for prompt in prompts:
        scores = {prompt["greedy"]["score"], *(sample["score"] for sample in prompt["samples"])}
        assert scores == ({None} if prompt in failed else {1.0})
        assert ("pass@2" in prompt) == (prompt not in failed)
    (step,) = steps_of(tmp_path / "run")
    assert step["eval/score"] == 1.0 and step["eval/dropped"] == len(failed)


MODEL = ROOT / "algos" / "arithmetic" / "model"
