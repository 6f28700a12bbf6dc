"""sft -> reward_model -> ppo: every stage starts from the model that the one before exported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.runs import ROOT, SMALL, steps_of

NUM_PROMPTS = 16
NEW_TOKENS = 4
SHORT = ("total_steps=2", "eval_every=2", "save_every=2", f"data.eval_prompts={NUM_PROMPTS}")


def stage(name: str, run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    """Run algos/<name>.py in this process."""
    words = [*settings, *SHORT, f"run.dir={run_dir}"]
    loaded = load(ROOT / "algos" / f"{name}.py", None, words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir)


@torch.no_grad()
def mean_score(policy_folder: Path, reward_folder: Path) -> float:
    """Of greedy answers to the first held-out prompts, by transformers alone, row by row."""
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    policy = AutoModelForCausalLM.from_pretrained(policy_folder).eval()
    reward = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    total = 0.0
    lines = (ROOT / "algos/arithmetic/eval.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    for prompt in (json.loads(line)["prompt"] for line in lines):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        ids = policy.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
        hidden = reward.model(ids).last_hidden_state[0, -1]
        total += float(reward.score(hidden)) / NUM_PROMPTS
    return total


@pytest.mark.drill
def test_each_stage_continues_with_the_export_of_the_one_before(tmp_path: Path) -> None:
    policy = tmp_path / "sft/export/actor"
    reward = tmp_path / "rm/export/reward_model"

    sft = stage("sft", tmp_path / "sft", "data.prompts_per_step=128")
    pairs = stage(
        "reward_model", tmp_path / "rm", f"reward_model.model.path={policy}", "run.sample_every=0"
    )
    models = (f"actor.model.path={policy}", f"reward.model.path={reward}", "reward.function=null")
    ppo = stage("ppo", tmp_path / "ppo", *SMALL, *models)

    assert sft[-1]["eval/loss"] < sft[0]["eval/loss"]
    assert pairs[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)  # a new head
    assert pairs[-1]["eval/loss"] != pytest.approx(math.log(2), abs=1e-3)
    # float32 sums in another order; a greedy token may flip only where two are as likely
    assert ppo[0]["eval/mean"] == pytest.approx(mean_score(policy, reward), abs=1e-4)
    assert (tmp_path / "ppo/export/actor/config.json").is_file()
