"""What a planning that takes long does: a line on the terminal, and in status.json.

Planners tell it to the logger `PLANNING`, at the level DEBUG; nobody else listens to it. A terminal
has one line that is written over; a log gets a plain one now and then.
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
    """Keeps what was told last."""

    text = "reading the settings"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextlib.contextmanager
def planning_shown(run_dir: Path | None) -> Iterator[None]:
    """Show what is planned inside, once it has taken two seconds.

    run_dir: is locked and gets a status.json meanwhile, unless a live run uses it.
    """
    logger = logging.getLogger(PLANNING)
    newest = _Newest()
    over = threading.Event()
    before = logger.level, logger.propagate
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
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _show(newest: _Newest, over: threading.Event, run_dir: Path | None) -> None:
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
    """Remove a folder that only planning has used: after a refusal nothing is left."""
    with contextlib.suppress(OSError):
        if [path.name for path in run_dir.iterdir()] == [LOCK_FILE]:
            (run_dir / LOCK_FILE).unlink()
        run_dir.rmdir()
