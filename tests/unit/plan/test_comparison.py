"""After a run: predicted beside measured seconds, planned beside counted bytes, nothing fails."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from spmdflow import program
from spmdflow.config.load import Loaded, load
from spmdflow.controller.script import STOPPED, run_flow
from spmdflow.controller.transcript import TRANSCRIPT_FILE
from spmdflow.datasets.scan import ScanReport
from spmdflow.mapping.hardware import load_hardware
from spmdflow.message import decode, encode
from spmdflow.plan.__main__ import FINE, REFUSED, WRONG, main
from spmdflow.plan.comparison import (
    Comparison,
    compare,
    compare_run,
    comparison_text,
)
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import Trace
from spmdflow.plan.replay import Replay, recorded_trace
from spmdflow.plan.trace import TraceSettings, trace
from spmdflow.plan.weight import weight_plans
from spmdflow.runtime.call import Call
from tests.unit.planned import ALGORITHMS, trace_replayed

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


PATHS = tuple(
    f"{key}={ALGORITHMS / path}"
    for key, path in {
        "data.train_path": "arithmetic/train.jsonl",
        "data.eval_path": "arithmetic/eval.jsonl",
        "actor.model.path": "arithmetic/model",
    }.items()
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Two steps of DAPO, which draws prompts until enough of their samples differ."""
    run_dir = tmp_path_factory.mktemp("comparison") / "run"
    loaded = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return loaded


def compared(run: Loaded) -> Comparison:
    return compare(run.cfg, Path(run.cfg.run.dir), hardware=load_hardware("h100"))


def test_replay_goes_round_the_scripts_loop_as_often_as_the_run_did(run: Loaded) -> None:
    replay = Replay.of_run(run.cfg.run.dir)

    found = trace_replayed(run.script, run.cfg, replay)

    rounds = [replay.metrics(step)["sampling/rounds"] for step in (1, 2)]
    drawn = [o.step for o in found.calls if o.label.startswith("actor.gen") and o.phase != "eval"]
    assert replay.steps == (0, 1, 2)
    assert [drawn.count(1), drawn.count(2)] == rounds
    assert max(rounds) > 1


def test_every_stage_has_predicted_and_measured_seconds(run: Loaded) -> None:
    found = compared(run)

    stages = {stage.stage: stage for stage in found.stages}
    assert "compute_log_prob" not in stages, "the update's own forward serves"
    for name in ("generate_sequences", "compute_reward", "update_actor", "step"):
        assert stages[name].measured and stages[name].predicted
    text = comparison_text(found)
    assert "predicted / measured" in text and "equal on every edge" in text


def test_steps_of_an_earlier_start_do_not_count_in_what_was_measured(
    run: Loaded, tmp_path: Path
) -> None:
    """As after a resume on another layout: what it recorded begins with its own first step."""
    source = Path(run.cfg.run.dir)
    for name in (TRANSCRIPT_FILE, "calls.jsonl"):
        shutil.copy(source / name, tmp_path / name)
    lines = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    slow = {name: 1000.0 for name in lines[-1] if name.startswith("time/")}
    first = Replay.of_run(tmp_path)
    assert first.steps == (0, 1, 2)
    first._steps.pop(0)
    first._steps.pop(1)
    before = [{**lines[-1], **slow, "step": 1}, lines[-1]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "of_run", lambda _: first)
        found = compare(run.cfg, tmp_path, hardware=load_hardware("h100"))

    measured = {stage.stage: stage.measured for stage in found.stages}
    assert measured["step"] == lines[-1]["time/step_seconds"]


def test_every_phase_has_planned_and_measured_memory(run: Loaded) -> None:
    found = compared(run)

    phases = {phase.phase: phase for phase in found.memory}
    assert {"actor.build", "actor.generate_sequences", "actor.update_actor"} <= phases.keys()
    weights = phases["actor.build"].parts["parameters"]
    for phase in phases.values():
        assert sum(phase.parts.values()) == pytest.approx(phase.planned)
        assert phase.measured > weights, "the weights are there in every phase"
    text = comparison_text(found)
    assert "memory of the fullest rank in GB, planned and measured" in text
    assert "  actor.update_actor is planned with: " in text


