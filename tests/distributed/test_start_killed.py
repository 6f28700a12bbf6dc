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


def _watches(pid: int, victim: int) -> bool:
    """Whether a rank watches the victim, and knows where to write what it sees: torch is loaded
    once the settings are."""
    is_loaded = "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return is_loaded and (pid == victim or victim in _watched(pid))


def _watched(pid: int) -> set[int]:
    """Pids of the processes of which a process has a descriptor."""
    found = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            number = file.read_text().partition("\nPid:")[2].split("\n")[0]
            found |= {int(number)} if number else set()
    return found


@pytest.mark.parametrize(
    ("victim", "seconds"),
    [
        pytest.param(1, 0.0, marks=pytest.mark.drill),
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
        while len(ranks := _ranks(run.pid)) < 3 or not all(
            _watches(pid, ranks[victim]) for pid in ranks.values()
        ):
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
