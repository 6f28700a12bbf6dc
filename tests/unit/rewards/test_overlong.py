"""The length penalty against its formula, and where it is added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.config.algorithm import OverlongConfig
from spmdflow.data.ragged import ragged_from_rows as ragged
from spmdflow.data.ragged import rows_of
from spmdflow.objectives.advantage import add_overlong_penalty, overlong_penalty
from spmdflow.objectives.loss import Reduce
from spmdflow.worker_api.metric import Mean


def definition(length: int, limit: int, buffer: int) -> float:
    """DAPO's equation 13, case by case."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


@given(st.lists(st.integers(0, 60), min_size=1), st.integers(1, 40), st.integers(0, 40))
def test_penalty_equals_its_definition(lengths: list[int], limit: int, buffer: int) -> None:
    found = overlong_penalty(torch.tensor(lengths), max_tokens=limit, buffer_tokens=buffer)

    expected = [definition(length, limit, buffer) for length in lengths]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_penalty_is_added_to_the_last_token_and_reported() -> None:
    rows = [torch.zeros(3), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), torch.zeros(0)]
    batch = TensorDict({"token_level_rewards": ragged(rows)}, batch_size=[3])
    metrics: dict[str, Any] = {}
    reduce: Reduce = lambda x: x  # noqa: E731

    made = add_overlong_penalty(
        batch,
        cfg=OverlongConfig(buffer_tokens=4, weight=0.5),
        max_tokens=6,
        reduce=reduce,
        report=metrics.update,
    )

    found = [row.tolist() for row in rows_of(made["token_level_rewards"])]
    assert found == [[0.0, 0.0, -0.125], [0.0, 0.0, 0.0, 0.0, 1 - 0.375], []]
    assert rows[1][-1] == 1  # the scores themselves stay
    assert metrics == {"reward/overlong": Mean(-0.5, 3.0)}
