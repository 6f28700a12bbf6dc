"""RUN_DIR/calls.jsonl: what a run keeps of earlier launches, and that it stops at its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.runtime.call import Call, CallRecord, RequiredRows
from spmdflow.tracking.call_log import CallLog
from spmdflow.tracking.tracker import read_lines


def record(step: int = 3) -> CallRecord:
    commands = {rank: {"operation": "call"} for rank in (0, 1)}
    required = RequiredRows(4, ("prompts",), {})
    call = Call(
        7,
        "compute",
        "actor.generate_sequences",
        commands,
        step=step,
        line="own.py:5: x",
        required_rows=(required,),
        writes=("responses",),
    )
    spans = {0: {"span": (10.0, 12.0)}, 1: {"span": (10.5, 13.5), "received": {0: 40}}}
    return CallRecord(call, spans)


def test_line_says_what_was_called_where_and_when_and_how_long_the_slowest_rank_took() -> None:
    line = record().to_line()

    assert line["label"] == "actor.generate_sequences" and line["ranks"] == [(0, 1)]
    assert line["reads"] == [[4, ["prompts"]]] and line["writes"] == ["responses"]
    assert (line["start"], line["end"], line["longest_seconds"]) == (10.0, 13.5, 3.0)
    assert line["received_bytes"] == 40 and line["line"] == "own.py:5: x"


def test_run_that_continues_keeps_the_lines_up_to_its_checkpoint(tmp_path: Path) -> None:
    CallLog(tmp_path).write([record(step).to_line() for step in (1, 2, 3)])
    log = CallLog(tmp_path, last_step=2)
    log.write([record(3).to_line()])

    assert [line["step"] for line in read_lines(log.path)] == [1, 2, 3]


def test_new_run_keeps_the_file_of_an_old_one_under_another_name(tmp_path: Path) -> None:
    CallLog(tmp_path).write([record().to_line()])
    CallLog(tmp_path).write([record().to_line()])

    assert len(read_lines(tmp_path / "calls.jsonl")) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_full_file_drops_later_calls_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = CallLog(tmp_path, max_bytes=100)
    for _ in range(4):
        log.write([record().to_line()])

    assert len(read_lines(log.path)) == 1
    assert [
        entry.getMessage().endswith("later calls are not listed") for entry in caplog.records
    ] == [True]
