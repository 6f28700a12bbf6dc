"""The program of one rank of a case: runs the script, and notes this rank's memory in each phase.

    torchrun ... scripts/matrix/rank.py RESULT_FOLDER SCRIPT [YAML] [KEY=VALUE ...]

A run's own record has the fullest rank of each call; this writes RESULT_FOLDER/memory-RANK.json.
Phases have the plan's names: actor.build, actor.update_actor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])

from spmdflow.run import main as run_rank  # noqa: E402
from spmdflow.runtime.operation import RankState  # noqa: E402

Peaks = dict[str, int]
"""Bytes by phase."""


def note_peaks(peaks: Peaks) -> None:
    """Make the operations on models of this process leave their peaks in `peaks`."""
    operations = RankState.operations

    def noting_operations(state: RankState) -> dict[str, Any]:
        named = operations(state)
        named["call"] = _noting(peaks, named["call"], lambda x: f"{x['group']}.{x['method']}")
        named["spawn"] = _noting(peaks, named["spawn"], lambda x: f"{x['name']}.build")
        return named

    RankState.operations = noting_operations  # type: ignore[method-assign]


def _noting(
    peaks: Peaks, operation: Any, phase_of: Callable[[Any], str]
) -> Callable[[Any, int], Any]:
    """The operation, which also notes its peak. phase_of: the phase of a command."""

    def run(plain: Any, number: int) -> Any:
        reply = operation(plain, number)
        phase = phase_of(plain)
        peaks[phase] = max(peaks.get(phase, 0), reply.get("device_bytes", 0))
        return reply

    return run


def main() -> None:
    """Run the rank; the peaks are written however it ends."""
    folder = Path(sys.argv[1])
    peaks: Peaks = {}
    note_peaks(peaks)
    try:
        sys.exit(run_rank(sys.argv[2:]))
    finally:
        path = folder / f"memory-{os.environ['RANK']}.json"
        path.write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
