"""spmdflow.run, harmed at the points of a list, one point after another over any number of starts.

Usage: torchrun ... interrupted.py POINTS HITS WORD...
POINTS: JSON, a list of `Point`s. HITS: one JSON line for each point that was reached; the next
start, or the next attempt of --max-restarts, goes on with the point after the last. WORDs are those
of spmdflow.run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = ("start-up", "generation", "preparation", "learning", "evaluation", "saving")


@dataclass(frozen=True)
class Point:
    """Where a run is harmed, and how."""

    phase: str
    occurrence: int
    """Which command of the phase, from 1, after the start; 0: none, the seconds count from it."""
    seconds: float
    """After that command has begun."""
    rank: int
    victim: str
    """rank or launcher."""
    number: int
    """Of the signal."""


class Harm:
    """Watches the commands of this rank, and carries out the point that is next."""

    def __init__(self, points: list[Point], hits: Path) -> None:
        self._hits = hits
        self._seen = 0
        self._before = ""
        self._launcher = os.getppid()
        self._phase = "start-up"
        number = len(hits.read_text().splitlines())
        self._point = points[number] if number < len(points) else None
        if self._point is not None and self._point.rank != int(os.environ["RANK"]):
            self._point = None
        if self._point is not None and not self._point.occurrence:
            self._strike_later(self._point)

    def begin(self, label: str, payload: Any) -> None:
        """A command begins on this rank."""
        self._phase = self._phase_of(label, str(payload.get("operation"))) or self._phase
        self._before = label
        if self._point is not None and self._phase == self._point.phase:
            self._seen += 1
            if self._seen == self._point.occurrence:
                self._strike_later(self._point)

    def _phase_of(self, label: str, operation: str) -> str:
        """Of a command; "": as the one before."""
        method = label.rpartition(".")[2]
        is_evaluation = method == "compute_reward" and self._before.endswith("generate_sequences")
        if operation == "fetch" or is_evaluation:
            return "evaluation"
        if operation in ("save", "write"):
            return "saving"
        starts = {"generate": "generation", "compute": "preparation", "update": "learning"}
        return next((phase for start, phase in starts.items() if method.startswith(start)), "")

    def _strike_later(self, point: Point) -> None:
        timer = threading.Timer(point.seconds, self._strike, [point])
        timer.daemon = True
        timer.start()

    def _strike(self, point: Point) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        hit = asdict(point) | {"reached": self._phase, "attempt": attempt}
        with self._hits.open("a") as file:
            file.write(json.dumps(hit) + "\n")
        os.kill(self._launcher if point.victim == "launcher" else os.getpid(), point.number)


def main() -> int:
    """Run as spmdflow.run does."""
    points, hits = (Path(word) for word in sys.argv[1:3])
    harm = Harm([Point(**point) for point in json.loads(points.read_text())], hits)
    from spmdflow.run import main as run
    from spmdflow.runtime import executor

    find = executor.find_operation

    def watched(operations: Any, label: str, payload: Any) -> Any:
        harm.begin(label, payload)
        return find(operations, label, payload)

    executor.find_operation = watched
    return run(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
