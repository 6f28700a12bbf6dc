"""RUN_DIR on disk: writes that survive a power cut, the lock, and whether every rank sees it.

The lock is advisory and dropped by the kernel when the process ends: one live run for each
RUN_DIR. While ranks meet, the controller's rank keeps the run's key there; every rank reads it,
which also shows that all share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdflow.errors import CheckpointError, ConfigError, SpmdflowError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace path by data: afterwards, or after a kill, it holds the old or the new bytes."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync(path.parent)


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents; they are there after a power cut too."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below a folder, itself, and its name in its parent."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            sync(path)
    sync(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """fsync a file, or a folder for its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(doing: str, path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Turn an OSError into an error that names the path and the bytes free.

    what: "checkpoint" makes it a CheckpointError, anything else a SpmdflowError.
    """
    try:
        yield
    except OSError as err:
        at, cause = err.filename or path, err.strerror or err
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        kind = CheckpointError if what == "checkpoint" else SpmdflowError
        raise kind(
            f"{what}: cannot {doing} {path}: {cause} ({at}); expected a writable folder with "
            f"space, {shutil.disk_usage(there).free} bytes are free; free some, fix its rights or "
            f"set run.dir"
        ) from err


logger = logging.getLogger(__name__)


LOCK_FILE = ".lock"
"""In RUN_DIR, from its first run on."""


class RunDirLock:
    """Held from construction to `release`. ConfigError if another live process holds it."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / LOCK_FILE
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            holder = os.read(self._file, 64).decode(errors="replace") or "unknown"
            self.release()
            raise ConfigError(
                f"run.dir: {run_dir} is in use by a live run (process {holder}), expected a "
                f"folder of its own; end that run, or set run.name or run.dir to another"
            ) from err
        except OSError as err:  # a file system without locks: go on without
            logger.warning("%s cannot be locked (%s): start only one run in it", path, err)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Release the lock: the next run may start."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


KEY_BYTES = 32
_KEY_NAME = re.compile(r"\.key-[0-9a-f]{16}")
_LOOK_SECONDS = 0.05


@contextmanager
def shared_key(run_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Keep a random key in a file of RUN_DIR within the context; its name and the key.

    Keys that starts left there which were killed are removed: nobody uses them again. Only this
    user may read the file, where the file system keeps such rights. SpmdflowError if it
    cannot be written.
    """
    name, key = f".key-{secrets.token_hex(8)}", secrets.token_bytes(KEY_BYTES)
    path = run_dir / name
    try:
        with disk_errors("write", path, "run.dir"):
            for old in run_dir.glob(".key-*"):
                old.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, key)
                rights = os.fstat(file).st_mode & 0o077
            finally:
                os.close(file)
        if rights:
            logger.warning("others may read %s, the key of this run: set SPMDFLOW_SECRET", path)
        yield name, key
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_key(run_dir: Path, name: str, *, seconds: float) -> bytes | None:
    """The key that `shared_key` keeps under that name (network file systems lag), or None."""
    limit = time.monotonic() + seconds
    while _KEY_NAME.fullmatch(name):
        with contextlib.suppress(OSError):  # another folder, or none: the file is not there
            if len(key := (run_dir / name).read_bytes()) == KEY_BYTES:
                return key
        if time.monotonic() > limit:
            break
        time.sleep(_LOOK_SECONDS)
    return None
