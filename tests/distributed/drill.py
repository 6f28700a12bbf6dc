"""A torchrun whose ranks are harmed: starts it, harms it, and looks for what is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "session_drill.py"
OUT_SECONDS = 50.0
"""Less than a rank's last resort (60 s) and than until anything would end by itself."""
KILLED_BY_TORCHRUN = "forcefully exiting"
"""What torchrun writes where a rank has not ended 30 s after SIGTERM."""
START_SECONDS = 240.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Drill:
    """Runs programs/session_drill.py; its processes carry a mark in their environment."""

    def __init__(self, run_dir: Path, agents: Sequence[Sequence[str]], world_size: int) -> None:
        """agents: command lines of torchrun up to the program, one per machine."""
        self.run_dir = run_dir
        self._agents = agents
        self._world_size = world_size
        self._mark = f"SPMDFLOW_DRILL={uuid.uuid4().hex}"
        self._log = run_dir / "log.txt"
        self.torchruns: list[subprocess.Popen[bytes]] = []

    def start(self, where: str, how: str, victim: int, seconds: float) -> None:
        """Start and wait until every rank is where it should be (see the program)."""
        name, value = self._mark.split("=")
        environment = os.environ | {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = [str(PROGRAM), str(self.run_dir), where, how, str(victim), str(seconds)]
        for agent in self._agents:
            with self._log.open("ab") as log:
                self.torchruns.append(
                    subprocess.Popen(
                        [*agent, *program],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                    )
                )
        self._wait(self._all_are_running, START_SECONDS, "ranks to be where they should")

    def _all_are_running(self) -> bool:
        files = [self.run_dir / f"running-{rank}" for rank in range(self._world_size)]
        assert any(run.poll() is None for run in self.torchruns) or files[0].exists(), self.log()
        return all(file.exists() for file in files)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Harm a rank from outside."""
        mark = f"RANK={rank}".encode()
        (pid,) = [pid for pid in self.alive() if mark in _environment(pid)]
        os.kill(pid, number)

    def let_go(self) -> None:
        """Let the victim harm itself, which waits for this once every rank is where it should."""
        (self.run_dir / "go").touch()

    @contextlib.contextmanager
    def stopped_torchrun(self, until: Sequence[str]) -> Iterator[None]:
        """Stop torchrun, and let it go on when these failure files are there.

        How a process ended is known until its parent asks, and torchrun asks ten times a second. On
        a busy machine it would sometimes ask before the ranks have looked.
        """
        for torchrun in self.torchruns:
            torchrun.send_signal(signal.SIGSTOP)
        yield
        files = [self.run_dir / name for name in until]
        self.wait_until(lambda: all(file.exists() for file in files))
        for torchrun in self.torchruns:
            torchrun.send_signal(signal.SIGCONT)

    def alive_ranks(self) -> list[int]:
        """Those whose process is alive."""
        marks = {rank: f"RANK={rank}".encode() for rank in range(self._world_size)}
        found = [_environment(pid) for pid in self.alive()]
        return [rank for rank, mark in marks.items() if any(mark in words for words in found)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """As long as the end of a run may take."""
        self._wait(condition, OUT_SECONDS, "what the test waits for")

    def wait_until_out(self) -> None:
        """Every process of this run ends in time, of itself, and torchrun says that it failed."""
        self._wait(lambda: not self.alive(), OUT_SECONDS, "all processes to end")
        assert all(torchrun.wait(60) != 0 for torchrun in self.torchruns)
        assert KILLED_BY_TORCHRUN not in self.log(), self.log()

    def alive(self) -> list[int]:
        """Processes with our mark, zombies excepted (they have no environment)."""
        for torchrun in self.torchruns:
            torchrun.poll()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if self._mark.encode() in _environment(pid)]

    def failure(self, name: str = "failure.json") -> dict[str, Any]:
        """Content of a failure file of the run."""
        path = self.run_dir / name
        assert path.exists(), self.log()
        return json.loads(path.read_text())

    def log(self) -> str:
        """What all processes wrote."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        for torchrun in self.torchruns:
            torchrun.wait()

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.log()}"
            time.sleep(0.05)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