def test_weights_that_pass_are_counted_as_planned(run: Loaded) -> None:
    found = compared(run)

    assert [(sync.step, sync.syncs) for sync in found.syncs] == [(2, 1)], "step 1 follows step 0"
    assert found.syncs[0].planned == found.syncs[0].counted == 0, "one rank has all weights"
    assert "weights from trainer to generator" in comparison_text(found)


def test_record_of_a_run_is_what_a_dry_run_with_its_lengths_records(run: Loaded) -> None:
    replay = Replay.of_run(run.cfg.run.dir)

    recorded = recorded_trace(replay)

    dry = trace_replayed(run.script, run.cfg, Replay.of_run(run.cfg.run.dir))
    assert_alike(recorded, dry)
    last = [predicted(found, found.in_step(2)) for found in (recorded, dry)]
    assert last[0].seconds == pytest.approx(last[1].seconds, rel=1e-12) and last[0].seconds > 0


def test_record_of_split_pools_and_a_pipeline_is_what_a_dry_run_records(tmp_path: Path) -> None:
    """Transfers are released when their rows are there, which a dry run never waits for."""
    words = ("placement=split", "data.prompts_per_step=4", "data.samples_per_prompt=2")
    words += ("actor.update.mini_batch_size=4", "eval_every=0")
    loaded = load(ALGORITHMS / "grpo_async.py", None, [*words, f"run.dir={tmp_path}"])
    settings = TraceSettings(world=(0, 1), nodes=(0, 0), read_data=False, num_steps=2)
    dry = trace(loaded.script, loaded.cfg, settings)
    late = [call for call in dry.calls if call.lane == "transfer"]
    soon = [call for call in dry.calls if call.lane == "compute"]
    entries = [_entry_of(call) for call in (*soon, *late)]
    content = {"orders": entries, "start": None, "ranks": [0, 1], "nodes": [0, 0]}
    content["steps"] = [{"step": n, "edges": [], "metrics": {}} for n in dry.steps]

    recorded = recorded_trace(Replay(decode(encode(content))))

    assert len(late) > 1 and dry.links
    assert [(o.lane, o.label) for o in recorded.calls] == [(o.lane, o.label) for o in dry.calls]
    assert recorded.links == dry.links
    assert recorded.edges_by_step == dry.edges_by_step


def _entry_of(call: Call) -> dict[str, Any]:
    commands = [[[rank], dict(plain)] for rank, plain in call.commands.items()]
    facts = {name: getattr(call, name) for name in ("number", "lane", "label", "step", "phase")}
    answer = {"report": scanned()} if call.operation == "scan" else {}
    return {**facts, "commands": commands, "answer": answer}


def scanned() -> ScanReport:
    """Of a data file whose rows have three tokens each."""
    rows = list(range(100_000))
    return ScanReport("", 0, len(rows), np.asarray(rows), np.full(len(rows), 3), 0, 3, [], "")


def predicted(traced: Trace, step_calls: tuple[Call, ...]) -> Prediction:
    return predict(traced, step_calls, load_hardware("h100"), weights=weight_plans(traced))


def assert_alike(one: Trace, other: Trace) -> None:
    for name in ("world", "nodes", "links", "edges_by_step"):
        assert getattr(one, name) == getattr(other, name), name
    tokens = [[found.tokens.get(call.key) for call in found.calls] for found in (one, other)]
    assert tokens[0] == tokens[1]
    assert {n: m.layout for n, m in one.models.items()} == {
        n: m.layout for n, m in other.models.items()
    }
    facts = [[(o.lane, o.label, o.step, o.ranks) for o in found.calls] for found in (one, other)]
    assert facts[0] == facts[1]


