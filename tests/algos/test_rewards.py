"""Several rewards in one run: rules beside a model, on one rank and on a tensor-parallel pair; the
settings for real problems, on real rows."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.runs import FEW_SUMS, ROOT, run_ranks, steps_of

GRPO = ROOT / "algos" / "grpo.py"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=8",
    "data.samples_per_prompt=4",
    "actor.rollout.temperature=2.5",  # so that samples of a prompt differ
    "actor.update.mini_batch_size=16",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "run.sample_every=10",  # more than the run has: those of step 1 are written anyway
    "total_steps=2",
    "eval_every=0",
)
COUNTED = """
import os
def count(prompt, response, row, *, path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return {"score": row["response_tokens"] / 7, "twice": 2 * row["response_tokens"]}
"""


def rewards(folder: Path) -> str:
    """Three terms: a random reward model, right answers, and a function that leaves a trace."""
    model = ROOT / "algos" / "arithmetic" / "model"
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "judge")
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder / "judge")
    (folder / "own.py").write_text(COUNTED)
    own = f"-0.1 * {folder}/own.py:count(path='{folder}/calls')"
    right = "spmdflow.rewards.arithmetic:exact_match"
    return f'reward.function={{right: {right}, judge: 0.5 * model, count: "{own}"}}'


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    words = [*SMALL, rewards(folder), f"reward.model.path={folder}/judge", f"run.dir={folder}/run"]
    loaded = load(GRPO, None, words)
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return folder


def test_score_is_the_weighted_sum_of_model_and_functions(in_one_process: Path) -> None:
    steps = steps_of(in_one_process / "run")
    samples = samples_of(in_one_process / "run")

    assert [sample["step"] for sample in samples] == [1] * 16 and len(steps) == 2
    for sample in samples:
        terms = sample["terms"]
        total = terms["right"] + -0.1 * terms["count"] + 0.5 * terms["judge"]
        assert sample["score"] == pytest.approx(total, rel=1e-6)
        assert terms["count_twice"] == 14 * terms["count"]
    for step in steps:
        parts = (step[f"reward/{name}"] for name in ("right", "judge", "count"))
        right, judge, count = parts
        assert step["reward/mean"] == pytest.approx(right + 0.5 * judge - 0.1 * count, rel=1e-5)
        assert 0 < step["reward/accuracy"] < 1 and judge != 0
        assert step["reward/penalised_mean"] == pytest.approx(step["reward/mean"], rel=1e-5)
    calls = (in_one_process / "calls").read_text().splitlines()
    assert len(calls) == 2 * 32 and len(set(calls)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_two_ranks_score_as_one_and_a_pair_of_one_replica_scores_once(
    in_one_process: Path, tmp_path: Path, engine: str
) -> None:
    judge = ["reward.engine.kind=megatron", "reward.engine.layout=t2"]
    words = [rewards(tmp_path), f"reward.model.path={tmp_path}/judge"]
    words += judge if engine == "megatron" else []

    run_ranks(tmp_path / "run", *words, num_ranks=2, script=GRPO, small=SMALL)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 * 32
    assert len(set(calls)) == (1 if engine == "megatron" else 2)  # one pool for a tp group
    one = steps_of(in_one_process / "run")[0]
    two = steps_of(tmp_path / "run")[0]
    for name in ("right", "count", "accuracy"):
        assert two[f"reward/{name}"] == pytest.approx(one[f"reward/{name}"], rel=1e-12)
    assert two["reward/judge"] == pytest.approx(one["reward/judge"], rel=1e-5)
    assert two["controller/tensor_bytes"] == 0
    assert two["transfer/bytes"] == two["transfer/planned_bytes"]


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["gsm8k", "countdown"])
def test_settings_for_real_problems_run_on_real_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if "SPMDFLOW_DATA" not in os.environ:
        pytest.skip("SPMDFLOW_DATA names no data folder")
    source = Path(os.environ["SPMDFLOW_DATA"])
    command = [sys.executable, ROOT / "scripts" / "make_problems.py", kind, source / kind]
    subprocess.run([*command, tmp_path / "problems"], check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    words = [
        f"actor.model.path={source}/models/stories260K-hd64",  # no chat template, 512 positions
        "data.chat_template=false",
        "data.max_prompt_tokens=440",
        "data.prompts_per_step=4",
        "data.samples_per_prompt=4",
        "actor.update.mini_batch_size=16",
        "actor.rollout.max_new_tokens=24",
        "reward.function.length=0.1 * spmdflow.rewards.length:linear(free_tokens=8, max_tokens=24)",
        "reward.num_processes=1",
        "total_steps=2",
        "data.eval_prompts=4",
        f"run.dir={tmp_path}/run",
    ]
    loaded = load(GRPO, ROOT / "algos" / f"grpo_{kind}.yaml", words)
    check(loaded.cfg, 1)

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    for step in steps_of(tmp_path / "run")[1:]:
        assert all(math.isfinite(value) for value in step.values())
        assert step["reward/dropped"] == 0
        assert step["reward/correct"] <= 0.2 and step["reward/format"] == 0  # a writer of stories
        assert -1 <= step["reward/length"] < -0.9  # which does not stop early
