"""A RUN_DIR with damaged files: the next start continues from the newest checkpoint and names them.

What is no part of a checkpoint is only a record. A file that cannot be read is no damage.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.checkpoint import disk
from spmdflow.checkpoint.lock import claim_run_dir
from spmdflow.checkpoint.manifest import CheckpointInfo, DamagedError, verify_files
from spmdflow.checkpoint.run_dir import Checkpoints, RunDir, load_previous_settings, open_run_dir
from spmdflow.checkpoint.tensors import read_tensors, write_tensors
from spmdflow.config.schema import RunConfig
from spmdflow.errors import ReadError
from spmdflow.runtime.session import remove_old_reports
from spmdflow.tracking.reading import RunFiles
from spmdflow.tracking.tracker import Tracker
from tests.unit.checkpoint_files import write_as_rank

YAML = "run:\n  seed: 0\n"
RECORDS = ("config.yaml", "metrics.jsonl", "samples.jsonl", "tracker_id", "failure.json", ".lock")
"""Files of RUN_DIR that are no part of a checkpoint."""


def used_run_dir(path: Path) -> None:
    """A RUN_DIR with the checkpoints step-2 and step-4, as a stopped run leaves it."""
    opened = open_run_dir(RunConfig(dir=str(path)), YAML)
    checkpoints = Checkpoints(path, keep=2)
    for step in (2, 4):
        written = write_as_rank(checkpoints.begin(step), {"actor/a.bin": b"%d" % step * 9})
        checkpoints.seal(step, {"settings": YAML, "num_ranks": 1}, [written])
    line = b'{"step":%d,"reward/mean":0.5}\n'
    (path / "metrics.jsonl").write_bytes(line % 2 + line % 4)
    (path / "samples.jsonl").write_bytes(line % 2 + line % 4)
    (path / "tracker_id").write_text("0123456789abcdef")
    (path / "failure.json").write_text('{"rank": 1}')
    opened.lock.release()


def verify(info: CheckpointInfo) -> None:
    verify_files(info.folder, info.files)


def start(path: Path) -> RunDir:
    """What the first rank does with RUN_DIR at a start."""
    load_previous_settings(path)
    lock = claim_run_dir(path)
    remove_old_reports(path)
    opened = open_run_dir(RunConfig(dir=str(path)), YAML, lock=lock, verify=verify)
    Tracker(path, last_step=opened.last_step).close()
    lock.release()
    return opened


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "list": lambda path: path.write_bytes(b"[1, 2]\n"),
    "tab": lambda path: path.write_bytes(b"a:\n\t- b\n"),
    "deep": lambda path: path.write_bytes(b"[" * 20_000 + b"\n"),
    "python tag": lambda path: path.write_bytes(b"!!python/object/apply:os.getpid []\n"),
    "folder": make_folder,
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, each) for name in RECORDS for each in DAMAGES if (name, each) != (".lock", "folder")],
)
def test_damaged_record_is_named_and_the_newest_checkpoint_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    used_run_dir(tmp_path)
    DAMAGES[damage](tmp_path / name)

    files = RunFiles(tmp_path)
    assert files.run_state is not None and files.missing is not None  # a status page reads it
    opened = start(tmp_path)

    assert opened.last_step == 4
    assert (tmp_path / "config.yaml").read_text() == YAML
    is_config = name == "config.yaml" and damage not in ("torn", "gone")
    is_id = name == "tracker_id" and damage != "gone"
    if is_config or is_id or (name == "metrics.jsonl" and damage not in ("empty", "gone")):
        assert name in caplog.text
    assert (tmp_path / "tracker_id").exists() == (name != "tracker_id")  # trackers begin a new run


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["step-4/actor/a.bin", "step-4/manifest.json", "latest"])
def test_damaged_checkpoint_is_left_for_the_older_one_and_a_damaged_latest_for_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    used_run_dir(tmp_path)
    DAMAGES[damage](tmp_path / "checkpoints" / name)

    opened = start(tmp_path)

    assert opened.last_step == (4 if name == "latest" else 2)
    if (name, damage) != ("latest", "gone"):
        assert str(tmp_path / "checkpoints" / name) in caplog.text


def test_folder_in_the_place_of_the_lock_is_refused_by_name(tmp_path: Path) -> None:
    used_run_dir(tmp_path)
    make_folder(tmp_path / ".lock")

    with pytest.raises(disk.SpmdflowError, match=r"\.lock.*a folder where a file is"):
        start(tmp_path)


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-4", "export"])
def test_foreign_files_and_folders_are_left_alone(tmp_path: Path, place: str) -> None:
    used_run_dir(tmp_path)
    for name in (".nfs000000000012", ".DS_Store"):
        (tmp_path / place / name).touch()
    (tmp_path / place / "foreign").mkdir()
    (tmp_path / place / "foreign" / "file").touch()

    assert start(tmp_path).last_step == 4
    assert (tmp_path / place / ".DS_Store").exists()
    assert (tmp_path / place / "foreign" / "file").exists()


def failing(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    number: int,
    *,
    times: float,
    method: str = "open",
    after: int = 0,
) -> None:
    """Let a method of a path fail as a file system does, so many times, after so many calls."""
    real = getattr(Path, method)
    num_calls = 0

    def call_or_fail(self: Path, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if self == path:
            num_calls += 1
            if after < num_calls <= after + times:
                raise OSError(number, os.strerror(number), str(path))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, method, call_or_fail)
    monkeypatch.setattr(disk, "_RETRY_SECONDS", 0.01)


UNREADABLE = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM)
READ_BY_A_START = [
    ("step-4/actor/a.bin", "open"),
    ("step-4/actor/a.bin", "stat"),
    ("step-4/manifest.json", "open"),
    ("latest", "open"),
]
"""Files below checkpoints, and how they are read."""


@pytest.mark.parametrize("number", UNREADABLE)
@pytest.mark.parametrize(("name", "method"), READ_BY_A_START)
def test_passing_read_error_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str, number: int
) -> None:
    used_run_dir(tmp_path)
    lock = claim_run_dir(tmp_path)
    failing(monkeypatch, tmp_path / "checkpoints" / name, number, times=2, method=method)

    opened = open_run_dir(RunConfig(dir=str(tmp_path)), YAML, lock=lock, verify=verify)

    assert opened.last_step == 4
    lock.release()


def test_passing_read_error_of_latest_does_not_replace_what_it_names_by_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_run_dir(tmp_path)
    latest = tmp_path / "checkpoints" / "latest"
    latest.write_text("step-2")
    lock = claim_run_dir(tmp_path)
    failing(monkeypatch, latest, errno.EIO, times=2)

    opened = open_run_dir(RunConfig(dir=str(tmp_path)), YAML, lock=lock, verify=verify)

    assert opened.last_step == 2
    lock.release()


@pytest.mark.parametrize("after", [0, 1])  # the header, the bytes of a tensor
def test_passing_read_error_ends_no_rank_that_loads_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {})
    failing(monkeypatch, path, errno.ESTALE, times=2, after=after)

    tensors, _ = read_tensors(path)

    assert tensors["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("number", UNREADABLE)
@pytest.mark.parametrize(("name", "method"), READ_BY_A_START)
def test_lasting_read_error_is_refused_by_name_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str, number: int
) -> None:
    used_run_dir(tmp_path)
    path = tmp_path / "checkpoints" / name
    lock = claim_run_dir(tmp_path)
    monkeypatch.setattr(disk, "READ_SECONDS", 0.0)
    failing(monkeypatch, path, number, times=float("inf"), method=method)

    with pytest.raises(ReadError, match=f"cannot read .*{name}.*{os.strerror(number)}") as caught:
        open_run_dir(RunConfig(dir=str(tmp_path)), YAML, lock=lock, verify=verify)

    assert not isinstance(caught.value, DamagedError)
    assert (tmp_path / "checkpoints" / "step-4").is_dir()
    lock.release()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, r"\d+ bytes are free there: free some space"),
        (errno.EACCES, "fix its rights"),
        (errno.ESTALE, "check its mount, its server"),
        (errno.EIO, "check its mount, its server"),
        (errno.ENOENT, "it is gone, or a folder above it: restore it"),
        (errno.EROFS, "mount it writable"),
    ],
)
def test_advice_follows_the_error_of_the_disk(tmp_path: Path, number: int, advice: str) -> None:
    with (
        pytest.raises(disk.CheckpointError, match=advice) as caught,
        disk.disk_errors("write", tmp_path / "file"),
    ):
        raise OSError(number, os.strerror(number), str(tmp_path / "file"))

    assert ("bytes are free" in str(caught.value)) == (number == errno.ENOSPC)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_folder_that_cannot_be_fsynced_is_one_warning_and_a_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    disk._warn_about_folder_sync.cache_clear()
    monkeypatch.setattr(os, "fsync", fail)

    for _ in range(3):
        disk.sync(tmp_path)
    assert caplog.text.count("cannot fsync folders") == 1
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=os.strerror(number)):
        disk.sync(tmp_path / "file")


def test_rank_that_writes_after_run_dir_was_deleted_does_not_make_it_again(tmp_path: Path) -> None:
    used_run_dir(tmp_path / "run")
    folder = Checkpoints(tmp_path / "run", keep=1).begin(5) / "actor"
    shutil.rmtree(tmp_path / "run")

    with pytest.raises(disk.CheckpointError, match="it is gone, or a folder above it"):
        write_as_rank(folder, {"a.bin": b"1"})

    assert not (tmp_path / "run").exists()
