"""File operations that survive a power cut, and their errors in three parts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdflow.errors import CheckpointError


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
    """Have the system put a file's bytes, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the path and the bytes free."""
    try:
        yield
    except OSError as err:
        raise disk_error(doing, path, err) from err


def disk_error(doing: str, path: Path, err: Exception) -> CheckpointError:
    """The CheckpointError for a disk that refused; err's own file is named if it has one."""
    at = Path(getattr(err, "filename", None) or path)
    cause = getattr(err, "strerror", None) or err
    return CheckpointError(
        f"checkpoint: cannot {doing} {path}: {cause} ({at}); expected a writable folder with "
        f"space, {free_bytes(path)} bytes are free; free some, mend its rights or set run.dir"
    )


def free_bytes(path: Path) -> int:
    """Bytes free where path is or would be."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free
