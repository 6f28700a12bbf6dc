"""A rank that is killed before all have met is named by the ranks of its node.

Not in its first moments, while Python starts: then torchrun alone says who it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.algos.runs import finish, log_of, torchrun


def _ranks(agent: int) -> dict[int, int]:
    """Pid of each rank that an agent has started."""
    found = {}
    for file in Path(f"/proc/{agent}/task").glob("*/children"):
        for pid in _children(file):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): pid for word in words if word.startswith(b"RANK=")}
    return found


def _children(of_thread: Path) -> list[int]:
    """None of a thread that has ended."""
    with contextlib.suppress(OSError):
        return list(map(int, of_thread.read_text().split()))
    return []


def _watches(pid: int) -> bool:
    """Whether a rank watches the others (until they have met it blocks SIGTERM) and knows where
    to write what it sees: torch is loaded once the settings are."""
    if "libtorch_cpu" not in Path(f"/proc/{pid}/maps").read_text():
        return False
    blocked = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
    return bool(int(blocked, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("victim", "seconds"),
    [
        (1, 1.0),
        *[
            pytest.param(victim, seconds, marks=pytest.mark.slow)
            for victim in (0, 2)
            for seconds in (1.5, 2.5, 4.0, 6.0)
        ],
    ],
)
def test_rank_that_is_killed_in_the_start_is_named_with_its_signal(
    tmp_path: Path, victim: int, seconds: float
) -> None:
    run_dir = tmp_path / "run"
    run = torchrun(run_dir, "total_steps=2", num_ranks=3)
    try:
        until = time.monotonic() + 240.0
        while len(ranks := _ranks(run.pid)) < 3 or not all(map(_watches, ranks.values())):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(ranks[victim], signal.SIGKILL)
    finally:
        status = finish(run, seconds=240)

    assert status == 1
    files = [run_dir / "failure.json"]
    if not files[0].exists():  # on a fast machine the session stood, and its controller died
        files = [run_dir / f"failure-rank{rank}.json" for rank in (1, 2)]
    for failure in (json.loads(file.read_text()) for file in files):
        assert (failure["rank"], failure["kind"]) == (victim, "death"), log_of(run_dir).read_text()
        # torchrun may have taken the signal off the process before anyone looked
        known = ("killed by SIGKILL", "ended (signal or status unknown)")
        assert any(text in failure["cause"] for text in known)
    assert log_of(run_dir).read_text().count("RUN FAILED") <= 1
