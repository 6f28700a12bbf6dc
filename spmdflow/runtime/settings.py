"""What a session is told: its ranks, its folder, its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spmdflow.data.store import RowCondition
from spmdflow.errors import RunFailed


@dataclass(frozen=True)
class SessionSettings:
    """Facts that every rank of a session is given alike."""

    run_dir: Path
    """Receives failure.json, failure-rank<k>.json and stacks-rank<k>.txt."""
    ranks: tuple[int, ...]
    """Global ranks that take part, ascending; the controller lives on the first."""
    start_seconds: float = 600.0
    """Limit for all ranks to connect."""
    call_seconds: float = 3600.0
    """Silence of the controller after which a rank gives up (it limits every call too)."""
    transfer_seconds: float = 60.0
    """Limit of one released transfer, for the operations that move bytes."""
    heartbeat_seconds: float = 120.0
    """Silence of a rank after which a warning is logged."""
    secret: str | None = None
    """Turns on CURVE; the same on every rank (SPMDFLOW_SECRET)."""
    launcher: int | None = None
    """Pid of the parent with which the process ends (runtime/process.py); None: who it is."""
    unwinds: bool = False
    """A failure that leaves every process alive ends the session (RunFailed), not the processes."""
    on_failure: Callable[[RunFailed], None] | None = None
    """Told why, on the controller's rank, before a failure ends the processes."""

    @property
    def controller_rank(self) -> int:
        """The rank on which the script runs."""
        return self.ranks[0]

    @property
    def beat_seconds(self) -> float:
        """Time between two signs of life."""
        return min(5.0, max(0.2, self.heartbeat_seconds / 10))


@dataclass(frozen=True)
class Member:
    """What the operations of a rank may know about the session they run in."""

    rank: int
    """Global rank."""
    settings: SessionSettings
    arrival: RowCondition
    """How the compute lane waits for rows."""
