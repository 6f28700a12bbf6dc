"""The page's example of an opponent, and an earlier policy with adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.export import main as export
from tests.algos.runs import ROOT, steps_of
from tests.distributed.programs import models_env

AGENT = ROOT / "algos" / "grpo_agent.py"
SMALL = (
    "data.prompts_per_step=2",
    "data.samples_per_prompt=4",
    "actor.update.mini_batch_size=8",
    "actor.optimizer.lr=0.01",
    "actor.rollout.engine=builtin",
    "run.sample_every=0",
    "total_steps=2",
    "eval_every=0",
    "save_every=1",
)
pytestmark = pytest.mark.drill


def run(folder: Path, environment: str, models: str, *words: str, yaml: str | None = None) -> None:
    key = "actor.rollout.episode"
    own = (f'{key}.environment="{environment}"', f"{key}.models={models}", f"run.dir={folder}/run")
    path = None if yaml is None else ROOT / "algos" / yaml
    loaded = load(AGENT, path, [*SMALL, *own, *words])
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0


def test_example_of_the_page_plays_against_the_reference(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "EPISODES.md").read_text()
    (code,) = re.findall(r"```python\n(# duel\.py.*?)```", page, re.DOTALL)
    (tmp_path / "duel.py").write_text(code)

    run(
        tmp_path,
        f"{tmp_path}/duel.py:episode",
        "{reference: {}}",
        "actor.rollout.episode.credit=episode",
        "data.samples_per_prompt=16",
        "actor.update.mini_batch_size=32",
        yaml="grpo_agent_race.yaml",
    )

    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    assert sum(step["episodes/requests_reference"] for step in steps) > 0
    for step in steps:
        assert step["episodes/failed_requests_reference"] == step["reward/dropped"] == 0
        assert step["episodes/forked"] == 0


def test_earlier_policy_with_adapters_replies_with_the_merged_weights(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    models = "{reference: {}, policy@step: {}, judge: {url: 'http://127.0.0.1:9/v1', attempts: 1}}"
    run(
        tmp_path,
        f"{models_env.__file__}:duel(calls=True, log='{log}')",
        models,
        "actor.model.lora.rank=4",
        "actor.rollout.dtype=float32",
    )

    export([str(tmp_path / "run" / "checkpoints" / "step-1"), "--to", str(tmp_path / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = ROOT / "algos" / "guess" / "model"
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert not all(map(torch.equal, merged.parameters(), start.parameters()))
    counts = {"reference": 0, "policy@1": 0}
    for file in log.glob("[0-9]*.jsonl"):
        for said in map(json.loads, file.read_text().splitlines()):
            if said["asked"] not in counts or "error" in said:
                continue
            model = merged if said["asked"] == "policy@1" else start
            size = len(said["prompt"])
            with torch.no_grad():
                ids = torch.tensor([said["prompt"] + said["tokens"]])
                scores = model(ids).logits[0, size - 1 : -1].log_softmax(-1)
            own = scores.gather(1, torch.tensor(said["tokens"])[:, None])[:, 0]
            assert own.tolist() == pytest.approx(said["log_probs"], abs=1e-5)
            counts[said["asked"]] += 1
    assert counts == {"reference": 64, "policy@1": 32}
