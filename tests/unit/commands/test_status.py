"""What `spmdflow status` prints of a live run, of one that stands and of one that is over."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spmdflow import status
from spmdflow.checkpoint.lock import STATUS_FILE, claim_run_dir
from spmdflow.failure.lane_state import CODE, PEERS
from spmdflow.failure.status_file import StatusFile
from spmdflow.live import panel
from spmdflow.tracking.reading import RunFiles, RunState
from spmdflow.tracking.servers import ServerRecord, write_servers
from tests.unit.failure.stalled import HERE, Session
from tests.unit.lock_holder import forked_holder


def _stalled(tmp_path: Path) -> dict[str, Any]:
    """The state of a session whose rank 0 waits for rank 1, as a file tells it."""
    session = Session(tmp_path)
    session.measure(0.1)
    sent = session.send()
    session.run(30, {0: PEERS, 1: CODE}, sent.ticket)
    state: dict[str, Any] = json.loads(json.dumps(session.stalls.status(session.now)))
    return state


def test_live_run_is_told_with_its_step_calls_ranks_and_lines(tmp_path: Path) -> None:
    record = {"step": 7, "time/step_seconds": 3.0, "perf/tokens_per_second": 250.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    state = _stalled(tmp_path)
    lines = list(status.status_text(tmp_path, RunState.LIVE, state, state["written"] + 2.0))

    assert lines[0].startswith(f"{tmp_path}: step 7 finished ")
    assert lines[0].endswith("(3 s, 250 tokens/s)")
    assert lines[1] == "2 ranks; rank 0 (controller) wrote this 2 s ago"
    assert (
        lines[2] == "actor.update (call 4, compute lane) has been running for 30 s (median 0.1 s)"
    )
    assert f"  rank 0 in a collective: {HERE}" in lines
    assert f"  rank 1 running: {HERE}" in lines
    assert f"  the call waits for rank 1: it is at {HERE}; rank 0 in a collective, waiting" in lines


def test_panel_has_the_steps_the_call_that_runs_and_those_that_are_done(tmp_path: Path) -> None:
    state = _stalled(tmp_path)
    took = {"time/step_seconds": 60.0}
    lines = [json.dumps({"step": step} | took) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text("total_steps: 7\n")
    at = state["written"]
    os.utime(tmp_path / "metrics.jsonl", (at - 40.0, at - 40.0))
    state["kinds"] += [
        ["critic.update", "train", 5.0, at - 1.0],
        ["actor.spawn", "train", 9.0, 0.0],
    ]
    console = Console(width=120, record=True, file=io.StringIO())

    console.print(panel(RunFiles(tmp_path), state, at + 2.0))

    text = console.export_text()
    assert "step 2 of 7" in text and "5 min left" in text
    assert re.search(r"actor\.update +\S+ +32\.0 s of about 0\.1 +2 ranks at work", text)
    assert re.search(r"critic\.update +\S+ +5 s", text)
    assert "spawn" not in text  # of long ago


def _report_servers(run_dir: Path, *more: ServerRecord) -> None:
    ready = ServerRecord("http://a:1", "ready", 12, 1, 5, 91000, 17)
    dead = ServerRecord("http://b:1", "dead", 11, reason="no answer\x1b[2J")
    write_servers(run_dir, 2, [ready, dead, *more])


def test_servers_of_a_live_run_are_lines_with_their_state_and_reason(tmp_path: Path) -> None:
    _report_servers(tmp_path)
    state = _stalled(tmp_path)

    lines = list(status.status_text(tmp_path, RunState.LIVE, state, time.time()))

    shown = [line for line in lines if line.startswith("server")]
    assert shown == [
        "server http://a:1: ready, weights version 12, 5 rows running, 1 restarts, "
        "17 tokens recomputed (rank 2, 0 s ago)",
        "server http://b:1: dead, weights version 11, 0 rows running, 0 restarts, "
        "0 tokens recomputed (rank 2, 0 s ago); no answer\\x1b[2J",
    ]


def test_servers_of_a_run_that_is_over_are_no_lines(tmp_path: Path) -> None:
    _report_servers(tmp_path)

    lines = list(status.status_text(tmp_path, RunState.FINISHED, {}, time.time()))

    assert not any(line.startswith("server") for line in lines)


def test_many_servers_are_counted_after_the_first_64(tmp_path: Path) -> None:
    _report_servers(tmp_path, *(ServerRecord(f"http://c:{i}", "slow") for i in range(70)))
    state = _stalled(tmp_path)

    lines = list(status.status_text(tmp_path, RunState.LIVE, state, time.time()))

    assert sum(line.startswith("server ") for line in lines) == 64
    assert "8 more servers" in lines


def test_panel_has_a_table_of_servers_those_first_that_are_not_ready(tmp_path: Path) -> None:
    _report_servers(tmp_path)
    state = _stalled(tmp_path)
    console = Console(width=120, record=True, file=io.StringIO())

    console.print(panel(RunFiles(tmp_path), state, state["written"] + 2.0))

    lines = [line.rstrip() for line in console.export_text().splitlines()]
    (head,) = (number for number, line in enumerate(lines) if line.startswith("server"))
    title = r"server +state +weights version +rows running +restarts +recomputed tokens +reason"
    assert re.fullmatch(title, lines[head])
    assert re.fullmatch(r"http://b:1 +dead +11 +0 +0 +0 +no answer\\x1b\[2J", lines[head + 1])
    assert re.fullmatch(r"http://a:1 +ready +12 +5 +1 +17", lines[head + 2])


def test_panel_of_a_run_without_servers_has_no_table_of_them(tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=io.StringIO())

    console.print(panel(RunFiles(tmp_path), _stalled(tmp_path), time.time()))

    assert "weights version" not in console.export_text()


def test_live_panel_in_a_log_is_the_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(tmp_path), "--live"]) == 2  # at once
    assert "no run is live" in capsys.readouterr().out


def test_controller_that_does_not_write_any_more_is_said_to_stand(tmp_path: Path) -> None:
    state = _stalled(tmp_path)
    state["ranks"]["0"][1] += 1  # another process has its pid now
    lines = list(status.status_text(tmp_path, RunState.LIVE, state, state["written"] + 90.0))

    assert "wrote this 90 s ago: IT IS STUCK" in lines[1]
    assert lines[2] == f"rank 0: process {os.getpid()} has ended"


def test_run_that_failed_is_told_with_its_failure_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"rank": 1, "role": "a", "method": "b", "call": 3, "cause": "why", "where": HERE}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    (tmp_path / "stacks-rank1.txt").write_text("stacks")

    assert status.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "no run is live" in said and "no step has finished" in said
    assert f"failure.json: rank 1, a.b (call 3): why; its Python was at {HERE}" in said
    assert "stacks: stacks-rank1.txt" in said


def test_status_file_holds_the_newest_state_and_asks_for_stacks_once(tmp_path: Path) -> None:
    asked: list[float] = []
    file = StatusFile(tmp_path, lambda: asked.append(time.monotonic()))
    (tmp_path / "stacks-wanted").touch()
    file.put({"step": 1})
    until = time.monotonic() + 60.0
    while not asked and time.monotonic() < until:
        time.sleep(0.01)

    assert json.loads((tmp_path / STATUS_FILE).read_text()) == {"step": 1}
    file.put({"step": 2})
    while json.loads((tmp_path / STATUS_FILE).read_text()) == {"step": 1}:
        assert time.monotonic() < until
        time.sleep(0.01)
    file.close()
    file._thread.join(60)  # close() itself does not wait for a disk that hangs
    assert len(asked) == 1 and list(tmp_path.iterdir()) == []


class EndingRun(RunFiles):
    """Files of a run that ends, and removes its empty ones, once their names are known."""

    def _named(self, pattern: str) -> list[Path]:
        found = super()._named(pattern)
        for path in found:
            path.unlink()
        return found


def test_a_run_that_ends_while_its_files_are_listed_has_no_stacks(tmp_path: Path) -> None:
    (tmp_path / "stacks-rank0.txt").touch()

    assert EndingRun(tmp_path).stacks == {}


def _dead_state() -> str:
    return json.dumps({"written": time.time(), "ranks": {}, "controller": 0})


def test_status_tells_a_killed_run_from_a_live_one_though_its_files_are_fresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STATUS_FILE).write_text(_dead_state())
    with forked_holder(tmp_path):
        assert (status.main([str(tmp_path)]), RunFiles(tmp_path).is_live) == (0, True)

    assert (status.main([str(tmp_path)]), RunFiles(tmp_path).is_live) == (1, False)
    assert "no run is live: the last one was killed" in capsys.readouterr().out


def test_failure_of_another_start_does_not_make_a_live_run_look_dead(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text("{}")
    lock = claim_run_dir(tmp_path)

    assert status.main([str(tmp_path)]) == 0
    lock.release()
    assert status.main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("left", "code", "said"),
    [
        (["config.yaml", "finished"], 4, "the last one finished"),
        (["config.yaml"], 3, "stopped before its last step"),
        ([], 2, "none has been in this folder"),
        (["config.yaml", "finished", "failure.json"], 1, "failed"),
    ],
)
def test_exit_code_of_status_tells_how_the_last_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: list[str], code: int, said: str
) -> None:
    claim_run_dir(tmp_path).release()
    for name in left:
        (tmp_path / name).write_text("{}")

    assert status.main([str(tmp_path)]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("data", ["", "[" * 100_000, "null", '{"written": 1.0}', '{"written": []}'])
def test_status_of_a_live_run_with_a_damaged_status_file_is_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str
) -> None:
    (tmp_path / STATUS_FILE).write_text(data)
    lock = claim_run_dir(tmp_path)

    assert status.main([str(tmp_path)]) == 0
    assert "a run is live" in capsys.readouterr().out
    lock.release()
