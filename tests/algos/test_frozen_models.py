"""Resume with a frozen model that is another one, that has moved, or of which nothing is known."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import CheckpointError
from tests.algos.runs import ROOT, SCRIPT, SMALL, last_checkpoint, numbers_of, steps_of

MODEL = ROOT / "algos" / "arithmetic" / "model"
SETTINGS = (*SMALL, "save_every=1", "eval_every=0")


def run(run_dir: Path, steps: int, *settings: str) -> None:
    words = [*SETTINGS, f"total_steps={steps}", f"run.dir={run_dir}", *settings]
    loaded = load(SCRIPT, None, words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("frozen") / "run"
    run(run_dir, 1)
    return run_dir


@pytest.fixture
def begun(one_step: Path, tmp_path: Path) -> Path:
    """A run of its own after one step."""
    return shutil.copytree(one_step, tmp_path / "run", symlinks=True)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another model: the same but for its weights."""
    folder = shutil.copytree(MODEL, tmp_path / "other")
    path = folder / "model.safetensors"
    torch.manual_seed(0)
    weights = {name: w + 0.1 * torch.randn_like(w) for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def test_another_reference_is_refused_unless_it_is_to_be_reloaded(
    begun: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (begun / "checkpoints" / "latest").read_text()

    with pytest.raises(CheckpointError, match=rf"reference model of .*, got {other} \(hash .*same"):
        run(begun, 2, f"reference.model.path={other}")
    assert (begun / "checkpoints" / "latest").read_text() == before
    run(begun, 2, f"reference.model.path={other}", "run.resume=reload_frozen")

    assert "run.resume=reload_frozen: checkpoint:" in caplog.text
    first, second = (step["actor/reference_kl"] for step in steps_of(begun))
    assert second > 10 * abs(first) + 0.1, "against the new reference"
    with pytest.raises(CheckpointError, match="got .*arithmetic/model"):
        run(begun, 3)


def test_a_frozen_model_that_has_moved_continues_to_the_same_bits(
    begun: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    run(whole, 2)
    moved = shutil.copytree(MODEL, tmp_path / "moved")

    run(begun, 2, f"reference.model.path={moved}")

    assert last_checkpoint(begun) == last_checkpoint(whole)
    assert numbers_of(begun) == numbers_of(whole)
    assert not list(begun.glob("checkpoints/*/reference/*")), "frozen models are not saved"


def test_a_checkpoint_without_a_record_of_frozen_models_is_a_warning(
    begun: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = begun / "checkpoints" / "step-1" / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"], body["meta"]["frozen"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": digest}))

    run(begun, 2)

    assert "step-1 does not say which reference model it had" in caplog.text
    assert [step["step"] for step in steps_of(begun)] == [1, 2]


@pytest.mark.parametrize(("first", "second"), [("auto", "always"), ("always", "auto")])
def test_a_run_resumes_with_and_without_a_reference_that_nothing_needs(
    tmp_path: Path, first: str, second: str
) -> None:
    """The weights do not depend on it, and a checkpoint has nothing of it but its hash."""
    run_dir = tmp_path / "run"
    no_kl = ("actor.loss.kl_coef=0", "advantage.kl_coef=0")
    run(run_dir, 1, *no_kl, f"reference.compute={first}")
    run(run_dir, 2, *no_kl, f"reference.compute={second}")
    whole = tmp_path / "whole"
    run(whole, 2, *no_kl, "reference.compute=always")

    steps = steps_of(run_dir)
    has_kl = ["actor/reference_kl" in step for step in steps]
    assert has_kl == [first == "always", second == "always"]
    assert last_checkpoint(run_dir) == last_checkpoint(whole), "bit for bit"
