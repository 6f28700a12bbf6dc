"""Which checkpoints stay, and when a RUN_DIR without any is asked about."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.manifest import make_rank_folder
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest, open_run_dir
from spmdflow.checkpoint.tensors import HostCopies, write_state
from spmdflow.config.schema import RunConfig
from spmdflow.errors import CheckpointError, ConfigError
from tests.unit.checkpoint_files import write_as_rank

ACCURACY = {1: 0.3, 2: 0.9, 3: 0.5, 4: 0.9, 5: 0.1, 6: 0.2}


def save(run_dir: Path, step: int, *, best: str | None, keep: int = 1) -> None:
    checkpoints = Checkpoints(run_dir, keep=keep, best=best)
    written = [write_as_rank(checkpoints.begin(step), {"actor/hugging_face/x": b"%d" % step})]
    checkpoints.seal(step, {"metric": best and [best, ACCURACY[step]]}, written)


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("best", "kept"),
    [(None, [6]), ("eval/accuracy", [2, 6]), ("-eval/accuracy", [5, 6])],
)
def test_the_newest_and_the_first_best_by_the_metric_stay(tmp_path, best, kept):
    for step in ACCURACY:
        save(tmp_path, step, best=best)

    assert steps(tmp_path) == kept


def test_values_of_another_metric_do_not_count(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, best="eval/accuracy", keep=9)
    for step in (3, 4, 5):
        save(tmp_path, step, best="reward/mean")

    assert steps(tmp_path) == [4, 5]


def test_run_dir_whose_checkpoints_are_gone_is_asked_about_and_afresh_begins_again(tmp_path):
    def start(resume: str) -> object:
        opened = open_run_dir(RunConfig(dir=str(tmp_path), resume=resume), "run: {}\n")
        opened.lock.release()
        return opened.checkpoint

    assert start("auto") is None
    assert start("auto") is None, "killed before its first checkpoint: nothing is lost"
    save(tmp_path, 1, best=None)
    shutil.rmtree(tmp_path / "checkpoints")

    with pytest.raises(ConfigError, match=r"checkpoints that are gone, .*run\.resume=afresh to"):
        start("auto")
    assert start("afresh") is None
    save(tmp_path, 2, best=None)
    assert start("afresh") == find_latest(tmp_path), "it continues from what it saved itself"


def test_link_of_an_export_that_a_killed_save_left_old_is_mended_at_the_next_start(tmp_path):
    save(tmp_path, 1, best=None, keep=2)
    old = os.readlink(tmp_path / "export" / "actor")
    save(tmp_path, 2, best=None, keep=2)
    (tmp_path / "export" / "actor").unlink()
    (tmp_path / "export" / "actor").symlink_to(old)

    open_run_dir(RunConfig(dir=str(tmp_path)), "run: {}\n").lock.release()

    assert (tmp_path / "export" / "actor" / "x").read_bytes() == b"2"


def no_space(own: Path) -> None:
    (own / "rank-0.safetensors").symlink_to("/dev/full")


def no_folder(own: Path) -> None:
    shutil.rmtree(own.parents[2])
    own.parents[2].write_text("in its place")


@pytest.mark.parametrize(
    ("happens", "said"), [(no_space, "No space left"), (no_folder, "Not a directory|File exists")]
)
def test_a_disk_that_fails_while_a_rank_writes_keeps_what_is_sealed(tmp_path, happens, said):
    save(tmp_path, 1, best=None)
    folder = Checkpoints(tmp_path, keep=1).begin(2)
    elsewhere = shutil.copytree(tmp_path / "checkpoints" / "step-1", tmp_path / "before")
    own = make_rank_folder(folder / "actor", 0)
    happens(own)

    blocks = [("w", torch.ones(4), Box(((0, 4),)))]
    with pytest.raises(CheckpointError, match=rf"({said}).*; .*set run\.dir"):
        write_state(own / "rank-0.safetensors", blocks, {})

    if happens is no_space:
        info = find_latest(tmp_path)
        assert info is not None and info.step == 1
        kept = {p.name: p.read_bytes() for p in info.folder.rglob("*") if p.is_file()}
        assert kept == {p.name: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}


def test_host_copies_keep_their_values_while_the_live_ones_change_and_their_memory():
    live = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    box = Box(((0, 3), (1, 3)))
    copies = HostCopies()

    first = copies.take([("w", live, box)])
    before = live.clone()
    live += 1
    ((name, values, found),) = first
    assert (name, found) == ("w", box) and torch.equal(values, before) and values.is_contiguous()

    again = copies.take([("w", live, box)])
    assert again[0][1].data_ptr() == values.data_ptr() and torch.equal(again[0][1], live)
