"""A user with one GPU sets a model and a data set: everything else is chosen, and runs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.simcuda.conftest import ROOT, Simulated

TASK = ROOT / "algos" / "arithmetic"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_model_and_data_are_all_that_a_run_on_one_gpu_needs(
    simulated: Simulated, tmp_path: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    needed = (f"actor.model.path={TASK / 'model'}", f"data.train_path={TASK / 'train.jsonl'}")
    short = ("total_steps=2", "eval_every=0", "data.prompts_per_step=16", f"run.dir={tmp_path}")

    said = simulated(
        *(*torchrun, "-m", "spmdflow.run", "grpo", *needed, *short),
        "actor.update.mini_batch_size=64",
        seconds=280,
    )

    cfg = yaml.safe_load((tmp_path / "config.yaml").read_text())
    actor, records = cfg["actor"], (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert actor["rollout"]["engine"] == "vllm" and actor["rollout"]["kv_cache"] == "64 MiB"
    precisions = [actor["model"], actor["rollout"], cfg["reference"]["model"]]
    assert {part["dtype"] for part in precisions} == {"bfloat16"}
    assert actor["engine"]["residency"] == cfg["reference"]["engine"]["residency"] == "keep"
    assert "auto   on cuda: dtype=bfloat16 (actor.model, " in said
    assert "GiB that are free while actor generates" in said and "kv_cache=64 MiB" in said
    last = json.loads(records[-1])
    assert last["rollout/weights_verified"] == 1 and 0 < last["rollout/drift"] < 0.05
