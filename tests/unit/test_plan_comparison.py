"""After a run: predicted beside measured seconds, planned beside counted bytes, nothing fails."""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from spmdflow import program
from spmdflow.config.load import Loaded, load
from spmdflow.controller.launch import STOPPED, launch
from spmdflow.controller.message import decode, encode
from spmdflow.controller.transcript import TRANSCRIPT_FILE
from spmdflow.mapping.machine import load_hardware
from spmdflow.plan.command import FINE, REFUSED, WRONG, main
from spmdflow.plan.comparison import Comparison, compare, compare_run, comparison_text
from spmdflow.plan.replay import Replay
from spmdflow.plan.report import plan
from spmdflow.plan.trace import TraceSettings, trace_replayed
from tests.unit.planned import ALGORITHMS

SETTINGS = (
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "actor.rollout.temperature=0.7",
    "actor.update.mini_batch_size=16",
    "data.eval_prompts=4",
    "eval_every=2",
    "total_steps=2",
    "run.sample_every=1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Two steps of DAPO, which draws prompts until enough of their samples differ."""
    run_dir = tmp_path_factory.mktemp("comparison") / "run"
    loaded = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={run_dir}"])
    assert launch(loaded.script, loaded.cfg, inproc=True) == 0
    return loaded


def compared(run: Loaded, **more: Any) -> Comparison:
    run_dir = Path(run.cfg.run.dir)
    return compare(run.script, run.cfg, run_dir, world=(0,), hardware=load_hardware("h100"), **more)


def test_replay_goes_round_the_scripts_loop_as_often_as_the_run_did(run: Loaded) -> None:
    replay = Replay.of_run(run.cfg.run.dir)

    found = trace_replayed(run.script, run.cfg, replay)

    rounds = [replay.metrics(step)["sampling/rounds"] for step in (1, 2)]
    drawn = [o.step for o in found.orders if o.label.startswith("actor.gen") and o.phase != "eval"]
    assert replay.steps == (0, 1, 2)
    assert [drawn.count(1), drawn.count(2)] == rounds
    assert max(rounds) > 1


def test_every_stage_has_predicted_and_measured_seconds(run: Loaded) -> None:
    found = compared(run)

    stages = {stage.stage: stage for stage in found.stages}
    for name in ("generate_sequences", "compute_log_prob", "update_actor", "step"):
        assert stages[name].measured and stages[name].from_lengths and stages[name].from_settings
    text = comparison_text(found)
    assert "predicted / measured" in text and "equal on every edge" in text


def test_weights_that_pass_are_counted_as_planned(run: Loaded) -> None:
    found = compared(run)

    model = Path(run.cfg.actor.model.path)
    folder = model if model.is_absolute() else Path.cwd() / model
    whole = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert [(sync.step, sync.syncs) for sync in found.syncs] == [(2, 1)], "step 1 follows step 0"
    assert found.syncs[0].planned == found.syncs[0].counted == 4 * whole
    assert "weights from trainer to generator" in comparison_text(found)


def test_examples_of_the_configuration_reach_the_prediction_from_the_settings(run: Loaded) -> None:
    plain, short = (
        {stage.stage: stage for stage in found.stages}["generate_sequences"]
        for found in (compared(run), compared(run, examples={"responses": 1}))
    )

    assert short.from_settings and plain.from_settings
    assert short.from_settings < plain.from_settings
    assert short.from_lengths == plain.from_lengths  # those that the run had


def test_edge_with_other_bytes_than_planned_is_shown(run: Loaded, tmp_path: Path) -> None:
    source = Path(run.cfg.run.dir)
    content = decode((source / TRANSCRIPT_FILE).read_bytes())
    content["steps"][1]["edges"] = [[0, 0, 40]]
    (tmp_path / TRANSCRIPT_FILE).write_bytes(encode(content))
    (tmp_path / "metrics.jsonl").write_text((source / "metrics.jsonl").read_text())

    found = compare(run.script, run.cfg, tmp_path, world=(0,), hardware=load_hardware("h100"))

    assert not found.bytes_agree
    assert "1 edges differ" in comparison_text(found)
    assert "NOT as planned" in found.describe()


def test_plan_command_replays_a_run_and_holds_its_bytes_against_the_plan(
    run: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, script = Path(run.cfg.run.dir), str(ALGORITHMS / "dapo.py")
    content = decode((run_dir / TRANSCRIPT_FILE).read_bytes())
    content["steps"][2]["edges"] = [[0, 0, 40]]
    (tmp_path / TRANSCRIPT_FILE).write_bytes(encode(content))
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())

    assert main([script, "--replay", str(run_dir), "--hardware=h100"]) == FINE
    assert "0 edges of steps 0, 1, 2 as the run counted them" in capsys.readouterr().out
    assert main([script, "--replay", str(tmp_path), "--hardware=h100"]) == WRONG
    assert "edge 0 -> 0 in step 2: got 40 bytes counted" in capsys.readouterr().out
    assert main([script, "--replay", str(tmp_path / "none"), "--hardware=h100"]) == REFUSED
    assert "got no transcript" in capsys.readouterr().err


def test_files_are_written_and_one_line_is_logged(
    run: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("spmdflow").propagate = True
    with caplog.at_level(logging.INFO, "spmdflow.plan.comparison"):
        compare_run(run.script, run.cfg, (0,))

    plain = json.loads((Path(run.cfg.run.dir) / "prediction.json").read_text())
    assert plain["bytes_agree"] is True
    assert plain["steps"] == [0, 1, 2]
    assert (Path(run.cfg.run.dir) / "prediction.txt").read_text().startswith("seconds of a step")
    assert any(message.startswith("prediction (prediction.txt): ") for message in caplog.messages)


def stopping(script: ModuleType, dry: Callable[[], None]) -> ModuleType:
    """The script, whose run is asked to stop as it begins; `dry` is called in its dry runs."""
    found = ModuleType(script.__name__)
    found.__dict__.update(script.__dict__)
    calls = []

    def main(flow: Any, cfg: Any) -> None:
        calls.append(flow)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            dry()
        script.main(flow, cfg)

    found.__dict__["main"] = main
    return found


def test_stopped_run_is_compared_and_a_second_signal_changes_nothing(tmp_path: Path) -> None:
    loaded = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={tmp_path}"])
    signals = []

    def signal_again() -> None:
        signals.append(os.kill(os.getpid(), signal.SIGTERM))

    status = program.launch(stopping(loaded.script, signal_again), loaded.cfg, inproc=True)

    assert status == STOPPED and signals
    plain = json.loads((tmp_path / "prediction.json").read_text())
    assert plain["steps"] == [0, 1] and plain["bytes_agree"] is True
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_comparison_of_a_stopped_run_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("spmdflow").propagate = True
    monkeypatch.setattr(program, "_STOPPED_SECONDS", 0.3)
    loaded = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={tmp_path}"])

    status = program.launch(
        stopping(loaded.script, lambda: time.sleep(60)), loaded.cfg, inproc=True
    )

    assert status == STOPPED
    assert not (tmp_path / "prediction.json").exists()
    assert any("a stopped run has 0.3 s for it" in message for message in caplog.messages)


def test_step_of_a_pipeline_is_predicted_when_it_is_full(tmp_path: Path) -> None:
    words = ("placement=split", "data.prompts_per_step=4", "data.samples_per_prompt=2")
    words += ("actor.update.mini_batch_size=4", "eval_every=0", "total_steps=1")
    loaded = load(ALGORITHMS / "grpo_async.py", None, [*words, f"run.dir={tmp_path}"])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_seconds": 1.0}\n')
    hardware = load_hardware("h100")

    found = compare(loaded.script, loaded.cfg, tmp_path, world=(0, 1), hardware=hardware)

    settings = TraceSettings(world=(0, 1), nodes=(0, 0), read_data=False)
    planned = plan(loaded.script, loaded.cfg, settings, hardware).prediction
    assert found.stages[-1].stage == "step"
    assert found.stages[-1].from_settings == pytest.approx(planned.seconds)


def test_hardware_that_is_set_is_that_of_the_prediction(run: Loaded) -> None:
    cfg = copy.deepcopy(run.cfg)
    cfg.run.hardware = "a100_80gb"

    found = compare(run.script, cfg, Path(run.cfg.run.dir), world=(0,))

    assert found.hardware == load_hardware("a100_80gb").name


def test_run_without_a_transcript_or_steps_is_no_error(
    run: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("spmdflow").propagate = True
    cfg = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={tmp_path}"]).cfg

    with caplog.at_level(logging.INFO, "spmdflow.plan.comparison"):
        compare_run(run.script, cfg, (0,))

    assert any(message.startswith("no prediction: DataError: ") for message in caplog.messages)
    (tmp_path / "metrics.jsonl").write_text((Path(run.cfg.run.dir) / "metrics.jsonl").read_text())
    found = compare(run.script, cfg, tmp_path, world=(0,), hardware=load_hardware("h100"))
    assert found.steps == ()
    assert any(note.startswith("bytes are not compared: ") for note in found.notes)
