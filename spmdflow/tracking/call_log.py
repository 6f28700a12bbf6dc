"""`CallLog`: RUN_DIR/calls.jsonl, one line for each call of a run (runtime/call.py, `to_line`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdflow.tracking.tracker import append_lines, cut_back, set_aside

logger = logging.getLogger(__name__)

CALLS_FILE = "calls.jsonl"
MAX_BYTES = 64 << 20


class CallLog:
    """Appends lines up to max_bytes; exists only in the controller's process."""

    def __init__(self, run_dir: Path, *, last_step: int = -1, max_bytes: int = MAX_BYTES) -> None:
        """Prepare the file for the steps after last_step, that of the checkpoint that continues.

        -1 (no checkpoint): a file of an earlier run is renamed.
        """
        self.path = run_dir / CALLS_FILE
        self._max_bytes = max_bytes
        self._is_full = False
        if last_step < 0 or self.path.is_dir():
            set_aside(self.path)
        else:
            cut_back(self.path, last_step)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append one JSON line for each of `lines` to calls.jsonl.

        Once the file has more than max_bytes (64 MiB by default), it drops all further lines; the
        first time it warns. SpmdflowError if the disk fails.
        """
        if self._is_full or not lines:
            return
        if self.path.exists() and self.path.stat().st_size > self._max_bytes:
            self._is_full = True
            logger.warning(
                "warning: %s: full at %d bytes; later calls are not listed",
                self.path,
                self.path.stat().st_size,
            )
            return
        append_lines(self.path, lines)
