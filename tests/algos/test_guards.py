"""Runs with faults: each ends, or goes on, with a word that says what to look at."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spmdflow.checkpoint.rows import read_rows
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError, GuardError
from tests.algos.runs import ROOT, SCRIPT, SMALL, last_checkpoint, steps_of

MODEL = ROOT / "algos" / "arithmetic" / "model"


def run(run_dir: Path, *settings: str) -> list[dict[str, float]]:
    loaded = load(SCRIPT, None, [*SMALL, "eval_every=0", *settings, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir)


def test_learning_rate_of_a_million_ends_the_run_with_a_word(tmp_path: Path) -> None:
    fatal = ("total_steps=4", "save_every=1", "actor.optimizer.lr=1e6")
    with pytest.raises(GuardError) as by_kl:
        run(tmp_path / "kl", *fatal)
    with pytest.raises(GuardError) as by_accuracy:
        run(tmp_path / "accuracy", *fatal, "eval_every=1", "data.eval_prompts=64")

    assert "actor/reference_kl" in str(by_kl.value) and "in step 2, expected" in str(by_kl.value)
    assert "got eval/accuracy 0 (best so far 0." in str(by_accuracy.value)
    assert "lower actor.optimizer.lr" in str(by_accuracy.value)
    assert not list((tmp_path / "accuracy" / "checkpoints").glob("step-*"))
    assert [path.name for path in (tmp_path / "kl" / "checkpoints").glob("step-*")] == ["step-1"]
    rows = read_rows(tmp_path / "kl" / "guards" / "step-2.safetensors")
    assert {"responses", "scores", "advantages", "response_text"} <= set(rows)


def test_skip_by_drift_computes_log_probs_first_and_changes_no_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("total_steps=2", "save_every=1", "actor.update.mini_batch_size=16")
    with caplog.at_level(logging.WARNING):
        steps = run(tmp_path, *settings, "run.guards=['rollout/drift > 1e-12: skip']")

    first, second = (step["guards/skipped"] for step in steps)
    model = load_file(MODEL / "model.safetensors")
    trained = last_checkpoint(tmp_path)
    assert (first, second) == (1.0, 1.0), "one batch, for the critic and the actor"
    assert all("rollout/drift" in step and "actor/grad_norm" not in step for step in steps)
    assert "no update learns from its batch (time 2, told again at time 4)" in caplog.text
    (norm,) = (
        raw for name, raw in trained.items() if ":model.norm.weight[" in name and "actor/" in name
    )
    assert norm == model["model.norm.weight"].numpy().tobytes()


def test_drift_that_the_update_itself_measures_stops_a_run(tmp_path: Path) -> None:
    settings = ("total_steps=1", "actor.update.mini_batch_size=16", "advantage.kl_coef=0")
    with pytest.raises(GuardError, match=r"got rollout/drift .* by 'rollout/drift > 1e-12: stop'"):
        run(tmp_path, *settings, "run.guards=['rollout/drift > 1e-12: stop']")


def test_model_file_with_a_weight_that_is_no_number_is_blamed(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})

    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", "total_steps=1", f"actor.model.path={tmp_path / 'model'}")

    assert f"nan or infinite in model.layers.0.mlp.up_proj.weight of {file}" in str(caught.value)
