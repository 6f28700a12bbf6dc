"""A run from end to end with placement=auto: what it leaves for those who planned it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.algos.runs import log_of, run_ranks


def test_run_with_placement_auto_writes_its_pools_and_how_the_prediction_went(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    settings = (
        "placement=auto",
        "total_steps=2",
        "eval_every=0",
        "save_every=0",
        "run.save_last=false",
    )

    run_ranks(run_dir, *settings, num_ranks=2)

    log = log_of(run_dir).read_text()
    assert "auto   placement: {" in log
    assert f"Predicted and measured seconds and bytes: {run_dir}" in log
    placement = yaml.safe_load((run_dir / "config.yaml").read_text())["placement"]
    roles = sorted(role for pool in placement.values() for role in pool["roles"])
    assert roles == ["actor", "critic", "reference", "reward"]
    found = json.loads((run_dir / "prediction.json").read_text())
    assert found["bytes_agree"] and found["steps"] == [1, 2]
    # ranks that train and generate alike receive nothing: they hold every box already
    assert [sync["planned"] == sync["counted"] for sync in found["weight_syncs"]] == [True] * 2
    assert {stage["stage"] for stage in found["stages"]} >= {"generate_sequences", "step"}
    assert all(stage["measured"] > 0 for stage in found["stages"])
