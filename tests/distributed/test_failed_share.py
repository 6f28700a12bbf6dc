"""reward.max_failed_fraction: the limit holds for every call, however many calls are under way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.schema import RewardConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.errors import RewardError
from spmdflow.models.reward import RewardWorker, count_dropped
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.worker import WorkerContext

MODEL = Path(__file__).resolve().parents[2] / "algos" / "arithmetic" / "model"
JUDGE = """
def score(prompt, response, row):
    if row["fails"]:
        raise ValueError("no judge for " + row["name"])
    return 1.0
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RewardWorker]:
    """A reward role on one rank, whose function fails on the rows that say so."""
    (tmp_path / "judge.py").write_text(JUDGE)
    cfg = RewardConfig(
        function=f"{tmp_path}/judge.py:score",
        on_error="drop",
        max_failed_fraction=0.05,
        tokenizer_path=str(MODEL),
    )
    made = RewardWorker(cfg, context())
    yield made
    made.close()


def context() -> WorkerContext:
    groups = GroupTable(0, 60.0)
    return WorkerContext("reward", Layout.data_parallel((0,)), 0, groups, torch.device("cpu"), 0)


def rows_named(names: list[str], *, fail: bool) -> TensorDict:
    batch = TensorDict(batch_size=[len(names)])
    for column in ("prompts", "responses"):
        batch[column] = ragged_from_rows([torch.tensor([5, 6])] * len(names), dtype=torch.int64)
    batch.set_non_tensor("prompt_text", ["1+2="] * len(names))
    batch.set_non_tensor("row", [json.dumps({"name": name, "fails": fail}) for name in names])
    return batch


def call_of(number: int, rows: int) -> Command:
    return Command(number, 1, torch.arange(rows))


def judged_early(worker: RewardWorker, batch: TensorDict, call: Command) -> Future[Any]:
    """What the early thread of a call hands over at its turn."""
    future: Future[Any] = Future()
    future.set_result(worker.judge(batch, call))
    return future


def test_a_later_call_without_failures_does_not_hide_those_of_an_earlier_one(worker):
    failing = rows_named(["a0", "a1"], fail=True)
    clean = rows_named(["b0"], fail=False)
    first = call_of(1, 2)
    second = call_of(2, 1)
    begun_first = judged_early(worker, failing, first)
    judged_early(worker, clean, second)

    worker.call = first
    worker.early_result = begun_first
    with pytest.raises(RewardError) as caught:
        worker.compute_reward(failing)

    text = str(caught.value)
    assert "reward.max_failed_fraction: got 2 failed rows among the 2 of one call (1)" in text
    assert "ValueError: no judge for a0" in text


def test_a_refused_call_names_its_own_row_where_a_later_call_fails_too(worker):
    failing = rows_named(["a0", "a1"], fail=True)
    later = rows_named(["b0"], fail=True)
    first = call_of(1, 2)
    second = call_of(2, 1)
    begun_first = judged_early(worker, failing, first)
    begun_second = judged_early(worker, later, second)

    for call, begun, batch, name in (
        (first, begun_first, failing, "a0"),
        (second, begun_second, later, "b0"),
    ):
        worker.call = call
        worker.early_result = begun
        with pytest.raises(RewardError, match=f"no judge for {name}"):
            worker.compute_reward(batch)


def test_rows_beyond_the_limit_are_refused_though_no_cause_is_known():
    valid = torch.tensor([True, False, True, True])

    with pytest.raises(RewardError, match="got 1 failed rows among the 4") as caught:
        count_dropped(
            context(), (0,), valid, most=0.2, key="reward.max_failed_fraction", first_failure=""
        )

    assert "the first failure" not in str(caught.value)
