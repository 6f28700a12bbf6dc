"""`spmdflow clean`: what goes, what stays, and where nothing is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.checkpoint.lock import claim_run_dir
from spmdflow.clean import main

STAYS = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "calls.jsonl",
    "throughput.jsonl",
    "launches.jsonl",
    "trace.json",
    "finished",
    "failure.json",
    "checkpoints/step-2/rank-0.safetensors",
    "view.html",
)
GOES = (
    "capsules/step-1/capsule.json",
    "guards/step-1.safetensors",
    "profile/step_3_rank_0.json.gz",
    "metrics.1.jsonl",
    "samples.2.jsonl",
    "throughput.1.jsonl",
    "launches.1.jsonl",
    "config.until-step-3.yaml",
    "stacks-rank0.txt",
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in (*STAYS, *GOES):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 100)
    (tmp_path / "run" / "export").symlink_to("checkpoints/step-2")
    return tmp_path / "run"


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_weights_and_records_stay_and_the_rest_goes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir)]) == 0

    assert files_of(run_dir) == {*STAYS}
    assert (run_dir / "export").is_symlink()
    assert not (run_dir / "capsules").exists()
    assert "records of earlier starts: 5" in capsys.readouterr().out


def test_dry_run_removes_nothing_and_says_the_same(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(run_dir)

    assert main([str(run_dir), "--dry-run"]) == 0

    assert files_of(run_dir) == before
    assert "would remove" in capsys.readouterr().out


def test_live_run_and_folder_without_a_run_are_refused_before_anything_is_removed(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(run_dir)
    (tmp_path / "empty").mkdir()

    assert main([str(run_dir), str(tmp_path / "empty")]) == 2
    assert "expected a RUN_DIR" in capsys.readouterr().err
    lock = claim_run_dir(run_dir)
    try:
        assert main([str(run_dir)]) == 2
    finally:
        lock.release()

    assert "a run is live" in capsys.readouterr().err
    assert files_of(run_dir) >= before
