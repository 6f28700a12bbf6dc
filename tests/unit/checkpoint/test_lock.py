"""The lock of RUN_DIR: who holds it, and what happens once the folder is another one."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest

from spmdflow.checkpoint.lock import (
    LOCK_FILE,
    STATUS_FILE,
    RunDirMark,
    claim_run_dir,
    is_run_live,
    read_record,
)
from spmdflow.checkpoint.run_dir import Checkpoints
from spmdflow.errors import CheckpointError, ConfigError


def replace_folder(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))
    claim_run_dir(run_dir).release()


def test_a_look_at_the_lock_does_not_refuse_a_start(tmp_path: Path) -> None:
    claim_run_dir(tmp_path).release()
    file = os.open(tmp_path / LOCK_FILE, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    limit_hit = pytest.raises(ConfigError, match="in use by a live run")

    with limit_hit:  # held for longer than a look takes
        claim_run_dir(tmp_path)
    os.close(file)

    lock = claim_run_dir(tmp_path)
    assert is_run_live(tmp_path)
    lock.release()
    assert not is_run_live(tmp_path)


def test_a_run_that_ends_by_itself_leaves_no_record(tmp_path: Path) -> None:
    lock = claim_run_dir(tmp_path)
    record = read_record(tmp_path)
    lock.release()

    assert record is not None and record.pid == os.getpid()
    assert read_record(tmp_path) is None


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("deleted", "is not there any more"),
        ("renamed", "is not there any more"),
        ("replaced", "is another folder than the one that this run started in"),
        ("lock deleted", "has lost its file .lock"),
    ],
)
def test_a_save_into_a_folder_that_is_not_the_locked_one_ends_the_run_and_makes_nothing(
    tmp_path: Path, what: str, said: str
) -> None:
    run_dir = tmp_path / "run"
    lock = claim_run_dir(run_dir)
    mark = RunDirMark.read(run_dir)
    checkpoints = Checkpoints(run_dir, keep=1, lock=lock)
    checkpoints.begin(1)
    checkpoints.seal(1, {}, [])
    checkpoints.begin(2)
    if what == "replaced":
        replace_folder(run_dir)
    elif what == "lock deleted":
        (run_dir / LOCK_FILE).unlink()
    else:
        run_dir.rename(tmp_path / "moved")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError, match=said):
        checkpoints.seal(2, {}, [])
    with pytest.raises(CheckpointError, match=said):
        checkpoints.begin(3)

    assert sorted(tmp_path.rglob("*")) == before
    assert (lock.is_held(), mark.is_there()) == (False, False)
    lock.release()


def test_a_folder_of_a_file_system_without_locks_belongs_to_the_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    first = claim_run_dir(tmp_path)
    second = claim_run_dir(tmp_path)

    assert "cannot be locked (" in caplog.text
    with pytest.raises(CheckpointError, match=r"was taken over by another run \(process \d+"):
        first.check_held()
    first.release()
    second.check_held()
    second.release()


def test_a_start_that_cannot_write_its_record_does_not_keep_the_lock(tmp_path: Path) -> None:
    claim_run_dir(tmp_path).release()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"run\.dir: cannot use .*File too large"):
            claim_run_dir(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    claim_run_dir(tmp_path).release()


def test_a_forked_process_does_not_keep_a_released_lock(tmp_path: Path) -> None:
    lock = claim_run_dir(tmp_path)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        lock.release()

        assert not is_run_live(tmp_path)
        claim_run_dir(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_of_another_node_is_live_while_its_status_is_young(tmp_path: Path) -> None:
    claim_run_dir(tmp_path).release()
    (tmp_path / LOCK_FILE).write_text("17 elsewhere boot token\n")
    status = tmp_path / STATUS_FILE
    status.touch()

    assert is_run_live(tmp_path)
    os.utime(status, (0.0, 0.0))
    assert not is_run_live(tmp_path)


def test_a_file_in_the_place_of_run_dir_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").touch()

    with pytest.raises(ConfigError, match=r"run\.dir: cannot use .*a file is where a folder is"):
        claim_run_dir(tmp_path / "run")