def test_main_is_called_once_and_its_side_effects_happen_once(tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text(
        "from algos.dapo import DAPOConfig, main as dapo\n\n\n"
        "def main(flow, cfg: DAPOConfig):\n"
        f"    with open({str(tmp_path / 'seen.txt')!r}, 'a') as file:\n"
        "        file.write('called\\n')\n"
        "    dapo(flow, cfg)\n"
    )
    (tmp_path / "once.yaml").write_text((ALGORITHMS / "dapo.yaml").read_text())
    loaded = load(script, None, [*SETTINGS, *PATHS, f"run.dir={tmp_path / 'run'}"])

    assert program.launch(loaded.script, loaded.cfg, inproc=True) == 0

    assert (tmp_path / "seen.txt").read_text() == "called\n"
    assert (tmp_path / "run" / "prediction.txt").exists()


def test_edge_with_other_bytes_than_planned_is_shown(run: Loaded, tmp_path: Path) -> None:
    source = Path(run.cfg.run.dir)
    content = decode((source / TRANSCRIPT_FILE).read_bytes())
    content["steps"][1]["edges"] = [[0, 0, 40]]
    (tmp_path / TRANSCRIPT_FILE).write_bytes(encode(content))
    (tmp_path / "metrics.jsonl").write_text((source / "metrics.jsonl").read_text())

    found = compare(run.cfg, tmp_path, hardware=load_hardware("h100"))

    assert not found.bytes_agree
    assert "1 edges differ" in comparison_text(found)


def test_plan_command_replays_a_run_and_holds_its_bytes_against_the_plan(
    run: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(run.cfg.run.dir)
    script = str(ALGORITHMS / "dapo.py")
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
    with caplog.at_level(logging.INFO, "spmdflow.plan.comparison"):
        compare_run(run.cfg)

    plain = json.loads((Path(run.cfg.run.dir) / "prediction.json").read_text())
    assert plain["bytes_agree"] is True
    assert plain["steps"] == [0, 1, 2]
    assert (Path(run.cfg.run.dir) / "prediction.txt").read_text().startswith("seconds of a step")
    path = Path(run.cfg.run.dir) / "prediction.txt"
    assert caplog.messages == [f"Predicted and measured seconds and bytes: {path}"]


def stopping(script: ModuleType) -> ModuleType:
    """The script, whose run is asked to stop at the end of its first step."""
    found = ModuleType(script.__name__)
    found.__dict__.update(script.__dict__)

    def main(flow: Any, cfg: Any) -> None:
        save = flow.save

        def save_and_be_asked(*, every: int) -> None:
            save(every=every)
            os.kill(os.getpid(), signal.SIGTERM)

        flow.save = save_and_be_asked
        script.main(flow, cfg)

    found.__dict__["main"] = main
    return found


def test_stopped_run_is_compared_and_a_second_signal_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={tmp_path}"])
    signals = []

    def compare_after_a_signal(cfg: Any) -> None:
        signals.append(os.kill(os.getpid(), signal.SIGTERM))
        compare_run(cfg)

    monkeypatch.setattr("spmdflow.plan.comparison.compare_run", compare_after_a_signal)
    status = program.launch(stopping(loaded.script), loaded.cfg, inproc=True)

    assert status == STOPPED and signals
    plain = json.loads((tmp_path / "prediction.json").read_text())
    assert plain["steps"] == [0, 1] and plain["bytes_agree"] is True
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_record_on_a_full_disk_is_left_out_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRANSCRIPT_FILE).symlink_to("/dev/full")
    words = [*SETTINGS, "eval_every=0", "total_steps=1", f"run.dir={tmp_path}"]
    loaded = load(ALGORITHMS / "dapo.py", None, words)

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    (said,) = [message for message in caplog.messages if "cannot write" in message]
    assert said.endswith("or set run.dir to another disk")


def test_launch_without_a_step_of_its_own_is_no_error(
    run: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    """total_steps=1 where step 2 is done."""
    again = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={run.cfg.run.dir}"])
    again.cfg.total_steps = 1

    with caplog.at_level(logging.INFO, "spmdflow.plan.comparison"):
        assert program.launch(again.script, again.cfg, inproc=True) == 0

    assert not [message for message in caplog.messages if "Error" in message]


def test_hardware_that_is_set_is_that_of_the_prediction(run: Loaded) -> None:
    cfg = copy.deepcopy(run.cfg)
    cfg.run.hardware = "a100_80gb"

    found = compare(cfg, Path(run.cfg.run.dir))

    assert found.hardware == load_hardware("a100_80gb").name


def test_run_without_a_transcript_or_steps_is_no_error(
    run: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = load(ALGORITHMS / "dapo.py", None, [*SETTINGS, f"run.dir={tmp_path}"]).cfg

    with caplog.at_level(logging.INFO, "spmdflow.plan.comparison"):
        compare_run(cfg)

    assert any(m.startswith("no prediction written: DataError: ") for m in caplog.messages)
    (tmp_path / "metrics.jsonl").write_text((Path(run.cfg.run.dir) / "metrics.jsonl").read_text())
    found = compare(cfg, tmp_path, hardware=load_hardware("h100"))
    assert found.steps == ()
    assert any(note.startswith("nothing is predicted: ") for note in found.notes)
