"""torchrun killed while its ranks start, and the same command started again on the same port."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.algos.runs import (
    finish,
    kill_ranks,
    log_of,
    ranks_of,
    steps_of,
    torchrun,
    wait_until,
)

GONE_SECONDS = 60.0


def workers_of(run_dir: Path, launcher: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in ranks_of(run_dir) if pid != launcher.pid]


def free_port() -> int:
    """One that the system gives to nobody who asks for any port."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert first_given > 2048, first_given
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port := random.randrange(first_given // 2, first_given)))
            return port


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    yield folder
    kill_ranks(folder)


POINTS = {
    "as soon as there are ranks": ("", 0.0),
    "while they import": ("", 0.7),
    "once they have printed their sizes": ("batch  ", 0.0),
    "a second later": ("batch  ", 1.0),
    "two seconds later": ("batch  ", 2.0),
}
"""What the log holds by then, and seconds after that."""


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(name, marks=pytest.mark.drill if name.startswith("once") else pytest.mark.slow)
        for name in POINTS
    ],
)
def test_ranks_of_a_torchrun_killed_at_the_start_end_and_leave_its_port_to_the_next(
    point: str, run_dir: Path
) -> None:
    text, seconds = POINTS[point]
    port = ("--nnodes=1", f"--master-port={free_port()}")
    first = torchrun(run_dir, "total_steps=100000", num_ranks=2, rendezvous=port)
    wait_until(
        lambda: len(workers_of(run_dir, first)) == 2 and text in log_of(run_dir).read_text(),
        run_dir,
    )
    time.sleep(seconds)
    first.kill()
    first.wait()
    killed = time.monotonic()
    wait_until(lambda: not ranks_of(run_dir), run_dir, seconds=GONE_SECONDS)
    print(f"{point}: gone after {time.monotonic() - killed:.2f} s")

    again = torchrun(run_dir, "total_steps=1", num_ranks=2, rendezvous=port)

    assert finish(again) == 0, log_of(run_dir).read_text()[-3000:]
    assert [step["step"] for step in steps_of(run_dir)][-1] == 1
