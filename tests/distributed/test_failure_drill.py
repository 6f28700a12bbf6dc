"""Every way to go, in every place: out within 15 s, the culprit named, no process left.

Each case is a real torchrun with three ranks. The default part is one case of each kind; the
whole matrix is marked slow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "session_drill.py"
WORLD_SIZE = 3
OUT_SECONDS = 15.0
START_SECONDS = 90.0


class Drill:
    """One torchrun of the drill program; its processes carry a mark in their environment."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._mark = f"SPMDFLOW_DRILL={uuid.uuid4().hex}"
        self._log = run_dir / "log.txt"

    def start(self, where: str, how: str, victim: int, seconds: float) -> None:
        name, value = self._mark.split("=")
        environment = os.environ | {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(WORLD_SIZE), str(PROGRAM)]
        command += [str(self.run_dir), where, how, str(victim), str(seconds)]
        with self._log.open("wb") as log:
            self.torchrun = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._wait(self._all_are_running, START_SECONDS, "ranks to be where they should")

    def _all_are_running(self) -> bool:
        assert self.torchrun.poll() in (None, 1), self.log()
        return all((self.run_dir / f"running-{rank}").exists() for rank in range(WORLD_SIZE))

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(int((self.run_dir / f"pid-{rank}").read_text()), number)

    def wait_until_out(self) -> None:
        """Every process of this run is gone in time."""
        self._wait(lambda: not self.alive(), OUT_SECONDS, "all processes to end")
        assert self.torchrun.wait(5) != 0

    def alive(self) -> list[int]:
        """Processes with our mark, zombies excepted (they have no environment)."""
        mark = self._mark.encode()
        self.torchrun.poll()
        return [pid for pid in _all_pids() if mark in _environment(pid).split(b"\0")]

    def failure(self, name: str = "failure.json") -> dict[str, Any]:
        path = self.run_dir / name
        assert path.exists(), self.log()
        return json.loads(path.read_text())

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.log()}"
            time.sleep(0.05)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    drill = Drill(tmp_path)
    yield drill
    drill.end()


CAUSES = {
    "exception": ("exception", "RuntimeError: drill in a lane"),
    "exit": ("death", "exited with status 7"),
    "kill": ("death", "killed by SIGKILL"),
}
DEFAULT = {
    ("compute", "exception", 2),
    ("transfer", "exit", 2),
    ("idle", "kill", 2),
    ("compute", "kill", 0),
    ("transfer", "exception", 0),
}
MATRIX = [
    pytest.param(*case, marks=[] if case in DEFAULT else [pytest.mark.slow])
    for where in ("compute", "transfer", "idle")
    for how in ("exception", "exit", "kill")
    for victim in (2, 0)
    if (where, how) != ("idle", "exception")  # nothing runs: see the error in the script
    for case in [(where, how, victim)]
]


@pytest.mark.parametrize(("where", "how", "victim"), MATRIX)
def test_rank_that_fails_is_named_and_everything_ends(
    drill: Drill, where: str, how: str, victim: int
) -> None:
    drill.start(where, "wait" if how == "kill" else how, victim, 60.0)
    if how == "kill":
        drill.signal_rank(victim, signal.SIGKILL)
    drill.wait_until_out()

    kind, cause = CAUSES[how]
    lives_to_tell = victim != 0 or how == "exception"
    names = ["failure.json"] if lives_to_tell else ["failure-rank1.json", "failure-rank2.json"]
    for name in names:
        failure = drill.failure(name)
        assert (failure["rank"], failure["kind"]) == (victim, kind), failure
        assert cause in failure["cause"]
        assert lives_to_tell or where == "idle" or "running actor.harm" in failure["cause"]
    if lives_to_tell and where != "idle":
        assert (failure["role"], failure["method"]) == ("actor", "harm")
        assert (failure["call"], failure["lane"]) == (2, where)
        assert f"RUN FAILED: rank {victim}, actor.harm (call 2, {where} lane): " in drill.log()
    if how == "exception":
        assert 'raise RuntimeError("drill in a lane")' in failure["traceback"]


def test_error_in_the_script_is_shown_with_its_traceback(drill: Drill) -> None:
    drill.start("idle", "exception", 0, 60.0)
    drill.wait_until_out()

    failure = drill.failure()
    assert (failure["rank"], failure["kind"]) == (0, "script")
    assert failure["cause"] == "RuntimeError: drill in the script"
    assert 'raise RuntimeError("drill in the script")' in drill.log()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("compute", marks=pytest.mark.slow),
        pytest.param("transfer", marks=pytest.mark.slow),
        "idle",
    ],
)
def test_ranks_end_when_torchrun_is_killed(drill: Drill, where: str) -> None:
    drill.start(where, "wait", 1, 60.0)
    drill.torchrun.kill()
    drill.wait_until_out()

    failure = drill.failure()
    assert failure["kind"] == "launcher"
    assert f"parent process {drill.torchrun.pid}" in failure["cause"]


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        ("compute", 1),
        ("compute", 0),
        pytest.param("transfer", 1, marks=pytest.mark.slow),
        pytest.param("transfer", 0, marks=pytest.mark.slow),
    ],
)
def test_stopped_rank_is_named_at_the_limit_of_the_call(
    drill: Drill, where: str, victim: int
) -> None:
    drill.start(where, "wait", victim, 4.0)
    drill.signal_rank(victim, signal.SIGSTOP)
    drill.wait_until_out()

    for name in ["failure-rank1.json", "failure-rank2.json"] if victim == 0 else ["failure.json"]:
        failure = drill.failure(name)
        assert (failure["rank"], failure["kind"]) == (victim, "stopped"), failure


@pytest.mark.slow
def test_sigterm_to_torchrun_without_a_failure_ends_every_rank(drill: Drill) -> None:
    drill.start("compute", "wait", 1, 10.0)
    drill.torchrun.terminate()
    drill.wait_until_out()

    assert "asked to end by SIGTERM" in drill.log()
