"""What a planning that takes long tells on the terminal, in a log and in status.json."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from spmdflow import status
from spmdflow.checkpoint.lock import STATUS_FILE, claim_run_dir
from spmdflow.live import panel
from spmdflow.log import PLANNING
from spmdflow.plan import showing
from spmdflow.tracking.reading import RunFiles, RunState, read_json


class Terminal(io.StringIO):
    """Somebody looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(showing, "_EVERY_SECONDS", 0.01)


def planned(run_dir: Path, is_shown: Callable[[], bool]) -> bool:
    """Whether a planning was shown while it went on."""
    until = time.monotonic() + 300.0
    with showing.show_planning(run_dir):
        logging.getLogger(PLANNING).debug("%d of %d sets of models", 3, 7)
        while not is_shown() and time.monotonic() < until:
            time.sleep(0.01)
        return is_shown()


def test_status_and_panel_tell_what_is_planned_and_nothing_is_left(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    told = dict[str, object]()

    def is_shown() -> bool:
        told.update(read_json(run_dir / STATUS_FILE))
        return "3 of 7 sets of models" in str(told.get("planning"))

    assert planned(run_dir, is_shown)

    assert not run_dir.exists()
    lines = list(status.status_text(run_dir, RunState.LIVE, told, time.time()))
    assert lines[1].startswith("planning: 3 of 7 sets of models (")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(RunFiles(run_dir), told, time.time()))
    assert "planning: 3 of 7 sets of models" in console.export_text()


def test_status_of_a_live_run_in_the_folder_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = claim_run_dir(tmp_path)
    (tmp_path / STATUS_FILE).write_text('{"of": "another"}')
    text = []

    def is_shown() -> bool:
        text.append(capsys.readouterr().err)
        return "".join(text).startswith("planning: ")

    assert planned(tmp_path, is_shown)

    assert read_json(tmp_path / STATUS_FILE) == {"of": "another"}
    lock.release()
    assert "\r" not in "".join(text)  # plain lines in a log


def test_terminal_has_one_line_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())

    assert planned(tmp_path / "run", lambda: "3 of 7" in terminal.getvalue())

    text = terminal.getvalue()
    assert "\n" not in text and text.startswith("\r\033[Kplanning: ") and text.endswith("\r\033[K")
