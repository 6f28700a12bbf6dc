"""Sealed from what ranks say: a file that the sealing process does not see is refused."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from pathlib import Path

import pytest

from spmdflow.checkpoint.disk import KEY_BYTES, read_key, shared_key
from spmdflow.checkpoint.manifest import FileFacts
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest
from spmdflow.errors import CheckpointError
from tests.unit.checkpoint_files import verify_checkpoint, write_as_rank

ACTOR = {"actor/rank-0": b"actor"}
CRITIC = {"critic/rank-0": b"the critic's weights"}


def seal_two_nodes(run_dir: Path, step: int, critic_dir: Path) -> None:
    """Rank 0 writes below run_dir and seals; rank 1 believes that critic_dir is RUN_DIR."""
    checkpoints = Checkpoints(run_dir, keep=1, patience_seconds=0.1)
    folder = checkpoints.begin(step)
    other = critic_dir / "checkpoints" / folder.name
    other.mkdir(parents=True, exist_ok=True)
    written = [write_as_rank(folder, ACTOR), write_as_rank(other, CRITIC, rank=1)]
    checkpoints.seal(step, {}, written)


def test_a_checkpoint_without_the_files_of_another_node_is_refused_and_the_old_one_stays(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    seal_two_nodes(run_dir, 1, run_dir)

    with pytest.raises(CheckpointError) as caught:
        seal_two_nodes(run_dir, 2, tmp_path / "only on node 2")

    text = str(caught.value)
    assert f"got no such file at {run_dir}/checkpoints/step-2.tmp/critic/rank-0" in text
    assert f"as seen from node {socket.gethostname()}" in text
    assert "expected the 20 bytes that rank 1 wrote there on node node-of-1 (1 of 2 files" in text
    assert "RUN_DIR is not one folder that every node shares; set run.dir to a shared" in text
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["latest", "step-1"]
    info = find_latest(run_dir)
    assert info is not None and info.step == 1
    verify_checkpoint(info)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, patience_seconds=0.0)
    written = write_as_rank(checkpoints.begin(1), CRITIC, rank=1)
    (checkpoints.folder / "step-1.tmp" / "critic" / "rank-0").write_bytes(b"short")

    with pytest.raises(CheckpointError, match=r"got 5 bytes at .*expected the 20 bytes that rank"):
        checkpoints.seal(1, {}, [written])


def test_a_file_that_a_network_disk_shows_late_is_waited_for(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, patience_seconds=30.0)
    folder = checkpoints.begin(1)
    written = write_as_rank(folder, CRITIC)
    (folder / "critic").rename(tmp_path / "late")

    def show() -> None:
        time.sleep(0.5)
        (tmp_path / "late").rename(folder / "critic")

    thread = threading.Thread(target=show)
    thread.start()
    info = checkpoints.seal(1, {}, [written])
    thread.join()

    assert list(info.files) == ["critic/rank-0"]


def test_the_manifest_has_size_and_hash_as_the_writer_says(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = checkpoints.begin(1)

    info = checkpoints.seal(1, {}, [write_as_rank(folder, ACTOR), write_as_rank(folder, CRITIC)])

    digest = hashlib.sha256(b"actor").hexdigest()
    assert info.files["actor/rank-0"] == FileFacts(5, digest)
    assert sorted(path.name for path in info.folder.iterdir()) == [
        "actor",
        "critic",
        "manifest.json",
    ]
    verify_checkpoint(info)


def test_a_file_of_two_ranks_and_one_of_nobody_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = checkpoints.begin(1)
    twice = [write_as_rank(folder, ACTOR, rank=rank) for rank in (0, 1)]
    with pytest.raises(CheckpointError, match="from rank 0 and from rank 1, expected each file"):
        checkpoints.seal(1, {}, twice)

    folder = checkpoints.begin(1)
    written = write_as_rank(folder, ACTOR)
    (folder / "stray").touch()
    with pytest.raises(CheckpointError, match="stray, which no rank says it wrote"):
        checkpoints.seal(1, {}, [written])


def test_the_key_of_a_run_is_for_this_user_and_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with shared_key(tmp_path / "a") as (name, key):
        assert (tmp_path / "a" / name).stat().st_mode & 0o777 == 0o600
        assert read_key(tmp_path / "a", name, seconds=0.0) == key
        for elsewhere in (tmp_path / "b", tmp_path / "c"):
            assert read_key(elsewhere, name, seconds=0.2) is None
        (tmp_path / "b" / "32-bytes").write_bytes(bytes(KEY_BYTES))
        for other in ("32-bytes", "../b/32-bytes", name[:-1], f"{name}\n"):
            assert read_key(tmp_path / "b", other, seconds=0.0) is None

    assert list((tmp_path / "a").iterdir()) == []


def test_the_key_of_a_start_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".key-0123456789abcdef").write_bytes(bytes(KEY_BYTES))
    (tmp_path / ".keynote").touch()
    with shared_key(tmp_path) as (name, key):
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, ".keynote"])
        assert key != bytes(KEY_BYTES)

    assert [path.name for path in tmp_path.iterdir()] == [".keynote"]
