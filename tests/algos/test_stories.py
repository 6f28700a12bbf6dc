"""PPO on a real model with a real reward model: algos/ppo_stories.yaml, judged by transformers."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from scripts.stories_metrics import REFERENCE, Judge, exports_of, load_writer, row_of
from tests.algos.runs import ROOT, SMALL_STEPS, run_ranks, steps_of

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(
        "SPMDFLOW_DATA" not in os.environ, reason="SPMDFLOW_DATA names no data folder"
    ),
]
YAML = str(ROOT / "algos" / "ppo_stories.yaml")
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
NUM_PROMPTS = 16  # of the evaluation, as tests.algos.runs sets it


@pytest.fixture(
    scope="module", params=["builtin", pytest.param("vllm", marks=[NEEDS_VLLM, pytest.mark.slow])]
)
def run_dir(request, tmp_path_factory):
    """Two steps with either generator."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    settings = ("total_steps=2", "eval_every=2", "save_every=2", "actor.optimizer.lr=1e-3")
    engine = f"actor.rollout.engine={request.param}"
    run_ranks(folder, YAML, *settings, engine, num_ranks=2, small=SMALL_STEPS)
    return folder


@torch.no_grad()
def judged(folder: Path) -> float:
    """Mean reward of greedy responses, by transformers."""
    judge = Judge(Path(os.environ["SPMDFLOW_DATA"]), max_new_tokens=64, num_prompts=NUM_PROMPTS)
    return row_of("", "greedy", [judge.respond(load_writer(folder), greedy=True, seed=0)]).reward


# 1e-3: rewards of float32 models differ by 1e-5 between implementations


def test_the_first_evaluation_is_the_reward_of_the_pretrained_model(run_dir):
    start = Path(os.environ["SPMDFLOW_DATA"]) / REFERENCE

    assert steps_of(run_dir)[0]["eval/mean"] == pytest.approx(judged(start), abs=1e-3)


def test_the_export_has_the_reward_that_the_last_evaluation_measured(run_dir):
    first, *_, last = steps_of(run_dir)

    assert last["eval/mean"] == pytest.approx(judged(exports_of(run_dir)["step-2"]), abs=1e-3)
    assert last["eval/mean"] != pytest.approx(first["eval/mean"], abs=1e-2)


def test_the_critic_knows_the_reward_from_the_start(run_dir):
    assert steps_of(run_dir)[1]["critic/explained_variance"] > 0.2


def test_kl_is_zero_before_the_first_update_and_positive_after_it(run_dir):
    first, second = (step["actor/reference_kl_per_response"] for step in steps_of(run_dir)[1:])

    assert abs(first) < 1e-3
    assert second > 0.01


def test_bytes_moved_are_those_planned_and_none_go_through_the_controller(run_dir):
    for step in steps_of(run_dir):
        assert step["transfer/bytes"] == step["transfer/planned_bytes"]
        assert step["controller/tensor_bytes"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@torch.no_grad()
def test_twenty_steps_make_stories_cheerful_and_keep_them_stories(tmp_path):
    run_dir = tmp_path / "run"
    full = ("data.prompts_per_step=128", "actor.update.mini_batch_size=64")
    critic = ("critic.update.mini_batch_size=64", "total_steps=20", "eval_every=0")
    run_ranks(run_dir, YAML, *full, *critic, num_ranks=2, small=SMALL_STEPS, seconds=2800)

    judge = Judge(Path(os.environ["SPMDFLOW_DATA"]), max_new_tokens=64, num_prompts=0)
    start, end = (
        row_of("", "sampled", [judge.respond(load_writer(folder), greedy=False, seed=0)])
        for folder in (
            Path(os.environ["SPMDFLOW_DATA"]) / REFERENCE,
            exports_of(run_dir)["step-20"],
        )
    )

    assert end.reward > 2.3 > 1 > start.reward  # 2.5 is reached later; see docs/STORIES.md
    assert end.kl < 30
    assert end.within >= 0.9 * start.within
    assert end.vader > start.vader + 0.2
