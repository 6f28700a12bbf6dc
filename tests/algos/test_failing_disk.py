"""Whole runs whose disk fails while they save: full, read-only, gone. Nothing sealed is lost.

RUN_DIR is on a file system of its own in a mount namespace, so this needs root and util-linux.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.algos.runs import (
    LIMIT,
    SCRIPT,
    SMALL,
    finish,
    last_checkpoint,
    numbers_of,
    ranks_of,
    start,
    torchrun,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="mounts file systems: needs root"),
]
SETTINGS = ("total_steps=5", "save_every=1", "eval_every=2", "run.keep_checkpoints=9")
SEALED = 2
"""Step whose checkpoint is sealed when the disk fails."""


class Disk:
    """A file system that only this test and its runs see."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        mount = f"mount -t tmpfs -o size=64m none {place} && echo ready && exec sleep 3600"
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", mount], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "ready\n"
        self._inside = ["nsenter", "-m", "-t", str(self._holder.pid)]
        self.run_dir = place / "run"
        self.log = place.with_suffix(".log")

    @property
    def seen(self) -> Path:
        """The run's folder, as seen from outside."""
        return Path(f"/proc/{self._holder.pid}/root{self.run_dir}")

    def do(self, command: str) -> None:
        """Run a shell command inside."""
        subprocess.run([*self._inside, "sh", "-c", command], check=True)

    def torchrun(self) -> subprocess.Popen[str]:
        """Start the run, or start it again."""
        words = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
        words += ["--nproc-per-node=2"]
        words += ["-m", "spmdflow.run", str(SCRIPT), f"run.dir={self.run_dir}", *SMALL, *SETTINGS]
        return start([*self._inside, *words], self.log)

    def close(self) -> None:
        """Unmount it."""
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert finish(torchrun(run_dir, *SETTINGS, num_ranks=2)) == 0
    return run_dir


def fill(disk: Disk, *, left: float) -> None:
    """left: bytes that stay free, in checkpoints."""
    size = sum(path.stat().st_size for path in sealed(disk).rglob("*") if path.is_file())
    free = os.statvfs(disk.seen).f_bavail * os.statvfs(disk.seen).f_frsize
    count = max(0, free - int(left * size)) if left else 64 << 20
    disk.do(f"head -c {count} /dev/zero > {disk.run_dir.parent}/filler || true")


def empty(disk: Disk) -> None:
    disk.do(f"rm {disk.run_dir.parent}/filler")


def forbid(disk: Disk, *, folder: str) -> None:
    place = disk.run_dir / folder
    disk.do(f"mount --bind {place} {place} && mount -o remount,bind,ro {place}")


def allow(disk: Disk, *, folder: str) -> None:
    disk.do(f"umount {disk.run_dir / folder}")


def take_away(disk: Disk) -> None:
    disk.do(f"mv {disk.run_dir} {disk.run_dir}.away")


def bring_back(disk: Disk) -> None:
    disk.do(f"rm -rf {disk.run_dir} && mv {disk.run_dir}.away {disk.run_dir}")


def sealed(disk: Disk) -> Path:
    return disk.seen / "checkpoints" / f"step-{SEALED}"


FAULTS: dict[str, tuple[Callable[[Disk], None], Callable[[Disk], None], str]] = {
    "full": (lambda disk: fill(disk, left=0), empty, "No space left on device"),
    "full-for-state": (lambda disk: fill(disk, left=0.1), empty, "No space left on device"),
    "full-for-export": (lambda disk: fill(disk, left=0.9), empty, "No space left on device"),
    "read-only": (
        lambda disk: forbid(disk, folder="."),
        lambda disk: allow(disk, folder="."),
        "Read-only file system",
    ),
    "read-only-checkpoints": (
        lambda disk: forbid(disk, folder="checkpoints"),
        lambda disk: allow(disk, folder="checkpoints"),
        "Read-only file system",
    ),
    "gone": (take_away, bring_back, "No such file or directory"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_run_whose_disk_fails_says_so_keeps_what_is_sealed_and_continues_to_the_same_bits(
    name: str, disk: Disk, whole: Path
) -> None:
    harm, heal, said = FAULTS[name]
    process = disk.torchrun()
    limit = time.monotonic() + LIMIT
    while not (sealed(disk).is_dir() and latest(disk) == sealed(disk).name):
        assert time.monotonic() < limit and process.poll() is None, disk.log.read_text()[-3000:]
        time.sleep(0.005)
    kept = contents(sealed(disk))

    harm(disk)
    status = finish(process)
    text = disk.log.read_text()
    heal(disk)

    assert status == 1, text[-3000:]
    told = rf"(checkpoint|tracking): cannot \w+ {disk.run_dir}\S*: {said} .*; .*set run.dir"
    assert re.search(rf"RUN FAILED: .*rank \d.*{told}", text.replace("\n", " ")), text[-5000:]
    assert ranks_of(disk.run_dir) == []
    assert int(latest(disk).removeprefix("step-")) >= SEALED
    assert contents(sealed(disk)) == kept

    assert finish(disk.torchrun()) == 0, disk.log.read_text()[-5000:]
    assert last_checkpoint(disk.seen) == last_checkpoint(whole)
    assert numbers_of(disk.seen) == numbers_of(whole)


def latest(disk: Disk) -> str:
    return (disk.seen / "checkpoints" / "latest").read_text().strip()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
