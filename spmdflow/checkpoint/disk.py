"""RUN_DIR on disk: writes that survive a power cut, errors of disks, whether every rank sees it.

While ranks meet, the controller's rank keeps the run's key there; every rank reads it, which also
shows that all share the folder. Who may write into the folder: `lock`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

from spmdflow.errors import CheckpointError, ReadError, SpmdflowError

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    missing = []
    for folder in (path, *path.parents):
        if not folder.exists():
            missing.append(folder)
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
    """fsync a file, or a folder for its entries.

    Some file systems (FUSE, SMB) cannot fsync a folder: that is a warning, once for each of them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        status = os.fstat(descriptor)
        if err.errno not in _UNSUPPORTED or not stat.S_ISDIR(status.st_mode):
            raise
        _warn_about_folder_sync(_mount_point(path))
    finally:
        os.close(descriptor)


_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What fsync of a folder answers where the file system does not have it."""


@cache
def _warn_about_folder_sync(mount_point: Path) -> None:
    """Warn, once for each file system: later calls do nothing."""
    logger.warning(
        "warning: the file system at %s cannot fsync folders: after a power cut the newest files "
        "may be missing (a kill of the run loses nothing)",
        mount_point,
    )


def _mount_point(path: Path) -> Path:
    """The uppermost folder of the file system that has path."""
    path = path.absolute()
    device = path.stat().st_dev
    while path.parent != path and path.parent.stat().st_dev == device:
        path = path.parent
    return path


@contextmanager
def disk_errors(doing: str, path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Turn an OSError into an error that names the path, the cause and what helps against it.

    what: "checkpoint" makes it a CheckpointError, anything else a SpmdflowError.
    """
    try:
        yield
    except OSError as err:
        kind = CheckpointError if what == "checkpoint" else SpmdflowError
        raise kind(f"{what}: cannot {doing} {path}: {describe_disk_error(err, path)}") from err


def describe_disk_error(err: OSError, path: Path) -> str:
    """Cause, file and what to do, such as "No space left on device (FILE); ... free some space"."""
    at = err.filename or path
    cause = err.strerror or err
    return f"{cause} ({at}); {_advice(err, path)}"


def _advice(err: OSError, path: Path) -> str:
    """What to do about an error of the disk."""
    if err.errno in _NO_SPACE:
        there = _nearest_folder(path)
        if there:
            free = f"{shutil.disk_usage(there).free} bytes are free"
        else:
            free = "the disk is full"
        return f"{free} there: free some space (or raise the quota), or set run.dir to another disk"
    return _ADVICE.get(err.errno or 0, "check that path and its file system, or set run.dir")


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHECK_FILE_SYSTEM = (
    "the file system fails, the space on it does not matter: check its mount, its server and the "
    "kernel's log, then start the run again"
)
_FILE_IN_THE_WAY = "a file is where a folder is expected, or a folder where a file is: move it away"
_ADVICE = {
    errno.EACCES: "fix its rights, or set run.dir to a folder that this user may write",
    errno.EPERM: "fix its rights, or set run.dir to a folder that this user may write",
    errno.EROFS: "its file system is mounted read-only: mount it writable, or set run.dir",
    errno.ENOENT: "it is gone, or a folder above it: restore it, or set run.dir",
    errno.ENOTDIR: f"{_FILE_IN_THE_WAY}, or set run.dir",
    errno.EISDIR: f"{_FILE_IN_THE_WAY}, or set run.dir",
    errno.EEXIST: f"{_FILE_IN_THE_WAY}, or set run.dir",
    errno.EIO: _CHECK_FILE_SYSTEM,
    errno.ESTALE: _CHECK_FILE_SYSTEM,
    errno.EREMOTEIO: _CHECK_FILE_SYSTEM,
    errno.ETIMEDOUT: _CHECK_FILE_SYSTEM,
    errno.ENOTCONN: _CHECK_FILE_SYSTEM,
    errno.EHOSTDOWN: _CHECK_FILE_SYSTEM,
    errno.ENOMEM: "this node has no memory left: end other programs, or use fewer ranks a node",
    errno.EMFILE: "this process has too many open files: raise ulimit -n",
    errno.ENFILE: "this node has too many open files: raise fs.file-max, or end other programs",
    errno.ENAMETOOLONG: "set run.dir to a shorter path",
}


def _nearest_folder(path: Path) -> Path | None:
    """The path itself or the first folder above it whose free space can be asked for."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            if folder.exists():
                return folder
    return None


READ_SECONDS = 5.0
"""For so long a file that cannot be read is tried again."""
_RETRY_SECONDS = 0.25
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Answers of a file system that works: there is no such file."""


def is_absent(err: OSError) -> bool:
    """Whether the file system says that there is no such file (waiting does not help)."""
    return err.errno in _ABSENT


def read_patiently(path: Path, read: Callable[[], T]) -> T:
    """read(), tried again for some seconds while the file system fails (EIO, ESTALE, EACCES, ...).

    path: what is read, for messages. ReadError if it still fails then. The OSError itself, at
    once, if there is no such file (`is_absent`).
    """
    limit = time.monotonic() + READ_SECONDS
    is_told = False
    while True:
        try:
            return read()
        except OSError as err:
            if is_absent(err):
                raise
            if time.monotonic() > limit:
                raise ReadError(
                    f"checkpoint: cannot read {path}, tried for {READ_SECONDS:g} s: "
                    f"{describe_disk_error(err, path)}"
                ) from err
            if not is_told:
                logger.warning("warning: cannot read %s (%s): trying again", path, err.strerror)
                is_told = True
        time.sleep(_RETRY_SECONDS)


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
    name = f".key-{secrets.token_hex(8)}"
    key = secrets.token_bytes(KEY_BYTES)
    path = run_dir / name
    try:
        with disk_errors("write", path, "run.dir"):
            for old in run_dir.glob(".key-*"):
                with contextlib.suppress(IsADirectoryError, PermissionError):  # no file of ours
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
