"""Torn files: whatever happens to files of checkpoints, the last whole one is used, by name.

500 cases, drawn by a printed seed, in the slow tests; the first 40 of them always.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    RankReport,
    make_rank_folder,
    move_rank_files,
    verify_files,
)
from spmdflow.checkpoint.run_dir import Checkpoints, open_run_dir
from spmdflow.checkpoint.tensors import write_state
from spmdflow.config.schema import RunConfig
from spmdflow.errors import CheckpointError

SEED = 20261123
NUM_CASES = 500
NUM_ALWAYS = 40
STEPS = (5, 10, 15, 20)
Content = dict[str, bytes]
"""Bytes by name relative to checkpoints/."""


def save(run_dir: Path, step: int, *, keep: int = 9) -> None:
    """A checkpoint of two roles on two ranks: boxes with moments, an export, a file of a worker."""
    checkpoints = Checkpoints(run_dir, keep=keep)
    folder = checkpoints.begin(step)
    written = []
    generator = torch.Generator().manual_seed(step)
    for rank in range(2):
        for role in ("actor", "critic"):
            own = make_rank_folder(folder / role, rank)
            rows = torch.randn(8, 6, generator=generator)
            box = Box(((8 * rank, 8 * rank + 8), (0, 6)))
            blocks = [("w", rows, box), ("w.exp_avg", rows * step, box)]
            write_state(own / f"rank-{rank}.safetensors", blocks, {"steps_done": step})
            if (role, rank) == ("actor", 0):
                write_state(own / "hugging_face" / "model.safetensors", blocks[:1], {})
                (own / "hugging_face" / "config.json").write_text(f'{{"step": {step}}}')
            facts = move_rank_files(folder / role, own)
            written.append(RankReport(rank, "node", {f"{role}/{n}": f for n, f in facts.items()}))
    checkpoints.seal(step, {"cursor": step}, written)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RUN_DIR with four checkpoints."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    for step in STEPS:
        save(run_dir, step)
    return run_dir


def content_of(folder: Path) -> Content:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def blank(path: Path, draw: random.Random) -> None:
    """A stretch of zeros, as a file system leaves blocks that it lost."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.randrange(1, 64))
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


def swap(path: Path, draw: random.Random) -> None:
    """With another file of the same checkpoint."""
    folder = next(parent for parent in path.parents if parent.name.startswith("step-"))
    other = draw.choice([each for each in sorted(folder.rglob("*")) if each.is_file()])
    first = path.read_bytes()
    second = other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def age(path: Path, draw: random.Random) -> None:
    """The file of the same name of another step."""
    folder = next(parent for parent in path.parents if parent.name.startswith("step-"))
    other = draw.choice([step for step in STEPS if f"step-{step}" != folder.name])
    twin = folder.with_name(f"step-{other}") / path.relative_to(folder)
    if twin.is_file():  # not damaged before
        shutil.copyfile(twin, path)


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def lengthen(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def replace_by_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def delete_checkpoint(path: Path, draw: random.Random) -> None:
    shutil.rmtree(next(each for each in path.parents if each.name.startswith("step-")))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(truncate, flip, flip, blank, swap, age, delete, lengthen),
    *(replace_by_folder, delete_checkpoint),
)


def damage(folder: Path, draw: random.Random) -> str:
    """Damage the newest checkpoint, often older ones too, at times `latest`; says what was done."""
    said = []
    for step in STEPS[: -1 - draw.choice((1, 1, 1, 2, 3)) : -1]:
        files = [path for path in sorted((folder / f"step-{step}").rglob("*")) if path.is_file()]
        path = draw.choice(files)
        how = draw.choice(DAMAGES)
        how(path, draw)
        said.append(f"{how.__name__} {path.relative_to(folder)}")
    if draw.random() < 0.15:
        how = draw.choice((truncate, flip, delete))
        how(folder / "latest", draw)
        said.append(f"{how.__name__} latest")
    return ", ".join(said)


def is_as_sealed(name: str, now: Content, then: Content) -> bool:
    """Compared byte by byte; of the manifest what it says."""
    prefix = f"{name}/"
    mine = {key: data for key, data in now.items() if key.startswith(prefix)}
    sealed = {key: data for key, data in then.items() if key.startswith(prefix)}
    manifest = f"{name}/manifest.json"
    try:
        same = json.loads(mine.pop(manifest)) == json.loads(sealed.pop(manifest))
    except (KeyError, ValueError):
        return False
    return same and mine == sealed


def verify(info: CheckpointInfo) -> None:
    verify_files(info.folder, info.files)


@pytest.mark.parametrize(
    "case",
    [n if n < NUM_ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in range(NUM_CASES)],
)
def test_the_last_whole_checkpoint_is_used_by_name(
    case: int, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    draw = random.Random(f"{SEED}-{case}")
    shutil.copytree(whole, run_dir, symlinks=True)
    folder = run_dir / "checkpoints"
    then = content_of(folder)
    said = damage(folder, draw)
    print(f"seed {SEED}, case {case}: {said}")
    now = content_of(folder)
    named = now.get("latest", b"").decode(errors="replace").strip()
    names = [f"step-{step}" for step in STEPS]
    until = names.index(named) + 1 if named in names else len(names)
    expected = [name for name in names[:until] if is_as_sealed(name, now, then)]
    run = RunConfig(dir=str(run_dir))

    if not expected:
        with pytest.raises(CheckpointError, match="no undamaged checkpoint in"):
            open_run_dir(run, "run: {}\n", verify=verify)
        assert content_of(folder) == now
        return
    opened = open_run_dir(run, "run: {}\n", verify=verify)
    opened.lock.release()

    assert opened.checkpoint is not None and opened.checkpoint.folder.name == expected[-1]
    newer = names[names.index(expected[-1]) + 1 : until]
    torn = [
        name
        for name in newer
        if (whole / "checkpoints" / name).is_dir() and name in {key.split("/")[0] for key in now}
    ]
    for name in torn:  # kept as it was, under a name that nothing counts
        assert f"{name}.damaged" in caplog.text and f"CONTINUES FROM {expected[-1]}" in caplog.text
        kept = {key.partition("/")[2]: x for key, x in now.items() if key.startswith(f"{name}/")}
        assert content_of(folder / f"{name}.damaged") == kept
    assert (run_dir / "export" / "actor").resolve().parents[1].name == expected[-1]
    caplog.set_level(logging.CRITICAL)
    save(run_dir, 25, keep=1)
    assert {path.name for path in folder.iterdir()} >= {f"{name}.damaged" for name in torn}
