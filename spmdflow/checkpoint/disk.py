"""RUN_DIR on disk: writes that survive a power cut, the lock, and whether every rank sees it.

The lock is advisory and dropped by the kernel when the process ends: one live run for each
RUN_DIR. Whether ranks share the folder is tested with a token: the controller's rank writes it,
every rank reads it.
"""

from __future__ import annotations

import fcntl
import logging
import os
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


class RunDirLock:
    """Held from construction to `release`. ConfigError if another live process holds it."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / ".lock"
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


TOKEN_FILE = ".token"
_LOOK_SECONDS = 0.2


@contextmanager
def shared_token(run_dir: Path) -> Iterator[str]:
    """Keep a random token in RUN_DIR within the context; CheckpointError if writing it fails."""
    token, path = secrets.token_hex(16), run_dir / TOKEN_FILE
    with disk_errors("write", path):
        write_atomically(path, token.encode())
    try:
        yield token
    finally:
        path.unlink(missing_ok=True)


def sees_token(run_dir: Path, token: str, *, seconds: float) -> bool:
    """Whether this rank finds the token in run_dir within `seconds` (network file systems lag)."""
    limit = time.monotonic() + seconds
    while not (seen := _holds(run_dir / TOKEN_FILE, token)) and time.monotonic() < limit:
        time.sleep(_LOOK_SECONDS)
    return seen


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="ascii") == text
    except (OSError, UnicodeError):  # another folder, or none: the token is not there
        return False
