"""RUN_DIR/servers: what ranks report about generation servers, and what is skipped."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdflow.tracking import servers
from spmdflow.tracking.servers import (
    MAX_FILE_BYTES,
    MAX_SERVERS_OF_A_RANK,
    MAX_TEXT,
    ServerRecord,
    read_servers,
    remove_servers,
    write_servers,
)

READY = ServerRecord("http://10.0.0.7:8000", "ready", 12, 1, 5, 91000, 17, "")
DEAD = ServerRecord("http://10.0.0.8:8000", "dead", reason="connection refused")
PLAIN: dict[str, Any] = {
    "url": "http://a:1",
    "state": "slow",
    "weights_version": 3,
    "restarts": 0,
    "running_rows": 2,
    "tokens": 40,
    "recomputed_tokens": 4,
    "reason": "answers after 9 s",
}
RECORD = ServerRecord("http://a:1", "slow", 3, 0, 2, 40, 4, "answers after 9 s", 1, 5.0)


def write_report(run_dir: Path, text: str, *, rank: int = 1) -> Path:
    path = run_dir / "servers" / f"rank-{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def report_of(server: object, **changes: Any) -> str:
    return json.dumps({"rank": 1, "time": 5.0, "servers": [server]} | changes)


def test_servers_are_read_as_they_were_written_by_rank_and_in_their_order(tmp_path: Path) -> None:
    before = time.time()

    write_servers(tmp_path, 10, [READY])
    write_servers(tmp_path, 2, [DEAD, READY])

    found = read_servers(tmp_path)
    assert [each.rank for each in found] == [2, 2, 10]
    assert [replace(each, rank=0, time=0.0) for each in found] == [DEAD, READY, READY]
    assert all(before <= each.time <= time.time() for each in found)


def test_report_has_the_documented_form(tmp_path: Path) -> None:
    write_servers(tmp_path, 3, [READY])

    report = json.loads((tmp_path / "servers" / "rank-3.json").read_text())
    assert report == {
        "rank": 3,
        "time": report["time"],
        "servers": [
            {
                "url": "http://10.0.0.7:8000",
                "state": "ready",
                "weights_version": 12,
                "restarts": 1,
                "running_rows": 5,
                "tokens": 91000,
                "recomputed_tokens": 17,
                "reason": "",
            }
        ],
    }
    assert [path.name for path in (tmp_path / "servers").iterdir()] == ["rank-3.json"]


def test_a_later_report_replaces_that_of_the_same_rank(tmp_path: Path) -> None:
    write_servers(tmp_path, 0, [READY, DEAD])

    write_servers(tmp_path, 0, [DEAD])

    assert [each.url for each in read_servers(tmp_path)] == [DEAD.url]


def test_run_without_servers_has_none(tmp_path: Path) -> None:
    assert read_servers(tmp_path) == []
    assert read_servers(tmp_path / "gone") == []


def test_whole_report_is_read(tmp_path: Path) -> None:
    write_report(tmp_path, report_of(PLAIN | {"a field of a later version": 1}))

    assert read_servers(tmp_path) == [RECORD]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "null",
        report_of(PLAIN)[:-1],
        report_of(PLAIN, rank=2),
        report_of(PLAIN, time="now"),
        report_of(PLAIN, time=True),
        report_of(PLAIN).replace("5.0", "NaN"),
        report_of(PLAIN).replace("5.0", "1" + "0" * 400),
        report_of(PLAIN, servers=PLAIN),
        report_of("http://a:1"),
        report_of(PLAIN | {"state": "fine"}),
        report_of(PLAIN | {"state": ["ready"]}),
        report_of(PLAIN | {"url": None}),
        report_of(PLAIN | {"url": "x" * (MAX_TEXT + 1)}),
        report_of(PLAIN | {"url": "half a surrogate \ud800"}),
        report_of(PLAIN | {"tokens": -1}),
        report_of(PLAIN | {"tokens": 1.5}),
        report_of(PLAIN | {"tokens": True}),
        report_of(PLAIN | {"tokens": 1 << 63}),
        report_of({name: value for name, value in PLAIN.items() if name != "restarts"}),
        report_of(PLAIN, servers=[PLAIN] * (MAX_SERVERS_OF_A_RANK + 1)),
        report_of(PLAIN) + " " * MAX_FILE_BYTES,
    ],
)
def test_damaged_report_is_skipped_and_the_others_are_read(tmp_path: Path, text: str) -> None:
    write_report(tmp_path, text)
    write_servers(tmp_path, 4, [READY])

    assert [each.rank for each in read_servers(tmp_path)] == [4]


def test_files_of_other_names_and_kinds_are_skipped(tmp_path: Path) -> None:
    whole = report_of(PLAIN)
    for name in ("rank-1.new", "rank-01.json", "rank-x.json", "rank-1.json.tmp"):
        write_report(tmp_path, whole).rename(tmp_path / "servers" / name)
    os.mkfifo(tmp_path / "servers" / "rank-1.json")  # opening it would wait for a writer
    (tmp_path / "servers" / "rank-2.json").mkdir()
    (tmp_path / "servers" / "rank-3.json").write_bytes(b"\xff\xfe")

    assert read_servers(tmp_path) == []


def test_long_texts_are_cut_so_that_readers_take_them(tmp_path: Path) -> None:
    write_servers(tmp_path, 0, [replace(DEAD, reason="x" * 10_000, url="a\udfff")])

    (found,) = read_servers(tmp_path)
    assert (found.reason, found.url) == ("x" * MAX_TEXT, "a?")


def test_largest_report_that_is_written_is_read(tmp_path: Path) -> None:
    widest = "\U0001f600" * MAX_TEXT  # 12 bytes each, as JSON escapes it
    record = ServerRecord(widest, "refused", *[1 << 62] * 5, reason=widest)

    write_servers(tmp_path, 0, [record] * (MAX_SERVERS_OF_A_RANK + 5))

    assert len(read_servers(tmp_path)) == MAX_SERVERS_OF_A_RANK


def test_ranks_after_the_limit_of_all_reports_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        write_servers(tmp_path, rank, [READY])
    size = (tmp_path / "servers" / "rank-0.json").stat().st_size

    monkeypatch.setattr(servers, "MAX_BYTES", 2 * size + 8)

    assert [each.rank for each in read_servers(tmp_path)] == [0, 1]


def test_report_into_a_folder_that_is_gone_is_dropped_and_makes_nothing(tmp_path: Path) -> None:
    gone = tmp_path / "run"

    write_servers(gone, 0, [READY])

    assert not gone.exists()


def test_reports_of_an_earlier_start_are_removed(tmp_path: Path) -> None:
    write_servers(tmp_path, 0, [READY])

    remove_servers(tmp_path)
    remove_servers(tmp_path)

    assert read_servers(tmp_path) == []
    assert list((tmp_path / "servers").iterdir()) == []


def test_text_for_a_terminal_has_no_control_characters(tmp_path: Path) -> None:
    shown = replace(DEAD, reason="\x1b[2J" + "y" * 500).row()

    assert shown[:6] == [DEAD.url, "dead", "0", "0", "0", "0"]
    assert "\x1b" not in shown[6] and len(shown[6]) == 120
