"""trace.json is valid JSON at every moment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.errors import SpmdflowError
from spmdflow.tracking.trace import Span, TraceWriter


def labels(path: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return [event["name"] for event in events if event["ph"] == "X"]


def test_spans_become_complete_events_in_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    TraceWriter(path).write([Span(3, "compute", "actor.update", 2.0, 2.5)])

    *names, span = json.loads(path.read_text())
    assert span == {"name": "actor.update", "ph": "X", "ts": 2_000_000, "dur": 500_000} | {
        "pid": 3,
        "tid": 0,
    }
    assert [event["args"]["name"] for event in names] == ["rank 3", "compute"]


def test_lanes_of_a_rank_are_its_threads(tmp_path):
    path = tmp_path / "trace.json"
    spans = [Span(0, "compute", "a", 0, 1), Span(0, "transfer", "b", 0, 1)]
    TraceWriter(path).write([*spans, Span(1, "transfer", "c", 0, 1), *spans])

    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    places = [(event["pid"], event["tid"]) for event in events]
    assert places == [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1)]


def test_the_file_is_valid_from_the_start_and_after_every_write(tmp_path):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    assert json.loads(path.read_text()) == []
    for number in range(5):
        writer.write([Span(0, "compute", str(number), number, number + 1)] * 2)
        assert labels(path)[-1] == str(number)
        assert all(json.loads(line.rstrip(",")) for line in path.read_text().split("\n")[1:-2])


def test_a_resumed_run_continues_the_file(tmp_path):
    path = tmp_path / "trace.json"
    for name in ("a", "b", "c"):
        writer = TraceWriter(path)
        writer.write([Span(0, "compute", name, 0, 1)])
        writer.close()

    assert labels(path) == ["a", "b", "c"]


@settings(deadline=None)
@given(st.data())
def test_a_file_torn_at_any_byte_is_mended_to_its_whole_events(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "trace.json"
    TraceWriter(path).write([Span(0, "compute", name, 0, 1) for name in "abc"])
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])

    TraceWriter(path).write([Span(0, "compute", "z", 1, 2)])
    *before, last = labels(path)
    assert last == "z"
    assert "abc".startswith("".join(before))


def test_the_file_is_bounded_and_stays_valid(tmp_path, caplog):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, max_bytes=2000)
    for number in range(100):
        writer.write([Span(0, "compute", str(number), number, number + 1)])

    assert 1800 < path.stat().st_size <= 2000
    assert labels(path)[:2] == ["0", "1"]
    assert caplog.text.count("later spans are dropped") == 1


def test_a_full_disk_leaves_the_file_valid_and_is_named(tmp_path):
    path = tmp_path / "trace.json"
    TraceWriter(path).write([Span(0, "compute", "a", 0, 1)])
    size = path.stat().st_size

    child = os.fork()  # a limit on file size cannot be lifted again in this process
    if child == 0:
        os._exit(write_beyond_limit(path, size + 100))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert labels(path) == ["a"]


def write_beyond_limit(path: Path, limit: int) -> int:
    """7 if the write was refused with an error that names the file."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(SpmdflowError, match=r"trace\.json: File too large"):
        TraceWriter(path).write([Span(0, "compute", "b", 0, 1)] * 50)
    return 7


def test_nothing_written_changes_nothing(tmp_path):
    path = tmp_path / "trace.json"
    TraceWriter(path).write([])

    assert path.read_text() == "[\n]\n"
