"""The lock of RUN_DIR: who may write there, and whether a run is live there.

One rule answers both: **a run is live as long as it holds the lock**, and exactly then a second
start is rejected. Rank 0 takes the lock before anything is written. The kernel releases it when the
process ends, for whatever reason. RUN_DIR/.lock also has a record of the holder, which a run
removes when it ends normally. A record without a lock therefore means that the run was killed.

The lock uses flock. Limits:

- A file system without flock: no start is rejected, and a warning says so. The later start replaces
  the record. The earlier run ends at its next save, because the folder is no longer its own.
- Another node, where locks may not be shared (NFS mounted with local locks): if this node cannot
  see the lock of a run on another node, the run counts as live while its status.json is recent.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from spmdflow.checkpoint.disk import describe_disk_error, make_folders, read_patiently
from spmdflow.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
"""In RUN_DIR since its first run."""
STATUS_FILE = "status.json"
"""In RUN_DIR: the activity of a live run, whose rank 0 rewrites it every few seconds."""

_RETRY_LIMIT_SECONDS = 0.5
"""How long a start retries the lock, which a check of liveness holds for a moment."""
_RETRY_SECONDS = 0.02
_RECENT_SECONDS = 60.0
"""A status.json older than this is not being rewritten any more."""
_MAX_RECORD_BYTES = 1024


@dataclass(frozen=True)
class LockRecord:
    """The holder of the lock, as recorded in RUN_DIR/.lock."""

    pid: int
    node: str
    """Host name."""
    boot: str
    """Differs between nodes with the same host name, and between two boots of a node."""
    token: str
    """Differs between any two holders."""

    @classmethod
    def of_this_process(cls) -> LockRecord:
        """A new record of this process, with a random token."""
        return cls(os.getpid(), os.uname().nodename, _boot_id(), secrets.token_hex(8))

    @classmethod
    def parse(cls, data: bytes) -> LockRecord | None:
        """Return the record in a lock file's bytes, "PID NODE BOOT TOKEN"; None if there is none.

        There is none if the first word is not a number. Missing words become "unknown", because an
        earlier version wrote only the pid.
        """
        words = data.decode(errors="replace").split()
        if not words or not words[0].isdigit():
            return None
        words += ["unknown"] * (4 - len(words))  # an earlier version wrote only the process
        return cls(int(words[0]), words[1], words[2], words[3])

    def to_bytes(self) -> bytes:
        """The content of the lock file."""
        return f"{self.pid} {self.node} {self.boot} {self.token}\n".encode()

    def describe(self) -> str:
        """The holder's process, and its node unless that is this node."""
        where = "" if self.is_of_this_node() else f" on node {self.node}"
        return f"process {self.pid}{where}"

    def is_of_this_node(self) -> bool:
        """Whether the holder ran on this node since the last boot."""
        return (self.node, self.boot) == (os.uname().nodename, _boot_id())


