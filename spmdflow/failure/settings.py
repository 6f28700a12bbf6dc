"""Settings of a session: time limits, and what a failure of it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.errors import RunFailed


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session: the same on every rank, except launcher and the functions."""

    run_dir: Path
    """Receives failure.json, failure-rank<k>.json and stacks-rank<k>.txt."""
    ranks: tuple[int, ...]
    """Global ranks that take part, ascending. The controller runs on the first."""
    start_seconds: float = 600.0
    """Time limit for all ranks to connect."""
    call_seconds: float | None = None
    """Time limit of each call, and of the controller's silence before a rank gives up.

    None: the limits of calls come from earlier calls, and a controller that stays stopped ends the
    run (failure/duration.py)."""
    transfer_seconds: float = 60.0
    """Time limit of one transfer, for the operations that move bytes."""
    heartbeat_seconds: float = 120.0
    """Silence of a rank after which a warning is logged."""
    secret: str | None = None
    """SPMDFLOW_SECRET. Needed with the run's key to connect, and equal on every rank."""
    launcher: int | None = None
    """Pid of the process whose end ends this one (failure/launcher.py); None: the parent."""
    on_met: Callable[[], None] = lambda: None
    """Called by the main thread when all ranks have met."""
    on_claimed: Callable[[RunDirLock], None] = lambda lock: None
    """Called with the lock of RUN_DIR on the controller's rank, before ranks meet."""
    owns_run_dir: Callable[[], bool] = lambda: True
    """Whether RUN_DIR still belongs to this run. Otherwise no report is written there.
    `run_session` sets it."""
    unwinds: bool = False
    """Whether a failure that leaves every process alive ends only the session (RunFailed)."""
    on_failure: Callable[[RunFailed], None] | None = None
    """Called with the error on the controller's rank, before a failure ends the processes."""
    show_failure: Callable[[], None] = lambda: None
    """Called after a failure has been written, before the process ends. It runs on the controller's
    rank, or on the next one if the controller is lost."""

    @property
    def controller_rank(self) -> int:
        """The rank on which the script runs."""
        return self.ranks[0]

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats."""
        return min(5.0, max(0.2, self.heartbeat_seconds / 10))
