"""A run that ends well leaves its last step, with or without `flow.save` in its loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from spmdflow.controller.flow import Flow
from spmdflow.worker_api.register import register
from tests.unit.toy_flow import TASK, Rank, Toy, ToyConfig, draw, rank_of_one


class Learner(Toy):
    """Has an update, and a state that shows how many there were."""

    num_updates = 0

    @register(transfer_mode="3D_PROTO", reads=("number",), minibatches=True)
    def learn(self, batch: TensorDict) -> dict[str, Any]:
        """One more update."""
        self.num_updates += 1
        return {"toy/updates": float(self.num_updates)}


class Counter(Toy):
    """A class of the user's own with a state, which no update in mini-batches changes."""

    evaluation = "judge"

    @register(transfer_mode="3D_PROTO", reads=("prompts",))
    def judge(self, batch: TensorDict, *, prefix: str) -> dict[str, Any]:
        """Judges nothing."""
        return {}

    def save_state(self, folder: Path) -> None:
        """A file."""
        torch.save(1, folder / "count.pt")


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def run(rank: Rank, body: Callable[[Flow, Any, int], bool | None], worker: type[Toy]) -> None:
    """What `spmdflow.run` does with a script of three steps. body: True leaves the loop."""
    flow = rank.flow
    toy = flow.spawn(worker, ToyConfig())
    prompts = flow.prompts(rank.config.data)
    with flow._saving.finishing():
        for step in flow.steps(3):
            batch = draw(prompts, toy)
            if hasattr(toy.target.worker_class, "learn"):
                step.log(toy.learn(batch))
            if body(flow, step, step.number):
                break
        flow.end()


BODIES: dict[str, tuple[Callable[[Flow, Any, int], bool | None], list[str]]] = {
    "without flow.save": (lambda flow, step, number: None, ["step-3"]),
    "with save_every=0": (lambda flow, step, number: flow.save(every=0), ["step-3"]),
    "with save_every=2": (lambda flow, step, number: flow.save(every=2), ["step-2", "step-3"]),
    "left early": (lambda flow, step, number: number == 2, ["step-2"]),
}


@pytest.mark.parametrize("case", BODIES)
def test_last_step_of_a_run_that_trains_is_saved(tmp_path: Path, case: str) -> None:
    body, expected = BODIES[case]
    with rank_of_one(tmp_path) as rank:
        run(rank, body, Learner)

    assert saved(tmp_path) == expected


def test_last_step_of_a_worker_with_a_state_of_its_own_is_saved(tmp_path: Path) -> None:
    with rank_of_one(tmp_path) as rank:
        run(rank, lambda flow, step, number: None, Counter)

    assert saved(tmp_path) == ["step-3"]


def test_evaluation_before_the_first_step_is_not_saved(tmp_path: Path) -> None:
    with rank_of_one(tmp_path, eval_path=str(TASK / "eval.jsonl"), eval_prompts=4) as rank:
        flow = rank.flow
        counter = flow.spawn(Counter, ToyConfig())
        prompts = flow.prompts(rank.config.data)
        flow.evaluate(counter)
        with flow._saving.finishing():
            for _ in flow.steps(1):
                draw(prompts, counter)
            flow.end()

    assert saved(tmp_path) == ["step-1"]


def test_metrics_of_a_step_that_the_script_left_early_are_written(tmp_path: Path) -> None:
    with rank_of_one(tmp_path) as rank:
        run(rank, lambda flow, step, number: number == 2, Learner)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["toy/updates"] for line in lines] == [1.0, 2.0]


def test_run_that_trains_nothing_leaves_nothing(tmp_path: Path) -> None:
    with rank_of_one(tmp_path) as rank:
        run(rank, lambda flow, step, number: None, Toy)

    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("every", "expected"), [(0, []), (2, ["step-2"])])
def test_save_last_false_leaves_the_last_step_out(
    tmp_path: Path, every: int, expected: list[str]
) -> None:
    with rank_of_one(tmp_path) as rank:
        rank.config.run.save_last = False
        run(rank, lambda flow, step, number: flow.save(every=every), Learner)

    assert saved(tmp_path) == expected
