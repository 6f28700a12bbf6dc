"""RUN_DIR/status.json: what a live run does, for `spmdflow status` in another terminal.

Written by a thread of its own, so that a disk that hangs holds nothing but this file. The same
thread looks whether somebody asked for stacks.
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


class StatusFile:
    """Rewrites the file with the newest state that it was given."""

    def __init__(
        self,
        run_dir: Path,
        on_wanted: Callable[[], None],
        owns_run_dir: Callable[[], bool] = lambda: True,
    ) -> None:
        """on_wanted: called when stacks are asked for (any thread). owns_run_dir: whether run_dir
        is still the folder of this run: nothing is written or removed there otherwise."""
        self._owns_run_dir = owns_run_dir
        self._path = run_dir / STATUS_FILE
        self._wanted = run_dir / WANTED_FILE
        self._on_wanted = on_wanted
        self._states: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def put(self, state: dict[str, Any]) -> None:
        """Write a state, unless an older one is still being written."""
        with contextlib.suppress(queue.Full):
            self._states.put_nowait(state)

    def close(self) -> None:
        """The run has ended: remove the file."""
        with contextlib.suppress(queue.Full):
            self._states.put(None, timeout=1.0)
        self._thread.join(1.0)

    def _run(self) -> None:
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
