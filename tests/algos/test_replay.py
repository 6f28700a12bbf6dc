"""A kept step runs again to the same bits, and what was changed since is named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.replay import compare, main, replay_folder
from tests.algos.runs import ROOT, SCRIPT, SMALL, finish, run_ranks, start, steps_of

SETTINGS = ("total_steps=3", "eval_every=2", "save_every=1", "run.capture_step=2")
MODEL = ROOT / "algos" / "arithmetic" / "model"


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    script = shutil.copy(SCRIPT, run_dir.parent)
    loaded = load(script, SCRIPT.with_suffix(".yaml"), [*SMALL, *SETTINGS, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    assert len(steps_of(run_dir)) == 4
    return run_dir / "capsules" / "step-2"


def replay(capsule: Path, *settings: str) -> int:
    return main(["--inproc", str(capsule), *settings])


def test_a_kept_step_runs_again_to_the_same_bits_with_a_line_for_a_debugger(
    capsule: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = capsule.parents[2] / "ppo.py"
    reached = []
    text = script.read_text()
    monkeypatch.setattr(sys, "breakpointhook", lambda: reached.append(sys._getframe(1).f_lineno))
    place = "        # Stage 3: learning\n"
    script.write_text(text.replace(place, f"{place}        breakpoint()\n"))

    status = replay(capsule)
    script.write_text(text)

    said = capsys.readouterr().out.splitlines()
    labels = [label for label, *_ in json.loads((capsule / "capsule.json").read_text())["calls"]]
    assert status == 0 and reached == [text[: text.index(place)].count("\n") + 2]
    assert f"replay: {script} has changed since" in said
    assert said[-1].startswith("replay: equal: ") and said[-1].endswith("tensors bit for bit")
    assert compare(capsule, replay_folder(capsule) / "capsules" / "step-2").num_equal > 100
    assert labels[:2] == ["prompts.train", "actor.generate_sequences"]
    assert labels.index("critic.update_critic") < labels.index("actor.update_actor")


def test_a_changed_reward_function_is_named_by_its_scores(
    capsule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.py"
    file.write_text("def score(prompt, response, row):\n    return float(len(response))\n")

    assert replay(capsule, f"reward.function={file}:score") == 1

    said = capsys.readouterr().out
    assert "first difference: " in said
    assert " reward.compute_reward scores: " in said
    assert "of 16 rows differ, the first is 0: recorded " in said


def test_a_changed_weight_is_named_by_the_first_column_that_it_changes(
    capsule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][0] += torch.finfo(torch.float32).eps * 8
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})

    changed = f"reference.model.path={tmp_path / 'model'}"
    assert replay(capsule, changed, "run.resume=reload_frozen") == 1

    assert " reference.compute_ref_log_prob ref_log_probs: " in capsys.readouterr().out


def test_a_folder_without_a_capsule_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(tmp_path) == 2

    assert "expected a folder with a capsule.json, such as" in capsys.readouterr().err


@pytest.mark.slow
def test_step_of_two_ranks_runs_again_to_the_same_bits_and_in_one_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = tmp_path / "replay.log"
    run_ranks(run_dir, *SETTINGS, "actor.engine.kind=zero3", num_ranks=2)
    capsule = str(run_dir / "capsules" / "step-2")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    again = finish(start([sys.executable, *words, "-m", "spmdflow.replay", capsule], log))
    assert again == 0, log.read_text()[-3000:]
    words = ["-m", "spmdflow", "replay", "--inproc", capsule]
    alone = finish(start([sys.executable, *words], log))

    assert alone == 0, log.read_text()[-3000:]
    reports = [line for line in log.read_text().splitlines() if line.startswith("replay: ")]
    assert "tensors bit for bit" in reports[0] and "the others" not in reports[0]
    assert reports[1] == "replay: another layout: numbers are compared to 0.001"
    assert "the others to" in reports[2], "sums of one rank have another order"