class RunDirLock:
    """The lock of RUN_DIR, held from construction to `release`."""

    def __init__(self, run_dir: Path) -> None:
        """Take the lock and write the record; ConfigError if another live process holds it."""
        self.run_dir = run_dir
        self.record = LockRecord.of_this_process()
        path = run_dir / LOCK_FILE
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._acquire(path)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self.record.to_bytes(), 0)
        except BaseException:  # such as a full disk, or Ctrl-C
            os.close(self._file)
            raise

    def _acquire(self, path: Path) -> None:
        """Lock the file exclusively (flock), retrying for 0.5 s.

        ConfigError with the holder's process if another process still has the lock then.
        (`is_run_live` has it only for a moment.) On a file system without locks it warns and
        returns without a lock.
        """
        limit = time.monotonic() + _RETRY_LIMIT_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as err:
                if time.monotonic() > limit:
                    holder = LockRecord.parse(os.pread(self._file, _MAX_RECORD_BYTES, 0))
                    process = holder.describe() if holder else "unknown process"
                    raise ConfigError(
                        f"run.dir: {self.run_dir} is in use by a live run ({process}), expected an "
                        f"unused folder; end that run, or set run.name or run.dir to another"
                    ) from err
            except OSError as err:  # a file system without locks: continue without one
                logger.warning(
                    "warning: %s cannot be locked (%s): start only one run in it", path, err
                )
                return
            time.sleep(_RETRY_SECONDS)

    def is_held(self) -> bool:
        """Whether the folder at this path is still the one that was locked, and still ours."""
        try:
            return self._find_problem() is None
        except OSError:
            return False

    def check_held(self) -> None:
        """CheckpointError if RUN_DIR was deleted, renamed or replaced, or is now another run's."""
        problem = read_patiently(self.run_dir / LOCK_FILE, self._find_problem)
        if problem is not None:
            raise CheckpointError(
                f"checkpoint: {self.run_dir} {problem}, so nothing more is written there; keep "
                f"RUN_DIR in its place while a run uses it, and start the run again (from a "
                f"renamed folder: set run.dir to its new name)"
            )

    def _find_problem(self) -> str | None:
        """Return what has happened to RUN_DIR, in words; None if it is still ours.

        It is ours if RUN_DIR/.lock is the file that is open here and has the token of our record.
        Otherwise it was deleted, renamed, replaced, or taken over by another run. OSError if it
        cannot be accessed. AssertionError after `release`.
        """
        assert self._file >= 0, "the lock has been released"
        path = self.run_dir / LOCK_FILE
        try:
            is_same_file = os.path.samestat(path.stat(), os.fstat(self._file))
            record = LockRecord.parse(path.read_bytes()[:_MAX_RECORD_BYTES])
        except (FileNotFoundError, NotADirectoryError):
            if self.run_dir.is_dir():
                what = "has lost its file .lock"
            else:
                what = "is not there any more"
            return f"{what} (deleted or renamed while the run used it)"
        if not is_same_file:
            return "is another folder than the one that this run started in"
        if record is None or record.token != self.record.token:
            holder = f" ({record.describe()})" if record else ""
            return f"was taken over by another run{holder}"
        return None

    def release(self) -> None:
        """Release the lock, and empty the lock file, so that the run does not count as killed.

        The record of another run in the file stays. A second call does nothing.
        """
        if self._file < 0:
            return
        record = LockRecord.parse(os.pread(self._file, _MAX_RECORD_BYTES, 0))
        if record == self.record:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        with contextlib.suppress(OSError):  # a forked process has the file open too
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file = -1


@dataclass(frozen=True)
class RunDirMark:
    """Identifies the RUN_DIR of a run for ranks without the lock, by the record of rank 0's
    lock."""

    run_dir: Path
    record: LockRecord | None

    @classmethod
    def read(cls, run_dir: Path) -> RunDirMark:
        """The mark of the run that currently holds RUN_DIR."""
        return cls(run_dir, read_record(run_dir))

    def is_there(self) -> bool:
        """Whether the folder at this path still belongs to this run."""
        return self.record is not None and read_record(self.run_dir) == self.record


def claim_run_dir(run_dir: Path) -> RunDirLock:
    """Create RUN_DIR if it does not exist, lock it, and return the lock. No other code creates it.

    ConfigError if it cannot be created or written, or if a live run uses it.
    """
    try:
        make_folders(run_dir)
        return RunDirLock(run_dir)
    except OSError as err:
        raise ConfigError(
            f"run.dir: cannot use {run_dir}, expected a writable folder: "
            f"{describe_disk_error(err, run_dir)}"
        ) from err


def read_record(run_dir: Path) -> LockRecord | None:
    """Record of the run that holds RUN_DIR, or was killed there; None if there is none."""
    try:
        return LockRecord.parse((run_dir / LOCK_FILE).read_bytes()[:_MAX_RECORD_BYTES])
    except OSError:
        return None


def is_run_live(run_dir: Path) -> bool:
    """Return whether a run currently uses RUN_DIR.

    True if a process holds the lock. If this node can lock it (a shared lock, for a moment), a
    record of this node means a killed run: False. A record of another node, or a file system
    without locks, counts as live if status.json is less than 60 s old. False without a lock file or
    a record.
    """
    try:
        file = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        can_lock = True
    except BlockingIOError:
        return True
    except OSError:
        can_lock = False
    finally:
        os.close(file)
    record = read_record(run_dir)
    if record is None or (can_lock and record.is_of_this_node()):
        return False
    with contextlib.suppress(OSError):
        return time.time() - (run_dir / STATUS_FILE).stat().st_mtime < _RECENT_SECONDS
    return False


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"
