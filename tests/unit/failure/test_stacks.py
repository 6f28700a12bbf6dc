"""The line that a file of stacks tells."""

from __future__ import annotations

import os
from pathlib import Path

from spmdflow.failure.process import Process
from spmdflow.failure.stacks import dump_stacks, line_in_stacks, stacks_on_signal

PACKAGE = Path(__file__).parents[3] / "spmdflow" / "runtime"
LANE = (
    f'  File "{PACKAGE}/executor.py", line 3 in run\n  File "{PACKAGE}/s.py", line 9 in _run_lanes'
)
SCRIPT = f'  File "/own/s.py", line 7 in main\n  File "{PACKAGE}/session.py", line 9 in _run_script'
BUSY = (
    f'  File "/lib/site-packages/x.py", line 1 in get\n  File "/own/w.py", line 5 in check\n{LANE}'
)


def test_own_line_of_the_compute_lane_is_told_and_of_the_last_stacks(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text(f"Thread 1 (most recent call first):\n{BUSY}\n\nThread 2:\n{SCRIPT}\n")
    assert line_in_stacks(path) == "/own/w.py:5 in check"

    path.write_text(f"{BUSY}\n\n{BUSY.replace('5', '6')}\n")
    assert line_in_stacks(path) == "/own/w.py:6 in check"


def test_line_of_the_script_is_told_where_the_lane_has_nothing_to_do(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text(f"Thread 1:\n{LANE}\n\nThread 2:\n{SCRIPT}\n")

    assert line_in_stacks(path) == "/own/s.py:7 in main"
    assert line_in_stacks(tmp_path / "missing") == ""


def test_signal_and_call_append_stacks_and_an_unused_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    unused = tmp_path / "unused"
    with stacks_on_signal(unused):
        assert unused.exists()
    with stacks_on_signal(path):
        assert Process.of(os.getpid()).show_stacks()
    dump_stacks(path, "rank 3: why")

    assert not unused.exists()
    by_signal, by_call = path.read_text().split("rank 3: why")
    here = "in test_signal_and_call_append_stacks_and_an_unused_file_is_removed"
    assert here in by_signal and here in by_call


def test_stacks_are_not_written_into_a_folder_of_another_run_or_one_that_is_gone(
    tmp_path: Path,
) -> None:
    dump_stacks(tmp_path / "stacks", "rank 3: why", lambda: False)
    dump_stacks(tmp_path / "gone" / "stacks", "rank 3: why")

    assert list(tmp_path.iterdir()) == []
