"""Progress of a long planning: a line on the terminal and in status.json.

Planners log their progress to the logger `PLANNING` at level DEBUG, and only this module listens to
it. On a terminal one line is overwritten. A log gets a new line every ten seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from spmdflow.checkpoint.lock import LOCK_FILE, claim_run_dir
from spmdflow.errors import ConfigError
from spmdflow.failure.status_file import StatusFile
from spmdflow.log import PLANNING

_FIRST_SECONDS = 2.0
_EVERY_SECONDS = 0.5
_LOG_SECONDS = 10.0
_MOST_LETTERS = 78


class _Newest(logging.Handler):
    """Keeps the latest message."""

    text = "reading the settings"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextlib.contextmanager
def show_planning(run_dir: Path | None) -> Iterator[None]:
    """Show the progress of the planning inside the `with` block once it has taken two seconds.

    A thread writes the latest message of the logger PLANNING to stderr and status.json. Until the
    block ends, that logger is at level DEBUG and does not propagate its messages.
    run_dir: locked meanwhile, and gets a status.json, unless a live run uses it.
    """
    logger = logging.getLogger(PLANNING)
    newest = _Newest()
    over = threading.Event()
    level = logger.level
    propagate = logger.propagate
    logger.addHandler(newest)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    thread = threading.Thread(target=_show, args=(newest, over, run_dir), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LOG_SECONDS)
        logger.removeHandler(newest)
        logger.setLevel(level)
        logger.propagate = propagate


def _show(newest: _Newest, over: threading.Event, run_dir: Path | None) -> None:
    """Write the latest message to stderr and status.json twice a second until `over` is set.

    Nothing is written if `over` is set within two seconds. On a terminal the line is overwritten
    and removed at the end; otherwise a new line is written every ten seconds. The lock of run_dir
    is held meanwhile; if a live run has it, only stderr is written. A run_dir created here is
    removed again.
    """
    began = time.monotonic()
    next_line = 0.0
    if over.wait(_FIRST_SECONDS):
        return
    is_new = run_dir is not None and not run_dir.exists()
    with contextlib.ExitStack() as at_end:
        status = None
        with contextlib.suppress(ConfigError):  # a live run is there, or nothing can be written
            if run_dir is not None:
                lock = claim_run_dir(run_dir)
                if is_new:
                    at_end.callback(_remove_unused, run_dir)
                at_end.callback(lock.release)
                status = StatusFile(run_dir, on_wanted=lambda: None)
                at_end.callback(status.close)
        is_terminal = sys.stderr.isatty()
        while True:
            seconds = time.monotonic() - began
            text = f"planning: {newest.text} ({seconds:.0f} s)"
            if is_terminal:
                sys.stderr.write(f"\r\033[K{text[:_MOST_LETTERS]}")
            elif seconds >= next_line:
                next_line = seconds + _LOG_SECONDS
                sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            if status is not None:
                status.put({"written": time.time(), "planning": text})
            if over.wait(_EVERY_SECONDS):
                break
        if is_terminal:
            sys.stderr.write("\r\033[K")


def _remove_unused(run_dir: Path) -> None:
    """Remove a folder that only the planning has used: it is empty or has only the lock file.

    Any other folder stays. Errors of the file system are ignored.
    """
    with contextlib.suppress(OSError):
        if [path.name for path in run_dir.iterdir()] == [LOCK_FILE]:
            (run_dir / LOCK_FILE).unlink()
        run_dir.rmdir()
