"""RUN_DIR/export/<role>: the newest checkpoint's model under a path that stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spmdflow.checkpoint.run_dir import Checkpoints
from tests.unit.checkpoint_files import write_as_rank


def save(run_dir: Path, step: int, *roles: str) -> None:
    checkpoints = Checkpoints(run_dir, keep=1)
    folder = checkpoints.begin(step)
    files = {"critic/rank-0.safetensors": b"no export"}
    for role in roles:
        files[f"{role}/hugging_face/config.json"] = f"{role} of step {step}".encode()
    checkpoints.seal(step, {}, [write_as_rank(folder, files)])


def test_the_path_stays_and_holds_what_the_newest_checkpoint_exported(tmp_path: Path) -> None:
    config = tmp_path / "run" / "export" / "actor" / "config.json"

    save(tmp_path / "run", 1, "actor")
    first = config.read_text()
    save(tmp_path / "run", 2, "actor")

    assert (first, config.read_text()) == ("actor of step 1", "actor of step 2")
    assert [path.name for path in (tmp_path / "run" / "export").iterdir()] == ["actor"]


def test_it_survives_a_move_of_the_run(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, "actor", "reward_model")

    shutil.move(tmp_path / "run", tmp_path / "elsewhere")

    for role in ("actor", "reward_model"):
        config = tmp_path / "elsewhere" / "export" / role / "config.json"
        assert config.read_text() == f"{role} of step 1"


def test_a_link_that_cannot_be_made_is_reported_and_the_checkpoint_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "export" / "actor").mkdir(parents=True)  # somebody's folder is in the way

    save(tmp_path, 1, "actor")

    assert "cannot link" in caplog.text
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-1"


def test_a_link_that_a_killed_save_left_unfinished_goes_at_the_next_save(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, "actor")
    exports = tmp_path / "run" / "export"
    (exports / "reward_model.tmp").symlink_to(exports / "actor", target_is_directory=True)

    save(tmp_path / "run", 2, "actor")

    assert [path.name for path in exports.iterdir()] == ["actor"]
