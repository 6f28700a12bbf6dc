"""Learning rates of scripts whose optimizer steps are not as planned; steps that are left out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import SpmdflowError
from tests.algos.runs import ROOT, last_checkpoint, run_ranks, steps_of

SCRIPT = ROOT / "tests" / "algos" / "programs" / "scheduled.py"
SETTINGS = ROOT / "algos" / "sft.yaml"
SMALL = (
    "data.prompts_per_step=8",
    "actor.update.mini_batch_size=8",
    "actor.optimizer.schedule=linear",
    "actor.optimizer.warmup_steps=0",
    "actor.optimizer.lr=1.2e-3",
    "total_steps=4",
    "eval_every=0",
    "save_every=0",
    "run.sample_every=0",
)
RATES = ("lr/0", "lr/1", "lr/2")


def few_rows(folder: Path) -> list[str]:
    """Settings of data that are read quickly."""
    rows = folder / "rows.jsonl"
    examples = (ROOT / "algos" / "arithmetic" / "train.jsonl").read_text().splitlines()
    rows.write_text("\n".join(examples[:32]))
    return [f"data.train_path={rows}", "data.eval_path=null"]


def run(run_dir: Path, *words: str) -> list[dict[str, Any]]:
    places = [f"run.dir={run_dir}", *few_rows(run_dir.parent)]
    loaded = load(SCRIPT, SETTINGS, [*SMALL, *words, *places])
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir, own=RATES)


def rates_of(steps: list[dict[str, Any]]) -> list[float]:
    """Of the updates, in their order."""
    return [step[name] for step in steps for name in RATES if name in step]


def parts_of(steps: list[dict[str, Any]]) -> list[float]:
    """The rates as parts of the peak."""
    return [pytest.approx(rate / 1.2e-3) for rate in rates_of(steps)]


def test_two_updates_a_step_end_at_zero_with_the_run_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        steps = run(tmp_path / "run", "updates=2")

    # the first step has as many places as planned, one; from the second on a step has two
    assert parts_of(steps) == [1, 3 / 4, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert caplog.text.count("planned were") == 1
    assert (
        "actor: the run has taken optimizer step 5, planned were 4 (4 steps x 1); the learning "
        "rate follows the steps of the run and ends with its last"
    ) in caplog.text


def test_script_that_counts_other_steps_than_total_steps_ends_at_zero_with_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        steps = run(tmp_path / "run", "counted=6")

    assert parts_of(steps) == [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert "the script takes 6 steps, total_steps is 4" in caplog.text
    assert "planned were" not in caplog.text


def test_script_that_learns_from_fewer_rows_than_it_draws_ends_at_zero_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        steps = run(tmp_path / "run", "masked=[2,3]")

    assert parts_of(steps) == [1, 1 / 4]
    assert "the run took 2 optimizer steps, planned were 4 (4 steps x 1)" in caplog.text


def test_number_of_steps_that_is_set_holds_and_a_step_beyond_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        steps = run(tmp_path / "run", "updates=2", "actor.optimizer.total_steps=6")

    assert parts_of(steps) == [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]
    assert (
        "actor: the run has taken optimizer step 7, planned were 6 (optimizer.total_steps); the "
        "learning rate is 0 now; check optimizer.total_steps"
    ) in caplog.text


def test_run_with_three_updates_a_step_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """ASGD keeps the rate of its last step, which is not the one that was planned for it."""
    words = ("updates=3", "save_every=1", "actor.optimizer.name=ASGD")
    whole = run(tmp_path / "whole", *words)

    run(tmp_path / "halves", *words, "counted=4", "run.max_seconds=0.001")
    steps = run(tmp_path / "halves", *words)

    assert rates_of(steps) == rates_of(whole)
    assert last_checkpoint(tmp_path / "halves") == last_checkpoint(tmp_path / "whole")


@pytest.mark.drill
def test_run_that_goes_on_with_another_engine_and_fewer_ranks_has_the_rates_of_one_without_a_break(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    words = ["updates=2", "save_every=1", "actor.optimizer.weight_decay=0.1"]
    words.append("actor.optimizer.decay_parameters=matrices")
    on_two = [*SMALL, *few_rows(tmp_path), *words, "actor.engine.kind=zero1"]
    on_two.append("run.max_seconds=0.001")  # only one step is in time

    run_ranks(run_dir, str(SETTINGS), *on_two, num_ranks=2, script=SCRIPT, small=())
    first = steps_of(run_dir, own=RATES)
    steps = run(run_dir, *words)

    assert len(first) == 1
    assert parts_of(steps) == [1, 3 / 4, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]


def test_step_whose_rows_are_all_masked_changes_nothing_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("actor.optimizer.weight_decay=0.1", "save_every=1")
    run(tmp_path / "one", *words, "total_steps=1")
    one = last_checkpoint(tmp_path / "one")
    with caplog.at_level(logging.WARNING):
        _, masked = run(tmp_path / "two", *words, "total_steps=2", "masked=[2]")

    assert last_checkpoint(tmp_path / "two") == one
    assert masked["actor/optimizer_steps"] == 0 and masked["actor/empty_steps"] == 1
    assert "actor/loss" not in masked
    assert "actor: no optimizer step: every row of the mini-batch has failed" in caplog.text


def test_gradient_that_is_not_finite_ends_the_run_unless_it_may_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SpmdflowError, match=r"optimizer step 1 has gradient norm nan .*=n"):
        run(tmp_path / "strict", "poisoned=[2]")

    one = run(tmp_path / "one", "total_steps=1", "counted=4", "save_every=1", "masked=[2,3,4]")
    with caplog.at_level(logging.WARNING):
        words = ("save_every=1", "actor.optimizer.skip_nonfinite=3", "poisoned=[2,3,4]")
        steps = run(tmp_path / "lenient", *words)

    assert [step.get("actor/nonfinite_steps", 0) for step in steps] == [0, 1, 1, 1]
    assert [step["actor/optimizer_steps"] for step in steps] == [1, 0, 0, 0]
    assert steps[0]["actor/loss"] == one[0]["actor/loss"]
    assert last_checkpoint(tmp_path / "lenient") == last_checkpoint(tmp_path / "one")
    assert "the gradient norm is nan and the loss nan (3 in a row, optimizer.skip_nonfinite=3)" in (
        caplog.text
    )


def test_more_gradients_in_a_row_than_allowed_end_the_run_also_when_it_goes_on(
    tmp_path: Path,
) -> None:
    words = ("save_every=1", "actor.optimizer.skip_nonfinite=1", "poisoned=[1,3,4]")
    run(tmp_path / "run", *words, "total_steps=3")

    with pytest.raises(SpmdflowError, match="as have the 1 tries before it"):
        run(tmp_path / "run", *words)


@pytest.mark.parametrize(
    "engine",
    ["fsdp", *(pytest.param(kind, marks=pytest.mark.drill) for kind in ("zero1", "megatron"))],
)
def test_engines_leave_out_the_same_steps_and_decay_the_same_tensors_on_two_ranks(
    tmp_path: Path, engine: str
) -> None:
    """The first step is nan, the second only decays (a gradient of 0), the third is masked."""
    run_dir = tmp_path / "run"
    words = [*SMALL, *few_rows(tmp_path), f"actor.engine.kind={engine}", "total_steps=3"]
    words += ["factor=0", "poisoned=[1]", "masked=[3]", "save_every=3"]
    words += ["actor.optimizer.skip_nonfinite=1", "actor.optimizer.weight_decay=0.5"]
    words += ["actor.optimizer.decay_parameters=matrices", "actor.optimizer.lr=0.1"]
    words.append("actor.optimizer.schedule=constant")
    if engine == "megatron":
        words.append("actor.engine.layout=t2")

    run_ranks(run_dir, str(SETTINGS), *words, num_ranks=2, script=SCRIPT, small=())

    counted = ("actor/optimizer_steps", "actor/nonfinite_steps", "actor/empty_steps")
    steps = steps_of(run_dir, own=RATES)
    found = [[step.get(name, 0) for name in counted] for step in steps]
    assert found == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    (folder,) = (run_dir / "checkpoints").rglob("hugging_face")
    model = ROOT / "algos" / "arithmetic" / "model"
    before, after = (load_file(each / "model.safetensors") for each in (model, folder))
    for name, tensor in before.items():
        is_decayed = tensor.ndim > 1 and "embed_tokens" not in name
        expected = tensor.float() * (1 - 0.1 * 0.5) if is_decayed else tensor.float()
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=0)
