"""What was reported as saved is there after a power cut: checkpoints, exports, metrics, marks."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.disk import make_folders, write_atomically
from spmdflow.checkpoint.manifest import RankReport, make_rank_folder, move_rank_files
from spmdflow.checkpoint.run_dir import Checkpoints, find_newest_undamaged, open_run_dir
from spmdflow.checkpoint.tensors import write_state
from spmdflow.config.schema import RunConfig
from spmdflow.export import export
from spmdflow.tracking.tracker import read_lines
from tests.unit.checkpoint_files import verify_checkpoint, write_as_rank
from tests.unit.power_cut import Moment, RecordedDisk
from tests.unit.toy_flow import Toy, ToyConfig, rank_of_one


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RecordedDisk]:
    """A disk with one empty folder, `job`."""
    (tmp_path / "disk" / "job").mkdir(parents=True)
    disk = RecordedDisk(tmp_path / "disk")
    yield disk
    disk.close()


def save(run_dir: Path, step: int) -> None:
    checkpoints = Checkpoints(run_dir, keep=1)
    folder = checkpoints.begin(step)
    written = []
    for rank in range(2):
        files = {
            f"actor/rank-{rank}.bin": f"step {step} of rank {rank}".encode(),
            f"actor/hugging_face/part-{rank}.bin": f"export {step} of rank {rank}".encode(),
        }
        written.append(write_as_rank(folder, files, rank=rank))
    checkpoints.seal(step, {"cursor": step}, written)


def saved_step(run_dir: Path) -> int:
    """Step of the checkpoint that a restart would load, all of it read; 0 for none."""
    info = find_newest_undamaged(run_dir, verify_checkpoint)
    if info is None:
        return 0
    for rank in range(2):
        text = (info.folder / f"actor/rank-{rank}.bin").read_text()
        assert text == f"step {info.step} of rank {rank}"
    return info.step


def folders_after_cut(moment: Moment, work: Path) -> Iterator[Path]:
    """Folders that a cut may leave, one at a time: without anything that was not synced, with one
    piece of it, and with all of it."""
    pieces = moment.unsynced()
    for kept in ([], *([piece] for piece in pieces), pieces):
        shutil.rmtree(work, ignore_errors=True)
        moment.build(work, kept)
        yield work


def test_a_sealed_checkpoint_is_whole_after_a_power_cut(disk, tmp_path):
    run_dir = disk.root / "job" / "run"

    for step in (1, 2):
        with disk.record():
            save(run_dir, step)

        for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
            assert saved_step(folder / "job" / "run") == step


def test_a_power_cut_at_any_moment_of_a_save_leaves_the_old_or_the_new_checkpoint(disk, tmp_path):
    run_dir = disk.root / "job" / "run"
    with disk.record():
        save(run_dir, 1)
    moments: list[Moment] = []

    with disk.record(before_call=lambda: moments.append(disk.moment())):
        save(run_dir, 2)

    seen = set()
    different = [moment for moment, _ in itertools.groupby(moments)]
    for moment in different:
        for folder in folders_after_cut(moment, tmp_path / "left"):
            checkpoints = folder / "job" / "run" / "checkpoints"
            latest = (checkpoints / "latest").read_text().strip()
            assert (checkpoints / latest / "manifest.json").exists(), disk.calls[-50:]
            seen.add(saved_step(folder / "job" / "run"))
    assert seen == {1, 2}
    assert len(different) > 20, disk.calls


def test_the_link_to_the_exported_model_is_there_after_a_power_cut(disk, tmp_path):
    run_dir = disk.root / "job" / "run"

    with disk.record():
        save(run_dir, 1)

    for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
        exported = folder / "job" / "run" / "export" / "actor"
        texts = [(exported / f"part-{rank}.bin").read_text() for rank in range(2)]
        assert texts == ["export 1 of rank 0", "export 1 of rank 1"]


def test_an_exported_folder_is_whole_after_a_power_cut(disk, tmp_path):
    weights = torch.arange(12.0).reshape(3, 4)
    plain = {"shapes": {"w": [3, 4]}, "steps_done": 1}
    plain["model"] = {"config": {"model_type": "x"}, "dtype": "float32", "source": "nowhere"}
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    folder = checkpoints.begin(1)
    own = make_rank_folder(folder, 0)
    whole = [("w", weights, Box.of_shape((3, 4)))]
    write_state(own / "actor" / "rank-0.safetensors", whole, plain)
    info = checkpoints.seal(1, {}, [RankReport(0, "node", move_rank_files(folder, own))])
    target = disk.root / "job" / "exported"

    with disk.record():
        export(info, target)

    expected = {path.name: path.read_bytes() for path in target.iterdir()}
    assert set(expected) == {"config.json", "model.safetensors"}
    for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
        left = folder / "job" / "exported"
        assert {path.name: path.read_bytes() for path in left.iterdir()} == expected


def test_metrics_of_every_step_up_to_the_checkpoint_are_there_after_a_power_cut(disk, tmp_path):
    run_dir = disk.root / "job" / "run"

    with disk.record():
        make_folders(run_dir)
    with disk.record(), rank_of_one(run_dir) as rank:
        rank.flow.spawn(Toy, ToyConfig())
        for step in rank.flow.steps(2):
            step.log({"toy/number": float(step.number)})
            rank.flow.save(every=2)
        rank.flow._saving.finish()

    for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
        left = folder / "job" / "run"
        assert (left / "checkpoints" / "latest").read_text() == "step-2\n"
        assert [record["step"] for record in read_lines(left / "metrics.jsonl")] == [1, 2]


def test_the_mark_of_a_finished_run_is_there_and_gone_after_a_power_cut(disk, tmp_path):
    run = RunConfig(dir=str(disk.root / "job" / "run"))

    with disk.record():
        opened = open_run_dir(run, "run: {}")
        opened.mark_finished(7)

    for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
        assert (folder / "job" / "run" / "finished").read_text() == "step 7\n"

    with disk.record():
        opened.mark_unfinished()

    for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
        assert not (folder / "job" / "run" / "finished").exists()
    opened.lock.release()


def test_a_file_that_was_replaced_has_its_new_bytes_after_a_power_cut(disk, tmp_path):
    path = disk.root / "job" / "note"

    for data in (b"old", b"new"):
        with disk.record():
            write_atomically(path, data)

        for folder in folders_after_cut(disk.moment(), tmp_path / "left"):
            assert (folder / "job" / "note").read_bytes() == data


def test_a_cut_may_leave_any_part_of_what_was_not_synced_or_nothing(disk, tmp_path):
    path = disk.root / "job" / "note"

    with disk.record():
        path.write_bytes(b"not synced")

    moment = disk.moment()
    name, data = moment.unsynced()
    left = []
    for number, kept in enumerate(([], [data], [name], [name, data])):
        folder = tmp_path / f"left-{number}"
        moment.build(folder, kept)
        note = folder / "job" / "note"
        left.append(note.read_bytes() if note.exists() else None)
    assert left == [None, None, b"", b"not synced"]
