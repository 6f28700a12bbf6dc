"""Random requests against endpoint, recorder and generator: none ends a run, or is unexpected."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.programs import fuzz_env
from tests.distributed.test_episodes import (
    LIMITS,
    ROWS,
    SAMPLING,
    new_generator,
    new_runner,
    seed_of_turn,
)

PER_EPISODE = 100
FUZZED = replace(LIMITS, max_turns=10_000, may_fork=True)


@pytest.mark.parametrize("num_requests", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_requests_end_no_run_and_no_episode(
    num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    environment = f"{Path(fuzz_env.__file__)}:episode"
    rows = [{"seed": seed, "requests": PER_EPISODE} for seed in range(num_requests // PER_EPISODE)]
    runner = new_runner("", new_generator(), environment=environment, limits=FUZZED)
    try:
        found = runner.run(rows, SAMPLING, seed_of_turn)
    finally:
        runner.close()

    assert [each.cause for each in found if each.cause] == []
    scores = [each.scores for each in found if each.scores]
    total = {name: sum(each[name] for each in scores) for name in scores[0]}
    assert total["score"] == num_requests
    assert total["status_500"] == 0
    assert total["status_200"] > num_requests / 10 and total["refused"] > num_requests / 10
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_request_that_the_generator_cannot_take_fails_its_episode_alone() -> None:
    longer_than_the_context = replace(LIMITS, max_new_tokens=1000)
    runner = new_runner("asks", new_generator(), limits=longer_than_the_context)
    rows = [{"max_tokens": 1}, {"max_tokens": 900}, {"max_tokens": 1}]
    try:
        found = runner.run(rows, SAMPLING, seed_of_turn)
        again = runner.run(ROWS[:2], SAMPLING, seed_of_turn)
    finally:
        runner.close()

    assert [bool(each.cause) for each in found] == [False, True, False]
    assert "expected at most the model's 64 positions" in found[1].cause
    assert '"max_tokens": 900' in found[1].cause
    assert [each.cause for each in again] == ["", ""]
