"""The folder protocol: what is sealed is whole, named, checked and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdflow.checkpoint import run_dir
from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    check_file_sizes,
    moved_groups,
    read_manifest,
)
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest
from spmdflow.errors import CheckpointError
from tests.unit.checkpoint_files import verify_checkpoint, write_as_rank

FILES = {
    "actor/rank-0.safetensors": b"weights 0",
    "actor/rank-1.safetensors": b"",
    "flow.json": b"{}",
}


def save(run_dir: Path, step: int, *, keep: int = 2, meta: Any = None) -> CheckpointInfo:
    checkpoints = Checkpoints(run_dir, keep=keep)
    written = [write_as_rank(checkpoints.begin(step), FILES)]
    return checkpoints.seal(step, meta or {"kept": {"cursor": step}}, written)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def latest_step(run_dir: Path) -> int:
    info = find_latest(run_dir)
    assert info is not None
    verify_checkpoint(info)
    return info.step


def test_a_sealed_checkpoint_is_found_with_its_meta_and_files(tmp_path):
    sealed = save(tmp_path, 20, meta={"layout": {"actor": {"ranks": (0, 1)}}, "x": [1.5, None]})
    found = find_latest(tmp_path)

    assert found == sealed
    assert (found.step, found.folder.name) == (20, "step-20")
    assert found.meta == {"layout": {"actor": {"ranks": [0, 1]}}, "x": [1.5, None]}
    assert {name: facts.num_bytes for name, facts in found.files.items()} == {
        name: len(data) for name, data in FILES.items()
    }
    assert names(tmp_path) == ["latest", "step-20"]
    verify_checkpoint(found)


def test_nothing_is_found_where_nothing_was_sealed(tmp_path):
    assert find_latest(tmp_path) is None
    Checkpoints(tmp_path, keep=1).begin(5)
    assert find_latest(tmp_path) is None


def test_the_newest_k_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2)

    assert names(tmp_path) == ["latest", "step-4", "step-5"]
    assert latest_step(tmp_path) == 5


@pytest.mark.parametrize("looks", ["_sealed_names", "_latest_or_none"])
def test_a_live_run_may_seal_while_its_latest_checkpoint_is_looked_for(
    tmp_path, monkeypatch, looks
):
    save(tmp_path, 1)
    look = getattr(run_dir, looks)
    left = [2]

    def seal_behind(folder: Path) -> Any:
        found = look(folder)
        while left:  # sealing looks too
            save(tmp_path, left.pop(), keep=1 + (looks == "_sealed_names"))
        return found

    monkeypatch.setattr(run_dir, looks, seal_behind)

    assert find_latest(tmp_path).step in (1, 2)


def test_a_run_set_back_by_hand_keeps_what_latest_names(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    (tmp_path / "checkpoints" / "latest").write_text("step-10")
    assert latest_step(tmp_path) == 10

    save(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["latest", "step-15", "step-20", "step-30"]
    assert latest_step(tmp_path) == 15
    save(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["latest", "step-20.2", "step-30"]
    assert latest_step(tmp_path) == 20


def test_a_step_sealed_twice_is_never_without_a_loadable_folder(tmp_path):
    save(tmp_path, 7, meta={"a": 1})
    assert Checkpoints(tmp_path, keep=1).has(7)
    assert not Checkpoints(tmp_path, keep=1).has(8)
    save(tmp_path, 7, meta={"a": 2}, keep=1)

    assert names(tmp_path) == ["latest", "step-7.2"]
    assert find_latest(tmp_path).meta == {"a": 2}


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, keep=2)

    assert names(tmp_path) == ["latest", "step-10", "step-100"]


def test_without_latest_the_newest_sealed_folder_is_found(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 10)
    (tmp_path / "checkpoints" / "latest").unlink()

    assert latest_step(tmp_path) == 10


def test_latest_that_names_a_folder_that_is_gone_is_refused_with_the_choices(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "step-2")

    with pytest.raises(CheckpointError, match=r"latest names 'step-2', expected.*\['step-1'\]"):
        find_latest(tmp_path)


def test_what_a_killed_run_left_is_cleaned_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    (folder / "step-2.tmp" / "actor").mkdir(parents=True)
    (folder / "step-0.trash").mkdir()
    (folder / "latest.tmp").write_text("step-2")
    (folder / "notes.txt").write_text("mine")

    assert Checkpoints(tmp_path, keep=1).clean() == ["latest.tmp", "step-0.trash", "step-2.tmp"]
    assert names(tmp_path) == ["latest", "notes.txt", "step-1"]
    assert Checkpoints(tmp_path / "new", keep=1).clean() == []


def test_begin_gives_an_empty_folder_also_after_a_failed_try(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    (checkpoints.begin(3) / "half").write_text("x")
    assert list(checkpoints.begin(3).iterdir()) == []


def test_a_missing_file_is_named(tmp_path):
    info = save(tmp_path, 1)
    (info.folder / "actor/rank-1.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is missing, expected 0 bytes"):
        find_latest(tmp_path)


def test_an_unlisted_file_is_named_and_left_alone(tmp_path, caplog):
    info = save(tmp_path, 1)
    (info.folder / "actor/rank-2.safetensors").touch()

    assert find_latest(tmp_path) == info
    assert "actor/rank-2.safetensors" in caplog.text
    assert (info.folder / "actor/rank-2.safetensors").exists()


def test_a_missing_manifest_is_named(tmp_path):
    info = save(tmp_path, 1)
    (info.folder / "manifest.json").unlink()

    with pytest.raises(CheckpointError, match=r"manifest\.json is missing, expected"):
        find_latest(tmp_path)


def test_a_folder_renamed_to_another_step_is_foreign(tmp_path):
    save(tmp_path, 1).folder.rename(tmp_path / "checkpoints" / "step-2")
    (tmp_path / "checkpoints" / "latest").write_text("step-2")

    with pytest.raises(CheckpointError, match=r"foreign: format 'spmdflow.*step 1; expected"):
        find_latest(tmp_path)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_file_truncated_at_any_byte_is_caught_and_named(tmp_path, name):
    info = save(tmp_path, 1)
    path = info.folder / name
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if name == "manifest.json" and length == len(whole) - 1:
            continue  # only the last newline is gone: nothing is lost
        with pytest.raises(CheckpointError, match=path.name):
            find_latest(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_of_a_file_is_caught_and_named(tmp_path, name):
    info = save(tmp_path, 1)
    path = info.folder / name
    for _ in flips(path):
        check_file_sizes(info)
        with pytest.raises(CheckpointError, match=rf"{path.name} has sha256 .*, expected"):
            verify_checkpoint(info)


def test_any_flipped_bit_of_the_manifest_is_caught_and_named(tmp_path):
    path = save(tmp_path, 1).folder / "manifest.json"
    for _ in flips(path):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(path.parent)


def test_any_flipped_bit_of_latest_is_caught_or_harmless(tmp_path):
    info = save(tmp_path, 1)
    path = tmp_path / "checkpoints" / "latest"
    for _ in flips(path):
        try:
            assert find_latest(tmp_path) == info  # another blank behind the name
        except CheckpointError as err:
            assert "latest names" in str(err)


def flips(path: Path) -> Iterator[None]:
    """Flip each bit of a file in turn, in place."""
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(whole)):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit % 8]), at)
            yield
            os.pwrite(file.fileno(), whole[at : at + 1], at)


def test_state_on_another_layout_moves_unless_its_class_keeps_it_by_rank(tmp_path):
    was = {"actor": {"ranks": [0, 1], "dp_size": 2}, "reference": {"ranks": [0, 1], "dp_size": 2}}
    info = save(tmp_path, 1, meta={"layout": was})
    other = {"actor": {"ranks": (0, 1, 2, 3), "dp_size": 4}, "generator": {"ranks": [4]}}

    assert moved_groups(info, was, {"actor": "Mine"}) == []
    moved = ["actor t1p1d2 on ranks 0-1 -> t1p1d4 on ranks 0-3"]
    assert moved_groups(info, other, {"reference": "Mine"}) == moved
    with pytest.raises(
        CheckpointError, match=r"d2 on ranks 0-1.*d4 .*, as Mine\.load_state is not"
    ):
        moved_groups(info, other, {"actor": "Mine"})
    with pytest.raises(CheckpointError, match=r"actor as nothing, this run has t1p1d2"):
        moved_groups(replace(info, meta={}), was, {"actor": "Mine"})
    with pytest.raises(CheckpointError, match="got a run without actor, whose state .* holds"):
        moved_groups(info, {"reference": was["reference"]}, {})


def test_meta_that_json_would_change_is_refused_and_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path, 1)
    for meta, where in [({"a": {3: 1}}, r"meta\.a has key 3"), ({"b": [{1}]}, r"meta\.b\[0\]")]:
        with pytest.raises(CheckpointError, match=where):
            save(tmp_path, 2, meta=meta)
        assert names(tmp_path) == ["latest", "step-1"]


@pytest.mark.parametrize("full", ["step-2.tmp/manifest.json", "latest.tmp"])
def test_a_full_disk_is_named_with_bytes_free_and_leaves_the_old_checkpoint(tmp_path, full):
    save(tmp_path, 1)
    before = (tmp_path / "checkpoints" / "latest").read_bytes()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.begin(2)
    (checkpoints.folder / full).symlink_to("/dev/full")

    with pytest.raises(
        CheckpointError, match=r"cannot seal .*step-2\.tmp: No space left.*[0-9]+ bytes are free"
    ):
        checkpoints.seal(2, {}, [])
    assert not (checkpoints.folder / "step-2.tmp").exists()
    assert (checkpoints.folder / "latest").read_bytes() == before
    assert latest_step(tmp_path) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file, not a folder")

    with pytest.raises(CheckpointError, match=r"cannot make .*step-1\.tmp: Not a directory"):
        Checkpoints(tmp_path, keep=1).begin(1)


def test_an_old_checkpoint_that_resists_removal_is_only_a_warning(tmp_path, caplog, monkeypatch):
    save(tmp_path, 1)

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(tmp_path, 2, keep=1)

    assert latest_step(tmp_path) == 2
    assert "cannot remove" in caplog.text and "step-1" in caplog.text


def test_the_manifest_is_plain_json_with_relative_names(tmp_path):
    info = save(tmp_path, 1)
    body = json.loads((info.folder / "manifest.json").read_text())

    assert sorted(body["files"]) == sorted(FILES)
    assert body["step"] == 1 and str(tmp_path) not in json.dumps(body)


def test_a_copied_run_dir_resumes_elsewhere(tmp_path):
    save(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")

    assert latest_step(tmp_path / "b") == 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("files", None, r"has files None, which is no map name -> size and hash"),
        ("files", ["actor/rank-0"], r"has files \['actor/rank-0'\], which is no map"),
        ("files", {"a": 3}, r"has 3 for file 'a', not num_bytes and sha256"),
        ("files", {"a": {"num_bytes": 1}}, r"has \{'num_bytes': 1\} for file 'a'"),
        (
            "files",
            {"a": {"num_bytes": "1", "sha256": ""}},
            r"has \{.*\} for file 'a', not num_bytes",
        ),
        (
            "files",
            {"a": {"num_bytes": 1, "sha256": "", "x": 1}},
            r"has \{.*\} for file 'a', not num_bytes",
        ),
        (
            "files",
            {"../a": {"num_bytes": 1, "sha256": ""}},
            r"has \{.*\} for file '\.\./a', not num_bytes",
        ),
        ("meta", None, r"has meta None, which is no map with a map layout"),
        ("meta", {"layout": 3}, r"has meta \{'layout': 3\}, which is no map with a map layout"),
    ],
)
def test_a_manifest_with_nonsense_and_its_own_hash_right_is_refused(tmp_path, key, value, said):
    path = save(tmp_path, 1).folder / "manifest.json"
    body = json.loads(path.read_text()) | {key: value}
    del body["sha256"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": digest}))

    with pytest.raises(CheckpointError, match=rf"manifest\.json {said}.*expected .*; restore it"):
        find_latest(tmp_path)
