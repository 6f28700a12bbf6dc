"""`StepProfiler`: torch.profiler's record of chosen steps of one rank, for ui.perfetto.dev.

RUN_DIR/profile/step_3_rank_0.json.gz has every operator of the thread that computes, the kernels on
a device, and a range for each call of the script. A step's record begins with its first call here
and is written when the first call of another step comes, or at the end; writing takes seconds.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.profiler import profile, record_function

from spmdflow.checkpoint.disk import disk_errors

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records while a chosen step runs; the rank's compute lane alone calls it."""

    def __init__(self, steps: range, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = steps, folder, rank
        self._running: tuple[int, profile] | None = None

    def call(self, step: int, label: str) -> AbstractContextManager[object]:
        """A call of this step begins: start or end a record; the context is the call's range."""
        if self._running is not None and self._running[0] != step:
            self.close()
        if self._running is None and step in self._steps:
            self._running = step, profile()
            self._running[1].start()
        return nullcontext() if self._running is None else record_function(label)

    def close(self) -> None:
        """Write what is recorded."""
        if self._running is None:
            return
        (step, running), self._running = self._running, None
        running.stop()
        path = self._folder / f"step_{step}_rank_{self._rank}.json.gz"
        with disk_errors("write", path, "profiling"):
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        logger.info("profile of step %d: %s", step, path)
