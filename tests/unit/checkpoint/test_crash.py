"""A kill at any point leaves the old or the new checkpoint loadable, and no rubbish for long."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from spmdflow.checkpoint.disk import sync, write_atomically
from spmdflow.checkpoint.manifest import read_manifest
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest
from spmdflow.tracking.tracker import append_lines, cut_back, read_lines
from tests.unit.checkpoint_files import verify_checkpoint, write_as_rank

OPERATIONS = {"mkdir", "open", "write", "flush", "fsync", "rename", "replace", "unlink", "rmdir"}


def finishes_before(point: int, work: Callable[[], object]) -> bool:
    """Run work in a forked process that is gone before its point-th operation on the disk.

    os._exit runs no handler and flushes no buffer: what a SIGKILL leaves. (Only a power cut
    leaves less, against which the code syncs.)
    """
    child = os.fork()
    if child == 0:
        try:
            sys.setprofile(exit_at(point))
            work()
        finally:
            sys.setprofile(None)
            os._exit(0 if sys.exc_info()[0] is None else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"the work itself failed at point {point}"
    return code == 0


def exit_at(point: int) -> Callable[[FrameType, str, Any], None]:
    """A profiler that counts calls of C functions that change the disk, wherever they are made."""
    operations = count(1)

    def on_event(frame: FrameType, event: str, function: Any) -> None:
        is_operation = event == "c_call" and function.__name__ in OPERATIONS
        if is_operation and next(operations) == point:
            os._exit(9)

    return on_event


def save(run_dir: Path, step: int) -> None:
    checkpoints = Checkpoints(run_dir, keep=1)
    checkpoints.clean()
    folder = checkpoints.begin(step)
    written = [
        write_as_rank(folder, {f"rank-{rank}": f"step {step} of rank {rank}".encode()}, rank=rank)
        for rank in range(2)
    ]
    checkpoints.seal(step, {"cursor": step}, written)


def loaded_step(run_dir: Path) -> int:
    """Step of the checkpoint that a restart would load, all of it checked; 0 for none."""
    info = find_latest(run_dir)
    if info is None:
        return 0
    verify_checkpoint(info)
    texts = [(info.folder / f"rank-{rank}").read_text() for rank in range(2)]
    assert texts == [f"step {info.step} of rank {rank}" for rank in range(2)]
    assert info.meta == {"cursor": info.step}
    return info.step


def check_every_kill(start: Path, work: Path, *, old: int, new: int) -> None:
    seen = []
    for point in count(1):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        done = finishes_before(point, lambda: save(work, new))
        seen.append(loaded_step(work))
        for folder in (work / "checkpoints").glob("step-*[0-9]"):
            verify_checkpoint(read_manifest(folder))  # whole also if `latest` does not name it
        save(work, new + 1)  # the restart
        assert loaded_step(work) == new + 1
        rest = sorted(path.name for path in (work / "checkpoints").iterdir())
        assert rest == ["latest", f"step-{new + 1}"], f"killed at point {point}"
        if done:
            break
    assert set(seen) == {old, new}
    assert seen == sorted(seen), "once the new one is there, the old one never comes back"
    assert len(seen) > 10, seen


@pytest.mark.drill
def test_a_kill_at_any_operation_of_the_first_save_leaves_nothing_or_the_first(tmp_path):
    (tmp_path / "start" / "checkpoints").mkdir(parents=True)

    check_every_kill(tmp_path / "start", tmp_path / "work", old=0, new=1)


def test_a_kill_at_any_operation_of_a_later_save_leaves_the_old_or_the_new(tmp_path):
    save(tmp_path / "start", 1)

    check_every_kill(tmp_path / "start", tmp_path / "work", old=1, new=2)


def test_a_kill_at_any_operation_of_cutting_back_leaves_all_records_or_those_wanted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = [{"step": step} for step in range(5)]
    seen = set()
    for point in count(1):
        path.unlink(missing_ok=True)
        append_lines(path, before)
        done = finishes_before(point, lambda: cut_back(path, 2))
        seen.add(len(read_lines(path)))
        cut_back(path, 2)  # the restart
        assert read_lines(path) == before[:3]
        if done:
            break

    assert seen == {5, 3}


def test_run_dir_is_synced_for_the_entry_of_checkpoints_before_latest_names_the_first(tmp_path):
    synced: list[str] = []

    def on_event(frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_code is sync.__code__:
            synced.append(str(frame.f_locals["path"].relative_to(tmp_path)))
        if event == "call" and frame.f_code is write_atomically.__code__:
            synced.append(f"write {frame.f_locals['path'].name}")

    sys.setprofile(on_event)
    try:
        save(tmp_path, 1)
    finally:
        sys.setprofile(None)

    assert "." in synced[: synced.index("write latest")]
