"""RUN_DIR on disk: writes that survive a power cut, errors of disks, the key that ranks share.

While the ranks connect, the controller's rank keeps the run's key in a file of RUN_DIR. Every rank
reads the key there, which also proves that all of them share the folder. `lock` decides who may
write into the folder.
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
    """Replace a file's content, durably. After a kill or power cut it has the old or the new bytes.

    Writes NAME.tmp, fsyncs it, renames it to NAME, and fsyncs the folder, which must exist.
    OSErrors are raised.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, and fsync each new entry against a power cut.

    Existing folders are left as they are.
    """
    missing = []
    for folder in (path, *path.parents):
        if not folder.exists():
            missing.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """fsync a folder, all files and folders in it except symlinks, and its entry in its parent."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            sync(path)
    sync(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """fsync a file, or the entries of a folder. OSError if that fails.

    Some file systems (FUSE, SMB) cannot fsync a folder (EINVAL, ENOTSUP): this only warns, once for
    each file system.
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
"""Errors of fsync on a folder where the file system does not support it."""


@cache
def _warn_about_folder_sync(mount_point: Path) -> None:
    """Warn, once for each file system: the cache ignores later calls."""
    logger.warning(
        "warning: the file system at %s cannot fsync folders: after a power cut the newest files "
        "may be missing (a kill of the run loses nothing)",
        mount_point,
    )


def _mount_point(path: Path) -> Path:
    """Return the mount point of the file system that contains the path.

    It is the topmost folder above the path with the same st_dev. OSError if the path does not
    exist.
    """
    path = path.absolute()
    device = path.stat().st_dev
    while path.parent != path and path.parent.stat().st_dev == device:
        path = path.parent
    return path


@contextmanager
def disk_errors(doing: str, path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Turn an OSError in the context into an error "<what>: cannot <doing> <path>: cause; advice".

    what: "checkpoint" makes it a CheckpointError, anything else a SpmdflowError. The OSError is its
    `__cause__`. Other exceptions pass.
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
    """Return advice for an error of the disk, such as "fix its rights, or set run.dir to ...".

    For a full disk or quota it includes the free bytes. Errors without advice of their own get a
    general one.
    """
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
    "the file system fails, which more free space does not help: check its mount, its server and "
    "the kernel's log, then start the run again"
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
    """Return the path, or its nearest parent that exists; None if nothing can be accessed."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            if folder.exists():
                return folder
    return None


READ_SECONDS = 5.0
"""How long to retry a file that cannot be read."""
_RETRY_SECONDS = 0.25
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors of a working file system for a file that does not exist."""


def is_absent(err: OSError) -> bool:
    """Whether the error means that the file does not exist, so that waiting does not help."""
    return err.errno in _ABSENT


def read_patiently(path: Path, read: Callable[[], T]) -> T:
    """Return read(); call it again every 0.25 s while the file system fails.

    That is an OSError such as EIO, ESTALE or EACCES. ReadError if it still fails after
    `READ_SECONDS` (5 s). If the file does not exist (`is_absent`), the OSError itself is raised at
    once. The first retry is logged. path: the file, for messages.
    """
    limit = time.monotonic() + READ_SECONDS
    has_warned = False
    while True:
        try:
            return read()
        except OSError as err:
            if is_absent(err):
                raise
            if time.monotonic() > limit:
                raise ReadError(
                    f"checkpoint: cannot read {path}, retried for {READ_SECONDS:g} s: "
                    f"{describe_disk_error(err, path)}"
                ) from err
            if not has_warned:
                logger.warning("warning: cannot read %s (%s): trying again", path, err.strerror)
                has_warned = True
        time.sleep(_RETRY_SECONDS)


KEY_BYTES = 32
_KEY_NAME = re.compile(r"\.key-[0-9a-f]{16}")
_LOOK_SECONDS = 0.05


@contextmanager
def shared_key(run_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Write a random key of 32 bytes to a file of RUN_DIR; yield (file name, key); remove the file.

    Also removes the key files of killed starts. Only this user may read the file (mode 0600); if
    the file system does not support that, this warns. SpmdflowError if the file cannot be written.
    """
    name = f".key-{secrets.token_hex(8)}"
    key = secrets.token_bytes(KEY_BYTES)
    path = run_dir / name
    try:
        with disk_errors("write", path, "run.dir"):
            for old in run_dir.glob(".key-*"):
                with contextlib.suppress(IsADirectoryError, PermissionError):  # not our file
                    old.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, key)
                rights = os.fstat(file).st_mode & 0o077
            finally:
                os.close(file)
        if rights:
            logger.warning(
                "warning: others may read %s, the key of this run: set SPMDFLOW_SECRET", path
            )
        yield name, key
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_key(run_dir: Path, name: str, *, seconds: float) -> bytes | None:
    """Return the key that `shared_key` wrote to file `name`; None if it does not appear in time.

    Polls for at most `seconds`, because network file systems show new files late. None at once if
    name is not ".key-" and 16 hexadecimal digits.
    """
    limit = time.monotonic() + seconds
    while _KEY_NAME.fullmatch(name):
        with contextlib.suppress(OSError):  # the file does not exist here (yet)
            if len(key := (run_dir / name).read_bytes()) == KEY_BYTES:
                return key
        if time.monotonic() > limit:
            break
        time.sleep(_LOOK_SECONDS)
    return None
