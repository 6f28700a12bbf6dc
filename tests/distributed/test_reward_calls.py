"""Reward functions that are `async def`, take many samples at once, or are called again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmdflow.errors import RewardError
from spmdflow.rewards.pool import RewardPool

FUNCTIONS = '''
import asyncio, time

running = 0

async def judge(prompt, response, row):
    """Waits for three others: ends only if four calls run at once."""
    global running
    running += 1
    while running < 4:
        await asyncio.sleep(0.001)
    return {"score": len(response), "prompt_length": len(prompt)}

async def slow(prompt, response, row):
    if response == "hang":
        await asyncio.sleep(600)
    if response == "block":
        time.sleep(600)
    if response == "raise":
        raise ValueError("a judge's own error")
    return 1.0

tries = {}

def flaky(prompt, response, row, *, failures=2):
    tries[response] = tries.get(response, 0) + 1
    if tries[response] <= failures:
        raise ConnectionError(f"try {tries[response]}")
    return tries[response]

async def flaky_async(prompt, response, row, *, failures=2):
    return flaky(prompt, response, row, failures=failures)

def batch(prompts, responses, rows, *, short=False):
    assert all(row["n"] == number for row, number in zip(rows, map(len, prompts)))
    longest = max(map(len, responses))
    results = [{"score": len(each) / longest, "together": len(responses)} for each in responses]
    return results[:-1] if short else results

async def batch_async(prompts, responses, rows):
    await asyncio.sleep(0)
    return batch(prompts, responses, rows)
'''
LIMIT = 2.5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "own.py"
    path.write_text(FUNCTIONS)
    return path


def score(function: object, responses: list[str], **settings: Any) -> list[dict[str, Any]]:
    settings = {"sample_seconds": 60.0, "on_error": "zero"} | settings
    with RewardPool(function, settings.pop("num_processes", 1), **settings) as pool:
        prompts = ["p" * number for number in range(len(responses))]
        rows = [{"n": number} for number in range(len(responses))]
        return pool.score(prompts, responses, rows).results


def test_calls_of_an_async_function_run_at_once_and_results_are_in_order(file: Path) -> None:
    responses = ["r" * number for number in range(8)]

    results = score(f"{file}:judge", responses, concurrency=4)

    assert [result["score"] for result in results] == [*range(8)]
    assert [result["prompt_length"] for result in results] == [*range(8)]
    assert sum(result["errors"] for result in results) == 0


def test_concurrency_is_shared_by_the_processes(file: Path) -> None:
    with RewardPool(f"{file}:judge", 2, concurrency=9) as pool:
        assert [process._concurrency for process in pool._processes] == [4, 4]


def test_async_call_beyond_its_limit_fails_alone_and_is_told_with_its_line(file: Path) -> None:
    with RewardPool(f"{file}:slow", 1, sample_seconds=LIMIT, on_error="zero") as pool:
        judgement = pool.score([""] * 4, ["a", "hang", "raise", "b"], [{}] * 4)

    assert [result["score"] for result in judgement.results] == [1, 0, 0, 1]
    said = judgement.first_failure
    assert f"ran longer than reward.sample_seconds ({LIMIT:g} s)" in said
    line = FUNCTIONS.splitlines().index("        await asyncio.sleep(600)") + 1
    assert f'File "{file}", line {line} in slow' in said


@pytest.mark.drill
def test_async_function_that_blocks_is_killed_and_the_others_are_scored(file: Path) -> None:
    with RewardPool(f"{file}:slow", 1, sample_seconds=LIMIT, on_error="zero") as pool:
        judgement = pool.score([""] * 3, ["block", "a", "b"], [{}] * 3)

    assert [result["score"] for result in judgement.results] == [0, 1, 1]
    line = FUNCTIONS.splitlines().index("        time.sleep(600)") + 1
    assert f'File "{file}", line {line} in slow' in judgement.first_failure


def test_traceback_of_an_async_function_begins_in_its_own_file(file: Path) -> None:
    with pytest.raises(RewardError, match="raised ValueError: a judge's own error") as caught:
        score(f"{file}:slow", ["raise"], on_error="raise")

    assert "spmdflow" not in str(caught.value).partition("Traceback")[2]


@pytest.mark.parametrize("name", ["flaky", "flaky_async"])
def test_call_that_raises_is_repeated_as_often_as_it_may_be(file: Path, name: str) -> None:
    (enough,) = score(f"{file}:{name}(failures=1)", ["a"], retries=1)
    (too_few,) = score(f"{file}:{name}(failures=2)", ["a"], retries=1)

    assert (enough["score"], enough["errors"]) == (2, 0)
    assert (too_few["score"], too_few["errors"]) == (0, 1)


@pytest.mark.parametrize("name", ["batch", "batch_async"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_batched_function_gets_many_samples_and_answers_each(
    file: Path, name: str, num_processes: int
) -> None:
    responses = ["r" * (number + 1) for number in range(12)]

    results = score(f"{file}:{name}", responses, num_processes=num_processes)

    assert all(result["errors"] == 0 and result["together"] > 0 for result in results)
    assert any(result["together"] > 1 for result in results)
    assert all(0 < result["score"] <= 1 for result in results)


def test_batch_with_too_few_results_fails_as_a_whole(file: Path) -> None:
    with pytest.raises(RewardError, match=r"returned \d+ results for \d+ samples"):
        score(f"{file}:batch(short=True)", ["a", "b", "c", "d"], on_error="raise")


def test_terms_of_all_forms_add_up(file: Path) -> None:
    terms = {
        "judged": f"{file}:slow",
        "together": f"0.5 * {file}:batch",
        "again": f"0.1 * {file}:flaky(failures=1)",
    }

    (one, other) = score(terms, ["ab", "abcd"], retries=1)

    assert one["judged"] == other["judged"] == 1
    assert (one["again"], other["again"]) == (2, 2)
    assert one["errors"] == other["errors"] == 0
    assert other["score"] == 1 + 0.5 * other["together"] + 0.2
