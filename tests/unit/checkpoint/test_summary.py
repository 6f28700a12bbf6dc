"""The last line of a run: where its models are, and the command that uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spmdflow.checkpoint.run_dir import Checkpoints
from spmdflow.checkpoint.summary import trained_models_text
from spmdflow.config.load import load
from spmdflow.controller.flow import Flow
from spmdflow.program import run_prepared
from tests.unit.checkpoint_files import write_as_rank

GRPO = Path(__file__).parents[3] / "algos" / "grpo.py"


def save(run_dir: Path, step: int, *names: str) -> None:
    """A sealed checkpoint that holds files of these names."""
    checkpoints = Checkpoints(run_dir, keep=2)
    folder = checkpoints.begin(step)
    checkpoints.seal(step, {}, [write_as_rank(folder, dict.fromkeys(names, b"{}"), rank=0)])


SAVED: dict[str, tuple[tuple[str, ...], bool, str]] = {
    "a policy whose run can be evaluated": (
        ("actor/hugging_face/config.json", "critic/rank-0.safetensors"),
        True,
        "the model after step 4 is in RUN/export/actor, in the Hugging Face format; evaluate it: "
        "torchrun --standalone --nproc-per-node 1 -m spmdflow.run evaluate RUN/config.yaml",
    ),
    "a policy without data to evaluate it": (
        ("actor/hugging_face/config.json",),
        False,
        "the model after step 4 is in RUN/export/actor, in the Hugging Face format; evaluate it: "
        "torchrun --standalone --nproc-per-node 1 -m spmdflow.run evaluate "
        "actor.model.path=RUN/export/actor data.eval_path=FILE reward.function=FUNCTION",
    ),
    "a reward model": (
        ("reward_model/hugging_face/config.json",),
        True,
        "the model after step 4 is in RUN/export/reward_model, in the Hugging Face format; train a "
        "policy with it: torchrun --standalone --nproc-per-node 1 -m spmdflow.run ppo "
        "reward.model.path=RUN/export/reward_model",
    ),
    "an adapter": (
        ("actor/hugging_face/adapter_config.json",),
        True,
        "the adapter after step 4 is in RUN/export/actor; merge it into a full model: "
        "python -m spmdflow.export RUN --to FOLDER",
    ),
    "no export": (
        ("judge/rank-0.safetensors",),
        False,
        "the checkpoint after step 4 is in RUN/checkpoints/step-4; write a model of it: "
        "python -m spmdflow.export RUN --model NAME --to FOLDER",
    ),
}


@pytest.mark.parametrize("case", SAVED)
def test_run_says_where_its_newest_model_is_and_how_to_use_it(tmp_path: Path, case: str) -> None:
    names, has_evaluation, expected = SAVED[case]
    save(tmp_path, 2, *names)
    save(tmp_path, 4, *names)

    text = trained_models_text(tmp_path, has_evaluation=has_evaluation)

    assert text == expected.replace("RUN", str(tmp_path))


def test_run_that_saved_nothing_says_nothing(tmp_path: Path) -> None:
    assert trained_models_text(tmp_path, has_evaluation=True) is None


def run_to_its_end(run_dir: Path, main: Callable[[Flow, Any], None]) -> None:
    """A run in this process, as `spmdflow.run --inproc` makes it, with this main."""
    loaded = load(GRPO, None, [f"run.dir={run_dir}", "data.eval_path=null"])
    script = ModuleType("own")
    script.main = main  # type: ignore[attr-defined]
    assert run_prepared(script, loaded.cfg, ranks=(0,), inproc=True).wait() == 0


def test_last_line_of_a_run_says_what_it_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def main(flow: Flow, cfg: Any) -> None:
        for _ in flow.steps(1):
            flow.save(every=1)

    with caplog.at_level(logging.INFO):
        run_to_its_end(tmp_path / "run", main)

    assert caplog.messages[-1].startswith(
        f"the checkpoint after step 1 is in {tmp_path}/run/checkpoints/step-1; write a model of it:"
    )


def test_run_that_trains_nothing_ends_without_a_word_about_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def main(flow: Flow, cfg: Any) -> None:
        for step in flow.steps(1):
            step.log(x=1.0)

    with caplog.at_level(logging.INFO):
        run_to_its_end(tmp_path / "run", main)

    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "the model after" not in caplog.text
    assert "the checkpoint after" not in caplog.text
