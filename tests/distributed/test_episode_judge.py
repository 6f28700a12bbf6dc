"""A judge that compares the episodes of a prompt, which ran on several ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.programs import episode_judge as program
from tests.distributed.ranks import RanksFailed

pytestmark = pytest.mark.drill
SCALE = 2.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, spawn_ranks: Any) -> dict[str, Any]:
    """Case -> columns by row, sorted by row."""
    out: Path = tmp_path_factory.mktemp("judge")
    spawn_ranks(program.run_all, 3, str(out))
    return {case: json.loads((out / f"{case}.json").read_text()) for case in program.CASES}


def groups_of(found: dict[str, Any]) -> dict[str, list[int]]:
    """What the rows do -> their positions, the same in each case."""
    groups: dict[str, list[int]] = {}
    for position, row in enumerate(found["one"]["row"]):
        groups.setdefault(json.loads(row)["does"], []).append(position)
    return groups


def ranks_of(columns: dict[str, Any], rows: list[int]) -> list[float]:
    """How many episodes of a group are shorter, by the recorded masks."""
    lengths = [sum(columns["response_mask"][row]) for row in rows]
    return [float(sum(other < own for other in lengths)) for own in lengths]


@pytest.mark.parametrize("case", ["one", "two", "queue"])
def test_scores_are_the_ranks_of_the_recorded_lengths(found: dict[str, Any], case: str) -> None:
    columns = found[case]
    rows = groups_of(found)["ranks"]
    ranks = ranks_of(columns, rows)

    assert [columns["scores"][row] for row in rows] == [rank * SCALE for rank in ranks]
    assert len(set(ranks)) > 1 and all(columns["valid"][row] for row in rows)
    for row in rows:
        rewards = columns["token_level_rewards"][row]
        assert rewards[-1] == columns["scores"][row] and not any(rewards[:-1])


@pytest.mark.parametrize("case", ["two", "queue"])
def test_ranks_and_queues_change_no_score(found: dict[str, Any], case: str) -> None:
    for name in (*program.COLUMNS, "ids", "parents"):
        # as text: nan is not equal to itself
        assert json.dumps(found[case][name]) == json.dumps(found["one"][name]), name


def test_judge_asks_the_model_and_its_requests_are_not_trained(found: dict[str, Any]) -> None:
    columns = found["two"]
    rows = groups_of(found)["asks"]
    opinions = set()
    for row, rank in zip(rows, ranks_of(columns, rows), strict=True):
        opinions.add(round(columns["scores"][row] - rank * SCALE, 4))
    (opinion,) = opinions

    assert opinion > 0 and len(columns["ids"]) == len(program.DOES) * program.SAMPLES
    assert all(columns["num_turns"][row] == 2 for row in rows)


@pytest.mark.parametrize("does", ["raises", "short"])
def test_group_whose_judge_fails_is_masked(found: dict[str, Any], does: str) -> None:
    columns = found["two"]
    for row in groups_of(found)[does]:
        assert not columns["valid"][row] and math.isnan(columns["scores"][row])
        assert not any(columns["response_mask"][row])


def test_episode_that_the_judge_omits_is_masked_and_the_others_count(found: dict[str, Any]) -> None:
    columns = found["two"]
    rows = groups_of(found)["omits"]

    assert [columns["valid"][row] for row in rows] == [False, True, True, True]


def test_failed_episodes_stay_failed_and_the_others_are_judged(found: dict[str, Any]) -> None:
    columns = found["two"]
    rows = groups_of(found)["partly"]
    valid = [columns["valid"][row] for row in rows]

    assert True in valid and False in valid
    for row in rows:
        assert math.isnan(columns["scores"][row]) is not columns["valid"][row]


def test_metrics_have_the_numbers_of_judge_and_environment(found: dict[str, Any]) -> None:
    metrics = found["two"]["metrics"]
    valid = found["two"]["valid"]
    groups = groups_of(found)
    failed = 2 * program.SAMPLES + sum(not valid[row] for row in groups["partly"])

    assert metrics["reward/environment_score"] == 0.25
    assert metrics["reward/dropped"] == failed and metrics["episodes/left_out"] == 1
    assert metrics["reward/length"] > 1 and metrics["reward/said"] > 0


def test_failing_judge_ends_a_run_that_raises(tmp_path: Path, spawn_ranks: Any) -> None:
    with pytest.raises(RanksFailed, match="judge_env.py:judge' raised ValueError: no opinion"):
        spawn_ranks(program.run_strict, 2, str(tmp_path))
