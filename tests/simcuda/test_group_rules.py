"""NCCL's rules for several ranks: what it refuses is refused, and what hangs there is told here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.simcuda.conftest import Simulated

PASSES = (
    "result_that_is_read_before_the_wait",
    "input_that_is_written_before_the_wait",
    "broadcast_on_a_stream_that_waits_for_nobody",
    "mean_of_bfloat16",
    "messages_after_a_first_collective",
    "collective_that_a_slow_rank_reaches",
)
Found = Mapping[str, Mapping[str, str]]


@pytest.fixture(scope="module")
def found(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Case -> rank -> how it ended."""
    program = Path(__file__).parent / "programs" / "group_rules.py"
    output = simulated(program, tmp_path_factory.mktemp("rules"))
    return dict(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("case", PASSES)
def test_ranks_see_what_they_would_on_nccl(found: Found, case: str) -> None:
    assert set(found[case].values()) == {""}, found[case]


def test_two_ranks_on_one_device_are_refused(found: Found) -> None:
    for error in found["two_ranks_on_one_device"].values():
        assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0" in error


@pytest.mark.parametrize(
    ("case", "told", "other"),
    [
        (
            "first_messages_that_a_rank_does_not_reach",
            r"first use, by (send|recv) number 1 on nccl:0:\[0, 1, 2\] hangs .* ranks \[2\] have",
            "rank 2: has done nothing",
        ),
        (
            "collective_that_a_rank_does_not_reach",
            r"allreduce number 2 on nccl:0:\[0, 1\] hangs on rank 0 at .* ranks \[1\] have not",
            "rank 1: has done nothing",
        ),
        (
            "collectives_of_two_groups_in_two_orders",
            r"allreduce number 1 on gloo:[12]:\[0, 1\] hangs on rank [01] at .* have not",
            ": waits in allreduce number 1 on gloo:",
        ),
    ],
)
def test_collective_that_hangs_is_told_with_who_is_missing(
    found: Found, case: str, told: str, other: str
) -> None:
    assert any(re.search(told, text) and other in text for text in found[case].values()), found
