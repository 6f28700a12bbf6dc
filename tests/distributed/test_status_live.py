"""`spmdflow status` beside a live run, also while rank 0 is stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from spmdflow import status
from tests.algos.runs import finish, ranks_of, torchrun, wait_for_step

pytestmark = pytest.mark.slow


def test_live_run_shows_its_stacks_and_a_stopped_controller_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run = torchrun(run_dir, "total_steps=100000", "eval_every=0", num_ranks=2)
    try:
        wait_for_step(run_dir, 2, seconds=90)
        time.sleep(6.0)  # a heartbeat
        assert status.main([str(run_dir), "--stacks"]) == 0
        said = capsys.readouterr().out
        assert "2 ranks; rank 0 (controller) wrote this" in said and "IT IS STUCK" not in said
        assert "actor.generate_sequences (train)" in said
        for rank in (0, 1):
            assert "in _run_lanes" in (run_dir / f"stacks-rank{rank}.txt").read_text()

        mark = b"RANK=0"
        (first,) = [
            pid
            for pid in ranks_of(run_dir)
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ]
        os.kill(first, signal.SIGSTOP)
        time.sleep(25.0)
        assert status.main([str(run_dir)]) == 0
        said = capsys.readouterr().out
        assert "IT IS STUCK" in said
        assert f"rank 0: process {first} is stopped (state T)" in said
        os.kill(first, signal.SIGCONT)
        os.kill(run.pid, signal.SIGTERM)
    finally:
        finish(run, seconds=60)
