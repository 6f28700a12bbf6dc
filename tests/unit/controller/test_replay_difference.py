"""How far a replayed column is from the recorded one: relative to the largest finite number."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from spmdflow.data.column import Column
from spmdflow.replay import _difference


@pytest.mark.parametrize(
    ("recorded", "replayed", "difference"),
    [
        ([1.0, nan, inf], [1.0, nan, inf], 0.0),
        ([1.0, -4.0], [1.5, -4.0], 0.125),
        ([inf, 4.0], [inf, 3.0], 0.25),
        ([nan, 4.0], [nan, 3.0], 0.25),
        ([nan, 4.0], [1.0, 4.0], inf),
        ([inf, 4.0], [4.0, 4.0], inf),
        ([0.0, 0.0], [0.0, 1e-9], inf),
    ],
)
def test_difference_is_relative_to_the_largest_finite_number(
    recorded: list[float], replayed: list[float], difference: float
) -> None:
    columns = [Column("dense", torch.tensor(values)) for values in (recorded, replayed)]

    assert _difference(*columns)[0] == difference


def test_integers_that_differ_are_infinitely_far() -> None:
    columns = [Column("dense", torch.tensor(values)) for values in ([1, 2], [1, 3])]

    assert _difference(*columns)[0] == inf
