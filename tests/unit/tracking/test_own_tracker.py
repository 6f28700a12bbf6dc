"""Trackers of scripts and of installed packages; what happens to one that fails."""

from __future__ import annotations

import json
import math

import pytest

from spmdflow.errors import ConfigError
from spmdflow.kind.registry import TRACKERS, register_tracker
from spmdflow.tracking.progress import Sample
from spmdflow.tracking.tracker import Sink, Tracker, read_lines


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Trackers that a test adds are gone after it."""
    before = dict(TRACKERS)
    monkeypatch.setattr(TRACKERS, "modules", dict(TRACKERS.modules))
    yield
    TRACKERS.clear()
    TRACKERS.update(before)


def test_a_start_from_the_first_step_is_a_new_run_and_a_resumed_one_is_not(tmp_path):
    @register_tracker("ids")
    class Ids(Sink):
        def write(self, step, metrics):
            pass

    ids = []
    for last_step in (-1, 3, 7, -1, 2):
        Tracker(tmp_path, ["ids"], last_step=last_step)
        ids.append(run_id(tmp_path))
    Tracker(tmp_path)

    assert ids[0] == ids[1] == ids[2] != ids[3] == ids[4]
    assert not (tmp_path / "tracker_id").exists(), "a later start with trackers is another run"


def test_a_tracker_of_a_script_gets_what_it_asks_for_and_its_end(tmp_path):
    said = []

    @register_tracker("list")
    class ListSink(Sink):
        def __init__(self, run_dir, last_step):
            said.append((run_dir, last_step))

        def write(self, step, metrics):
            said.append((step, dict(metrics)))

        def close(self):
            said.append("closed")

    tracker = Tracker(tmp_path, ["list"], last_step=2)
    tracker.describe({"actor.optimizer.lr": 1e-6})
    tracker.write_samples(3, [Sample("1+1=", "2", 1.0)])
    tracker.write_metrics(3, {"a": 1, "b": math.inf})
    tracker.close()
    tracker.close()

    assert said == [(tmp_path, 2), (3, {"a": 1.0}), "closed"]


def test_a_tracker_that_fails_is_left_out_with_one_warning_and_the_others_go_on(tmp_path, caplog):
    written = []

    @register_tracker("failing")
    class Failing(Sink):
        def write(self, step, metrics):
            if step == 2:
                raise ConnectionError("no route to host")

        def close(self):
            written.append("closed")

    @register_tracker("other")
    class Other(Sink):
        def write(self, step, metrics):
            written.append(step)

    tracker = Tracker(tmp_path, ["failing", "other"])
    for step in (1, 2, 3, 4):
        tracker.write_metrics(step, {"a": step})
    tracker.close()

    (warning,) = caplog.messages
    assert warning == (
        "warning: run.trackers: failing failed (ConnectionError: no route to host); "
        f"it is disabled until the next start, see {tmp_path / 'metrics.jsonl'} for all steps"
    )
    assert written == [1, 2, 3, 4]
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_tracker_that_cannot_start_is_refused_with_what_to_do(tmp_path):
    @register_tracker("closed")
    class Closed(Sink):
        advice = "log in with `closed login`"

        def __init__(self, run_dir, last_step):
            raise OSError("401 Unauthorized")

        def write(self, step, metrics):
            pass

    @register_tracker("other")
    class NoSink:
        pass

    with pytest.raises(ConfigError) as at_start:
        Tracker(tmp_path, ["closed"])
    with pytest.raises(ConfigError, match="got .*NoSink.*, expected a subclass of spmdflow.Sink;"):
        Tracker(tmp_path, ["other"])

    assert str(at_start.value) == (
        "run.trackers: got closed, which does not start (OSError: 401 Unauthorized), expected one "
        "that can be imported, reached and logged in to; log in with `closed login` or remove "
        "closed from run.trackers"
    )


def test_an_installed_package_brings_a_tracker_by_its_entry_point(tmp_path, monkeypatch):
    site = tmp_path / "site"
    run_dir = tmp_path / "run"
    facts = site / "board-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: board\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[spmdflow.trackers]\nboard = board:Board\n")
    (site / "board.py").write_text(
        "import json\n"
        "from spmdflow import Sink\n"
        "class Board(Sink):\n"
        "    def write(self, step, metrics):\n"
        "        (self.run_dir / 'board').write_text(json.dumps([step, metrics, self.run_id]))\n"
    )
    monkeypatch.syspath_prepend(str(site))

    tracker = Tracker(run_dir, ["board"])
    tracker.write_metrics(1, {"a": 0.5})

    assert json.loads((run_dir / "board").read_text()) == [1, {"a": 0.5}, run_id(run_dir)]
    with pytest.raises(ConfigError) as unknown:
        Tracker(run_dir, ["boards"])
    assert str(unknown.value) == (
        "run.trackers: got 'boards', expected one of board, mlflow, swanlab, tensorboard, trackio, "
        "wandb; choose one or add yours with @register_tracker('boards')"
    )


def run_id(run_dir):
    return (run_dir / "tracker_id").read_text()
