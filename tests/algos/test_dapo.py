"""algos/dapo.py from end to end: batches that were refilled, and a limit on how often."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import RowError
from spmdflow.report import main
from tests.algos.runs import FEW_SUMS, ROOT, check_same_numbers, run_ranks, steps_of

DAPO = ROOT / "algos" / "dapo.py"
ROWS = 16
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "actor.rollout.temperature=0.7",  # cold: most prompts have samples that are all alike
    "actor.update.mini_batch_size=16",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "run.sample_every=0",
    "total_steps=2",
    "eval_every=2",
)
COMPARED = (
    "sampling/rounds",
    "sampling/kept",
    "reward/mean",
    "reward/overlong",
    "actor/pg_loss",
    "actor/grad_norm",
    "eval/accuracy",
)


def run(run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    loaded = load(DAPO, None, [*SMALL, *settings, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


@pytest.fixture(scope="module")
def dir_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def in_one_process(dir_of_one_process: Path) -> list[dict[str, Any]]:
    return steps_of(dir_of_one_process)


def test_batches_are_refilled_with_prompts_whose_samples_differ(
    in_one_process: list[dict[str, Any]],
) -> None:
    for step in in_one_process[1:]:
        rounds = step["sampling/rounds"]
        kept = step["sampling/kept"]
        assert rounds > 1
        assert kept < 1 <= kept * rounds  # no single round had enough, all of them together do
        assert step["rollout/response_tokens"] > 0
        assert step["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("placement=split",),
        pytest.param(
            ("actor.engine.kind=megatron", "actor.engine.layout=p2"), marks=pytest.mark.slow
        ),
        pytest.param(("placement=colocate",), marks=pytest.mark.slow),
        pytest.param(
            ("actor.engine.kind=megatron", "actor.engine.layout=t2"), marks=pytest.mark.slow
        ),
    ],
)
def test_two_ranks_refill_with_the_same_rows_and_give_the_same_numbers(
    in_one_process: list[dict[str, Any]], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, *settings, num_ranks=2, script=DAPO, small=SMALL)
    steps = check_same_numbers(run_dir, in_one_process, COMPARED)
    assert [step["step"] for step in steps] == [0, 1, 2]


def test_batch_that_does_not_fill_ends_the_run_with_got_expected_and_do(tmp_path: Path) -> None:
    settings = ("actor.rollout.top_k=1", "sampling.max_rounds=3", "eval_every=0")

    with pytest.raises(RowError) as caught:
        run(tmp_path / "run", *settings)

    assert str(caught.value) == (
        "dynamic sampling: got 0 rows of prompts whose samples differ in score, among 48 rows "
        "sampled in 3 rounds, expected 16; raise sampling.max_rounds, or choose prompts that the "
        "policy solves sometimes but not always"
    )


def test_long_responses_lose_score_after_the_groups_were_chosen(tmp_path: Path) -> None:
    settings = ("overlong.buffer_tokens=4", "actor.rollout.temperature=3", "total_steps=1")

    plain = run(tmp_path / "plain", *settings, "overlong.weight=0", "eval_every=0")[0]
    shaped = run(tmp_path / "shaped", *settings, "eval_every=0")[0]

    assert plain["reward/overlong"] == 0 > shaped["reward/overlong"] >= -1
    assert shaped["reward/mean"] == plain["reward/mean"]
    assert shaped["sampling/rounds"] == plain["sampling/rounds"]
    assert shaped["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_dapo_learns_the_bundled_task(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    run_ranks(run_dir, num_ranks=2, script=DAPO, small=())
    steps = steps_of(run_dir)
    accuracy = {s["step"]: s["eval/accuracy"] for s in steps if "eval/accuracy" in s}
    assert accuracy[max(accuracy)] >= 0.9 > accuracy[0] + 0.2
    kept = [step["sampling/kept"] for step in steps[1:]]
    assert sum(kept[-5:]) < sum(kept[:5])  # the more it knows, the fewer prompts teach


def test_throughput_of_a_run_with_dropped_groups_when_reported_counts_them_apart(
    dir_of_one_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = (step for step in steps_of(dir_of_one_process) if step["step"] > 0)
    generated = last["rollout/prompt_tokens"] + last["rollout/response_tokens"]

    assert main([str(dir_of_one_process), "--throughput", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)

    assert first["sampling/kept"] < 1 and last["sampling/kept"] < 1, "rows were dropped"
    assert report["num_measured"] == 1 and report["evaluating_seconds"]["count"] == 1
    rates = report["rates"]
    assert rates["seconds"] == last["time/step_seconds"], "the last step has no next one"
    trained = rates["trained"] * rates["seconds"]
    dropped = rates["dropped"] * rates["seconds"]
    assert report["prompt_lengths"]["rows"] == ROWS
    assert trained + dropped == pytest.approx(generated)
    lengths = report["prompt_lengths"]["mean"] + report["response_lengths"]["mean"]
    assert trained == pytest.approx(ROWS * lengths)
    launch = report["launch"]
    assert launch["device"].startswith("CPU") and launch["ranks"] == launch["nodes"] == 1
    assert launch["models"]["actor"]["generator"] == "builtin"
    assert {"python", "torch", "transformers"} <= launch["versions"].keys()
    assert report["compute"]["mfu"] is None and "no peak of CPU" in report["compute"]["unknown"]
    assert report["compute"]["by_kind"]["train"] > 0

    assert main([str(dir_of_one_process), "--throughput"]) == 0
    text = capsys.readouterr().out
    assert "warning: warm-up (10 steps) is longer than the run (2)" in text
    assert max(map(len, text.splitlines())) <= 140
