"""What a run does when a guard holds, with toy models in this process."""

from __future__ import annotations

import ctypes
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from spmdflow.checkpoint.rows import read_rows
from spmdflow.controller.batch import Batch
from spmdflow.controller.guarding import MOST_FILES
from spmdflow.errors import ConfigError, GuardError
from spmdflow.worker_api.register import register
from tests.unit.toy_flow import ROWS, Rank, Toy, ToyConfig, draw, rank_of_one, share


class Learner(Toy):
    """Learns nothing, and counts how often."""

    num_updates = 0

    @register(transfer_mode="3D_PROTO", reads=("number",), minibatches=True)
    def learn(self, batch: TensorDict) -> dict[str, Any]:
        """A metric that is known after the update alone."""
        Learner.num_updates += 1
        return {"toy/loss": float(Learner.num_updates)}


def run(rank: Rank, num_steps: int) -> list[tuple[Batch, dict[str, float]]]:
    """Steps with an update of rows whose sum is reported; x is the step's number."""
    flow = rank.flow
    Learner.num_updates = 0
    toy = flow.spawn(Learner, ToyConfig())
    prompts = flow.prompts(rank.config.data)
    found = []
    for step in flow.steps(num_steps):
        batch = draw(prompts, toy)
        batch |= batch.map(share)
        learnt = toy.learn(batch)
        step.log(learnt, x=step.number)
        flow.save(every=1)
        found.append((batch, dict(learnt)))
    return found


def kept(rank: Rank) -> list[str]:
    return sorted(path.name for path in (Path(rank.config.run.dir or "") / "guards").glob("*"))


def test_stop_ends_the_run_before_its_step_is_saved_and_keeps_the_batch(tmp_path: Path) -> None:
    with rank_of_one(tmp_path, guards=["x > 1: stop"]) as rank:
        with pytest.raises(GuardError) as caught:
            run(rank, 4)

    rows = read_rows(tmp_path / "guards" / "step-2.safetensors")
    assert str(caught.value).startswith(
        "run.guards: got x 2 in step 2, expected at most 1, by 'x > 1: stop'; check"
    )
    assert f"{ROWS} of its {ROWS} rows are in {tmp_path}" in str(caught.value)
    # rank_of_one has waited until the checkpoint of step 1 is sealed
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-1"]
    assert set(rows) == {"number", "text", "ragged", "share"}
    assert isinstance(rows["number"], torch.Tensor)
    assert rows["text"] == [f"row {number:g}" for number in rows["number"].tolist()]


def test_skip_leaves_out_the_updates_of_a_batch_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rank_of_one(tmp_path, guards=["toy/total > 100: skip"]) as rank:
        shown: list[dict[str, float]] = []
        show = rank.flow._show.step
        rank.flow._show.step = lambda number, found: (
            shown.append(dict(found)),
            show(number, found),
        )  # type: ignore[method-assign,func-returns-value]
        with caplog.at_level(logging.WARNING):
            found = run(rank, 3)

        sums = [sum(batch.fetch("number")["number"].tolist()) for batch, _ in found]
    assert [total > 100 for total in sums] == [False, True, True]
    assert [bool(metrics) for _, metrics in found] == [True, False, False]
    assert Learner.num_updates == 1
    assert [metrics["guards/skipped"] for metrics in shown] == [0.0, 1.0, 1.0]
    assert "no update learns from its batch (time 2, told again at time 4)" in caplog.text
    assert kept(rank) == ["step-2.safetensors", "step-3.safetensors"]


def test_skip_of_a_metric_of_the_update_ends_the_first_step(tmp_path: Path) -> None:
    with rank_of_one(tmp_path, guards=["toy/loss > 100: skip"]) as rank:
        with pytest.raises(ConfigError, match=r"skip for toy/loss, expected one .*toy/total"):
            run(rank, 2)


def test_batches_of_warnings_are_bounded_in_number_and_resume_with_the_run(tmp_path: Path) -> None:
    guards = [f"x > {number}: warn" for number in range(12)]
    with rank_of_one(tmp_path, guards=guards) as rank:
        run(rank, 12)
        state = rank.flow.state(12)["guards"]

    assert kept(rank) == sorted(f"step-{number}.safetensors" for number in range(5, 13))
    assert len(kept(rank)) == MOST_FILES
    assert state["times"]["x > 3: warn"] == 9


def test_rank_whose_memory_keeps_growing_is_told(tmp_path: Path) -> None:
    """Base: the largest of the first five steps, about 0.4 GB of this process and 5 leaks.

    What earlier tests of this process have left is freed first: it must not shrink meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    leaked = []
    with rank_of_one(tmp_path, guards=["perf/host_growth > 1.1: stop"]) as rank:
        toy = rank.flow.spawn(Toy, ToyConfig())
        prompts = rank.flow.prompts(rank.config.data)
        with pytest.raises(GuardError, match="got perf/host_growth 1.* the rank is perf/host_rank"):
            for _ in rank.flow.steps(40):
                leaked.append(b"x" * (32 << 20))
                draw(prompts, toy)

    assert 6 <= len(leaked) < 40


def test_memory_that_stays_is_not_told(tmp_path: Path) -> None:
    with rank_of_one(tmp_path, guards=["perf/host_growth > 1.1: stop"]) as rank:
        toy = rank.flow.spawn(Toy, ToyConfig())
        prompts = rank.flow.prompts(rank.config.data)
        for _ in rank.flow.steps(40):
            draw(prompts, toy)
