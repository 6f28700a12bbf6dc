"""RUN_DIR: who may use which folder, and what changed since the last start."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.checkpoint.run_dir import Checkpoints, compare_settings, open_run_dir, path_of
from spmdflow.config.location import to_yaml
from spmdflow.config.schema import RunConfig
from spmdflow.errors import CheckpointError, ConfigError

YAML = "run:\n  seed: 0\nactor:\n  lr: 1.0e-05\n  betas: [0.9, 0.95]\n"


def run_in(path: Path, *, resume: str = "auto") -> RunConfig:
    return RunConfig(dir=str(path), resume=resume)


def test_run_dir_is_named_by_dir_else_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert path_of(RunConfig(name="x")) == tmp_path / "runs" / "x"
    assert path_of(RunConfig(name="x", dir="here")) == tmp_path / "here"
    assert path_of(RunConfig(dir="/there")) == Path("/there")


def test_first_start_makes_the_folder_and_writes_the_settings(tmp_path):
    opened = open_run_dir(run_in(tmp_path / "a" / "b"), YAML)
    opened.lock.release()

    assert (opened.path, opened.checkpoint, opened.last_step) == (tmp_path / "a" / "b", None, -1)
    assert sorted(path.name for path in opened.path.iterdir()) == [".lock", "config.yaml"]
    assert (opened.path / "config.yaml").read_text() == YAML


def test_never_refuses_a_used_folder_and_takes_an_unused_one(tmp_path):
    (tmp_path / "slurm-17.log").touch()
    open_run_dir(run_in(tmp_path, resume="never"), YAML).lock.release()

    with pytest.raises(ConfigError, match=r"never, but .* holds config\.yaml.*set run\.name"):
        open_run_dir(run_in(tmp_path, resume="never"), YAML)


@pytest.mark.parametrize("mark", ["metrics.jsonl", "checkpoints"])
def test_never_refuses_a_folder_with_results(tmp_path, mark):
    (tmp_path / mark).mkdir()

    with pytest.raises(ConfigError, match=mark):
        open_run_dir(run_in(tmp_path, resume="never"), YAML)


def test_auto_continues_from_the_latest_checkpoint(tmp_path):
    open_run_dir(run_in(tmp_path), YAML).lock.release()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.begin(7)
    sealed = checkpoints.seal(7, {"a": 1}, [])

    opened = open_run_dir(run_in(tmp_path), YAML)
    opened.lock.release()
    assert (opened.checkpoint, opened.last_step) == (sealed, 7)


def test_a_damaged_latest_checkpoint_stops_the_start(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.begin(7)
    (checkpoints.seal(7, {}, []).folder / "manifest.json").write_text("torn")

    with pytest.raises(
        CheckpointError, match="no undamaged checkpoint in .*does not read as a manifest"
    ):
        open_run_dir(run_in(tmp_path), YAML)


def test_the_same_settings_again_are_no_warning(tmp_path, caplog):
    for _ in range(2):
        open_run_dir(run_in(tmp_path), YAML).lock.release()

    assert caplog.text == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml"]


def test_other_settings_are_listed_and_the_old_ones_kept(tmp_path, caplog):
    open_run_dir(run_in(tmp_path), YAML).lock.release()
    changed = YAML.replace("1.0e-05", "3.0e-04").replace("seed: 0", "seed: 1")
    open_run_dir(run_in(tmp_path), changed).lock.release()

    assert "run.seed: 0 -> 1; actor.lr: 1e-05 -> 0.0003" in caplog.text
    assert "betas" not in caplog.text
    assert (tmp_path / "config.yaml").read_text() == changed
    assert (tmp_path / "config.until-step-0.yaml").read_text() == YAML


def test_differences_name_keys_of_one_side_only():
    assert compare_settings("a: 1\nb: {c: 2}\n", "a: 1\nd: []\n") == [
        "b.c: 2 -> (absent)",
        "d: (absent) -> []",
    ]


def test_settings_as_the_loader_writes_them_can_be_compared():
    old = RunConfig()
    new = RunConfig(seed=3, trackers=["wandb"])

    assert compare_settings(to_yaml(old), to_yaml(old)) == []
    assert compare_settings(to_yaml(old), to_yaml(new)) == [
        "seed: 0 -> 3",
        "trackers: [] -> ['wandb']",
    ]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot use .*file, expected a writable folder"):
        open_run_dir(run_in(tmp_path / "file"), YAML)


def test_a_refused_start_lets_the_next_one_in(tmp_path):
    (tmp_path / "config.yaml.tmp").mkdir()
    with pytest.raises(ConfigError, match="cannot use"):
        open_run_dir(run_in(tmp_path), YAML)

    (tmp_path / "config.yaml.tmp").rmdir()
    open_run_dir(run_in(tmp_path), YAML).lock.release()


def test_a_second_live_run_in_the_same_folder_is_refused_until_the_first_ends(tmp_path):
    first = open_run_dir(run_in(tmp_path), YAML)

    with pytest.raises(ConfigError, match=r"in use by a live run \(process \d+\)"):
        open_run_dir(run_in(tmp_path), YAML)

    first.lock.release()
    open_run_dir(run_in(tmp_path), YAML).lock.release()
