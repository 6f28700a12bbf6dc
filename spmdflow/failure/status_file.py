"""RUN_DIR/status.json: what a live run is doing, for `spmdflow status` in another terminal.

A separate thread writes it, so that a disk that hangs blocks nothing else. The same thread checks
whether somebody has requested stacks.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.lock import STATUS_FILE

WANTED_FILE = "stacks-wanted"
"""A file of this name in RUN_DIR requests the stacks of all ranks."""


class StatusFile:
    """Writes the latest state to the file, in a thread."""

    def __init__(
        self,
        run_dir: Path,
        on_wanted: Callable[[], None],
        owns_run_dir: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread.

        on_wanted: called by it when stacks are requested.
        owns_run_dir: whether run_dir still belongs to this run. Otherwise nothing is written or
        removed there.
        """
        self._owns_run_dir = owns_run_dir
        self._path = run_dir / STATUS_FILE
        self._wanted = run_dir / WANTED_FILE
        self._on_wanted = on_wanted
        self._states: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def put(self, state: dict[str, Any]) -> None:
        """Have a state written, unless an older one is still being written."""
        with contextlib.suppress(queue.Full):
            self._states.put_nowait(state)

    def close(self) -> None:
        """Remove the file and end the thread, when the run has ended."""
        with contextlib.suppress(queue.Full):
            self._states.put(None, timeout=1.0)
        self._thread.join(1.0)

    def _run(self) -> None:
        """Write each state to status.json until None arrives (from `close`), then remove the file.

        Replaces the file atomically. After each write, a file "stacks-wanted" in RUN_DIR is removed
        and on_wanted() called. Nothing happens while RUN_DIR belongs to another run. Disk errors
        are ignored.
        """
        new = self._path.with_suffix(".new")
        while (state := self._states.get()) is not None:
            with contextlib.suppress(OSError):
                if not self._owns_run_dir():
                    continue
                new.write_text(json.dumps(state), encoding="utf-8")
                new.replace(self._path)
                if self._wanted.exists():
                    self._wanted.unlink()
                    self._on_wanted()
        with contextlib.suppress(OSError):
            if self._owns_run_dir():
                self._path.unlink(missing_ok=True)
