"""A step of GRPO with SmolLM2-135M-Instruct: settings that train it, numbers of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.config.load import load
from spmdflow.config.reward import reward_terms
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import rows_of
from spmdflow.models.policy import ActorWorker
from spmdflow.rewards.format import matches
from spmdflow.rewards.gsm8k import score
from tests.algos.runs import ROOT, steps_of
from tests.smollm2 import SMOLLM2, model_of_transformers, needs_smollm2, plain_logits
from tests.unit.toy_flow import rank_of_one

GRPO = ROOT / "algos" / "grpo.py"
SUMS = ROOT / "algos" / "grpo_sums.yaml"
SMALL = (
    f"actor.model.path={SMOLLM2}",
    *("data.prompts_per_step=2", "data.samples_per_prompt=4", "data.eval_prompts=2"),
    *("actor.update.mini_batch_size=8", "total_steps=1", "eval_every=1"),
    *("run.sample_every=0", "run.save_last=false"),
)


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the YAML reads, in the current folder."""
    script = ROOT / "scripts" / "make_problems.py"
    subprocess.run(
        [sys.executable, script, "sums", tmp_path / "problems"], check=True, capture_output=True
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "problems"


def settings(*more: str) -> Any:
    return load(GRPO, SUMS, [*SMALL, *more])


@needs_smollm2
def test_sums_by_chat_run_without_a_reference(problems: Path, tmp_path: Path) -> None:
    differing = "reward.function=spmdflow.rewards.arithmetic:shuffled"  # also in a group
    loaded = settings(f"run.dir={tmp_path}/run", differing)

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    before, step = steps_of(tmp_path / "run")
    assert 0 <= before["eval/accuracy"] <= 1
    assert step["actor/grad_norm"] > 0
    assert step["rollout/drift_max"] < 1e-4, "generator and trainer agree in float32"
    calls = (tmp_path / "run" / "calls.jsonl").read_text()
    assert "actor.spawn" in calls and "reference.spawn" not in calls


@needs_smollm2
def test_log_probs_of_generator_and_trainer_are_those_of_transformers(
    problems: Path, tmp_path: Path
) -> None:
    cfg = settings("actor.update.old_log_probs=recompute").cfg
    with rank_of_one(tmp_path / "run") as rank:
        flow = rank.flow
        actor = flow.spawn(ActorWorker, cfg.actor, pool=flow.pool("all"))
        prompts = flow.prompts(cfg.data)
        next(flow.steps(1))
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        names = ("prompts", "responses", "rollout_log_probs", "old_log_probs")
        columns = {name: rows_of(batch.fetch(name)[name]) for name in names}

    model = model_of_transformers()
    for number in range(8):
        prompt, response, generated, trained = (columns[name][number] for name in names)
        logits = plain_logits(model, prompt.tolist(), response.tolist())
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        assert torch.allclose(generated, expected, rtol=0, atol=1e-4)
        assert torch.allclose(trained, expected, rtol=0, atol=1e-4)


def test_sums_by_chat_are_rewarded_for_the_number_and_for_nothing_else(problems: Path) -> None:
    row = json.loads((problems / "sums.test.jsonl").read_text().splitlines()[0])
    right = row["answer"]
    terms = {
        term.name: term for term in reward_terms("reward.function", settings().cfg.reward.function)
    }
    only = dict(terms["only"].arguments)

    assert terms.keys() == {"right", "only"} and terms["only"].weight == 0.5
    for response, is_only in ((right, 1), (f" {right}\n", 1), (f"The sum is {right}.", 0), ("", 0)):
        assert matches("", response, row, **only) == is_only
        assert score("", response, row)["score"] == float(right in response)
