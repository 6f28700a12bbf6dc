"""One live run for each RUN_DIR: an advisory lock that the kernel drops when the process ends."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from spmdflow.errors import ConfigError

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
        except OSError as err:  # a file system without locks: go on, as most do
            logger.warning("%s cannot be locked (%s): start only one run in it", path, err)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let the next run in."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
