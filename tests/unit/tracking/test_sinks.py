"""Every tracker of the package, written offline and read back by its own API.

A library that is not installed is skipped: the extras mlflow, swanlab, trackio and wandb.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time

import pytest

from spmdflow.errors import ConfigError
from spmdflow.tracking.progress import Sample
from spmdflow.tracking.sink import table_of
from spmdflow.tracking.tracker import Tracker

FACTS = {f"many.setting_{number}": number for number in range(120)} | {
    "actor.optimizer.lr": 1e-6,
    "run.trackers": ["one"],
    "data.eval_path": None,
    "versions.torch": "2.13",
    "git.dirty": True,
}
SAMPLES = [
    Sample("1+1=<b>|", "2\nor 3", 1.0, {"accuracy": 1.0, "why": "right"}, {"phase": "train"}),
    Sample("2+2=", "5", math.nan),
]
COLUMNS = ["phase", "prompt", "response", "score", "accuracy", "why"]
ROWS = [["train", "1+1=<b>|", "2\nor 3", 1.0, 1.0, "right"], [None, "2+2=", "5", None, None, None]]


def run_twice(run_dir, name, *, last_step=2):
    """Steps 1 and 2, then a start that continues after last_step, with another learning rate."""
    for last, steps, lr in ((-1, (1, 2), 1e-6), (last_step, (3,), 2e-6)):
        tracker = Tracker(run_dir, [name], last_step=last)
        tracker.describe(FACTS | {"actor.optimizer.lr": lr})
        for step in steps:
            tracker.write_samples(step, SAMPLES)
            tracker.write_metrics(step, {"reward/mean": step / 4, "odd name?": math.inf})
        assert [*tracker._sinks] == [name], "it took all that it was given"
        tracker.close()


def test_tensorboard_has_settings_samples_and_the_steps_of_a_resumed_run(tmp_path):
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module, reason="extra tensorboard is not installed")
    run_twice(tmp_path, "tensorboard", last_step=1)

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (3, 0.75),
    ]
    texts = {tag: events.Tensors(f"{tag}/text_summary") for tag in ("run", "samples")}
    first, resumed = (event.tensor_proto.string_val[0].decode() for event in texts["run"])
    assert "actor&#46;optimizer&#46;lr|1e-06" in first
    assert "actor&#46;optimizer&#46;lr|2e-06" in resumed
    assert [event.step for event in texts["samples"]] == [1, 2, 3], "it hides numbers only"
    table = texts["samples"][0].tensor_proto.string_val[0].decode()
    assert table.splitlines()[:2] == [
        "phase|prompt|response|score|accuracy|why",
        "---|" * 5 + "---",
    ]
    assert "<b>" not in table and "2&#92;nor 3|1&#46;0" in table


def test_wandb_continues_one_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_twice(tmp_path, "wandb")

    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert {path.stem for path in files} == {f"run-{run_id(tmp_path)}"}
    wait_until(lambda: all(any(r.HasField("exit") for r in wandb_records(p)) for p in files))
    seen = {}
    config = {}
    for path in files:
        for record in wandb_records(path):
            row = {"/".join(item.nested_key) or item.key: item for item in record.history.item}
            if "reward/mean" in row:
                seen[json.loads(row["step"].value_json)] = json.loads(row["reward/mean"].value_json)
            config |= {item.key: item.value_json for item in record.config.update}
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/*/files/media/table/*")]
    assert seen == {1: 0.25, 2: 0.5, 3: 0.75}
    assert json.loads(config["actor.optimizer.lr"]) == 2e-6 and config["git.dirty"] == "true"
    assert len(tables) >= 2 and all(table["columns"] == COLUMNS for table in tables)
    assert all(table["data"] == ROWS for table in tables)


def test_mlflow_continues_one_run_in_the_run_dir(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="extra mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_twice(tmp_path, "mlflow")

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("spmdflow")
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.info.status == "FINISHED" and run.info.run_name == tmp_path.name
    assert len(run.data.params) == len(FACTS) and run.data.params["git.dirty"] == "True"
    assert run.data.params["actor.optimizer.lr"] == "1e-06", "MLflow changes no parameter"
    folder = tmp_path / "mlflow" / run.info.run_id / "artifacts"
    assert json.loads((folder / "facts.json").read_text())["actor.optimizer.lr"] == 2e-6
    names = [item.path for item in client.list_artifacts(run.info.run_id, "samples")]
    assert names == [f"samples/step-{step}.json" for step in (1, 2, 3)]
    assert json.loads((folder / names[0]).read_text()) == {"columns": COLUMNS, "data": ROWS}


def test_mlflow_gets_all_metrics_of_a_step_that_has_more_than_a_request_may(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="extra mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker(tmp_path, ["mlflow"])

    tracker.write_metrics(1, {f"metric_{number}": number for number in range(1001)})
    tracker.close()

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("spmdflow")
    (run,) = client.search_runs([experiment.experiment_id])
    assert len(run.data.metrics) == 1001


def test_trackio_continues_one_run_in_its_local_database(tmp_path):
    pytest.importorskip("trackio", reason="extra trackio is not installed")
    program = (
        "import json, math, sys, trackio\n"
        "from pathlib import Path\n"
        "from tests.unit.tracking.test_sinks import run_twice\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "run_twice(Path(sys.argv[1]), 'trackio')\n"
        "(run,) = trackio.Api().runs('spmdflow')\n"
        "logs = SQLiteStorage.get_logs('spmdflow', run_id=run.id)\n"
        "Path(sys.argv[1], 'read.json').write_text(json.dumps([run.name, run.config, logs]))\n"
    )
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}

    run_dir = tmp_path / "run"
    run_program(program, run_dir, variables)
    name, config, logs = json.loads((run_dir / "read.json").read_text())

    assert name == f"run-{run_id(run_dir)}"
    metrics = {log["step"]: log["reward/mean"] for log in logs if "reward/mean" in log}
    assert metrics == {1: 0.25, 2: 0.5, 3: 0.75}
    assert config["many.setting_119"] == 119 and config["actor.optimizer.lr"] == 2e-6
    tables = [log["samples"]["_value"] for log in logs if "samples" in log]
    assert tables == [[dict(zip(COLUMNS, row)) for row in ROWS]] * 3


def test_swanlab_continues_one_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="extra swanlab is not installed")
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    run_twice(tmp_path, "swanlab")

    files = sorted(tmp_path.glob("swanlab/run-*/run-*.swanlab"))
    assert {path.stem for path in files} == {f"run-{run_id(tmp_path)}"}
    metrics = {}
    tables = {}
    for path in files:
        reader = DataStoreReader()
        reader.open(path)
        for record in map(Record.FromString, reader):
            if record.scalar.key == "reward/mean":
                metrics[record.scalar.step] = record.scalar.value.number
            for item in record.media.value.items:
                tables[record.media.step] = path.parent / "media" / "echarts" / item.filename
    assert metrics == {1: 0.25, 2: 0.5, 3: 0.75}
    assert [*tables] == [1, 2, 3]
    assert all(str(column) in tables[1].read_text() for column in COLUMNS)
    config = yaml.safe_load((files[-1].parent / "files" / "config.yaml").read_text())
    assert config["actor.optimizer.lr"]["value"] == 2e-6
    assert config["many.setting_119"]["value"] == 119


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("trackio", "trackio"),
        ("swanlab", "swanlab"),
    ],
)
def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)  # how Python marks "cannot be imported"

    with pytest.raises(ConfigError, match=rf"{name}.*pip install '"):
        Tracker(tmp_path, [name])


@pytest.mark.parametrize(
    ("name", "variables", "do"),
    [
        ("wandb", {"WANDB_MODE": "online"}, "WANDB_MODE=offline or remove wandb from run.trackers"),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
            "or remove mlflow from run.trackers",
        ),
        (
            "swanlab",
            {"SWANLAB_MODE": "online"},
            "SWANLAB_MODE=offline or remove swanlab from run.trackers",
        ),
        (
            "trackio",
            {"TRACKIO_SERVER_URL": "http://127.0.0.1:9"},
            "or remove trackio from run.trackers",
        ),
    ],
)
def test_a_library_without_account_or_server_is_refused_at_the_start(tmp_path, name, variables, do):
    pytest.importorskip(name, reason=f"extra {name} is not installed")
    accounts = ("WANDB_API_KEY", "SWANLAB_API_KEY", "TRACKIO_WRITE_TOKEN")
    variables |= dict.fromkeys(accounts, "") | {"HOME": str(tmp_path)}
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from spmdflow.errors import ConfigError\n"
        "from spmdflow.tracking.tracker import Tracker\n"
        "run_dir = Path(sys.argv[1])\n"
        "try:\n"
        f"    Tracker(run_dir, ['{name}'])\n"
        "except ConfigError as err:\n"
        "    (run_dir / 'said').write_text(str(err))\n"
    )

    run_program(program, tmp_path / "run", variables | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"})

    said = (tmp_path / "run" / "said").read_text()
    assert said.startswith(f"run.trackers: got {name}, which does not start (")
    assert said.endswith(do)


def test_table_has_a_column_for_every_term_and_a_row_for_every_sample():
    assert table_of(SAMPLES) == (COLUMNS, ROWS)
    assert table_of([]) == ([], [])


def run_program(program, run_dir, variables):
    """In a process whose variables its libraries read when they are imported."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def wait_until(condition, *, seconds=600.0):
    """W&B's own process writes beside ours, and after it."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def wandb_records(path):
    """The records of a W&B run's file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    place = 7
    parts = b""
    block = 32768
    while place + 7 <= len(data):
        if (left := block - place % block) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        place += 7 + length
        if place > len(data):
            return  # being written
        parts += data[place - length : place]
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def run_id(run_dir):
    return (run_dir / "tracker_id").read_text()
