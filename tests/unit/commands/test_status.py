"""What `spmdflow status` prints of a live run, of one that stands and of one that is over."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from spmdflow import status
from spmdflow.runtime.place import CODE, PEERS
from spmdflow.runtime.status_file import STATUS_FILE, StatusFile
from tests.unit.runtime.stalled import HERE, Session


def _stalled(tmp_path: Path) -> dict[str, Any]:
    """The state of a session whose rank 0 waits for rank 1, as a file tells it."""
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    session.run(30, {0: PEERS, 1: CODE}, sent.ticket)
    state: dict[str, Any] = json.loads(json.dumps(session.stalls.state(session.now)))
    return state


def test_live_run_is_told_with_its_step_calls_ranks_and_lines(tmp_path: Path) -> None:
    record = {"step": 7, "time/step_seconds": 3.0, "perf/tokens_per_second": 250.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    state = _stalled(tmp_path)
    lines = list(status.status_text(tmp_path, state, state["written"] + 2.0))

    assert lines[0].startswith(f"{tmp_path}: step 7 done ")
    assert lines[0].endswith("(3 s, 250 tokens/s)")
    assert lines[1] == "2 ranks; rank 0, the controller, wrote this 2 s ago"
    assert lines[2] == "actor.update (call 4, compute lane) runs for 30 s (median 0.1 s)"
    assert f"  rank 0 in a collective: {HERE}" in lines
    assert f"  rank 1 running: {HERE}" in lines
    assert f"  it waits for rank 1: it is at {HERE}; rank 0 in a collective, waiting" in lines


def test_controller_that_does_not_write_any_more_is_said_to_stand(tmp_path: Path) -> None:
    state = _stalled(tmp_path)
    state["ranks"]["0"][1] += 1  # another process has its pid now
    lines = list(status.status_text(tmp_path, state, state["written"] + 90.0))

    assert "wrote this 90 s ago: IT STANDS" in lines[1]
    assert lines[2] == f"rank 0: process {os.getpid()} has ended"


def test_run_that_is_over_is_told_with_its_failure_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"rank": 1, "role": "a", "method": "b", "call": 3, "cause": "why", "where": HERE}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    (tmp_path / "stacks-rank1.txt").write_text("stacks")

    assert status.main([str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "no run is alive" in said and "no step is done" in said
    assert f"failure.json: rank 1, a.b (call 3): why; its Python was at {HERE}" in said
    assert "stacks: stacks-rank1.txt" in said


def test_status_file_holds_the_newest_state_and_asks_for_stacks_once(tmp_path: Path) -> None:
    asked: list[float] = []
    file = StatusFile(tmp_path, lambda: asked.append(time.monotonic()))
    (tmp_path / "stacks-wanted").touch()
    file.put({"step": 1})
    until = time.monotonic() + 10.0
    while not asked and time.monotonic() < until:
        time.sleep(0.01)

    assert json.loads((tmp_path / STATUS_FILE).read_text()) == {"step": 1}
    file.put({"step": 2})
    file.close()
    assert len(asked) == 1 and list(tmp_path.iterdir()) == []
