"""Several reward functions in one pool, on any number of processes."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path

import pytest

from spmdflow.errors import RewardError
from spmdflow.rewards.pool import RewardPool

FUNCTIONS = '''
import os, time

def thirds(prompt, response, row):
    """A number that has no short binary form."""
    row["seen"] = True  # which the next function must not see
    return {"score": len(response) / 3, "pid": os.getpid()}

def faulty(prompt, response, row, *, bad="vanish"):
    """Does what the response says, if that is its argument too."""
    assert "seen" not in row
    if response == bad == "vanish":
        os._exit(7)
    if response == bad == "hang":
        time.sleep(600)
    if response == "hog":
        blocks = []
        while True:
            blocks.append(bytes(1 << 32))  # calloc: counted, never touched
    return {"score": len(prompt) * 0.1, "pid": os.getpid()}
'''
RESPONSES = ["", "a", "bcd", "vanish", "hang", "xy", "", "a", "vanish", "xy"]
LIMIT = 4.0  # seconds: far above what a sample takes on a busy machine, and no long wait


@pytest.fixture(scope="module")
def terms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two functions of one file; the second one twice."""
    path = tmp_path_factory.mktemp("terms") / "own.py"
    path.write_text(FUNCTIONS)
    return {
        "long": f"0.7 * {path}:thirds",
        "faulty": f"-0.1 * {path}:faulty(bad='vanish')",
        "slow": f"{path}:faulty(bad='hang')",
    }


def score(
    terms: object, responses: list[str], *, processes: int, seconds: float = LIMIT
) -> list[dict[str, float]]:
    with RewardPool(terms, processes, sample_seconds=seconds, on_error="zero") as pool:
        prompts = ["p" * number for number in range(len(responses))]
        return pool.score(prompts, responses, [{} for _ in responses]).results


@pytest.fixture(scope="module")
def scored(terms: dict[str, str]) -> list[dict[str, float]]:
    """What one process makes of the responses."""
    return score(terms, RESPONSES, processes=1)


def test_one_process_runs_all_functions_and_only_the_failed_one_scores_zero(scored):
    for number, (response, result) in enumerate(zip(RESPONSES, scored, strict=True)):
        long = len(response) / 3
        other = number * 0.1
        faulty, slow = (0.0 if response == bad else other for bad in ("vanish", "hang"))
        assert result["score"] == 0.7 * long + -0.1 * faulty + slow
        assert (result["long"], result["faulty"], result["slow"]) == (long, faulty, slow)
        assert result["errors"] == (response in ("vanish", "hang"))
        if not result["errors"]:
            assert result["pid"] == result["faulty_pid"] == result["slow_pid"]


def test_row_is_scored_by_the_functions_of_its_source(tmp_path):
    path = tmp_path / "sources.py"
    path.write_text(
        "def letters(prompt, response, row): return {'score': len(response), 'pairs': 2}\n"
        "def words(prompts, responses, rows): return [len(text.split()) for text in responses]\n"
    )
    function = {
        "right": {"essay": f"0.5 * {path}:words", "spelling": f"{path}:letters"},
        "all": f"10 * {path}:letters",
    }
    rows = [{"kind": kind} for kind in ("essay", "spelling", "other", "essay")]

    with RewardPool(function, 2, source_column="kind") as pool:
        results = pool.score([""] * 4, ["a bc", "abc", "a", "a b c"], rows).results

    assert results == [
        {"score": 0.5 * 2 + 40, "right": 2.0, "all": 4.0, "all_pairs": 2.0},
        {"score": 3.0 + 30, "right": 3.0, "pairs": 2.0, "all": 3.0, "all_pairs": 2.0},
        {"score": 10.0, "all": 1.0, "all_pairs": 2.0},
        {"score": 0.5 * 3 + 50, "right": 3.0, "all": 5.0, "all_pairs": 2.0},
    ]


def test_row_of_a_source_without_a_function_ends_the_call_with_the_known_ones(tmp_path):
    path = tmp_path / "sources.py"
    path.write_text("def letters(prompt, response, row): return len(response)\n")
    function = {"right": {"essay": f"{path}:letters", "sums": f"{path}:letters"}}

    with (
        RewardPool(function, on_error="drop") as pool,
        pytest.raises(RewardError) as caught,
    ):
        pool.score(["p"], ["r"], [{"source": "prose"}], row_ids=[7])

    assert str(caught.value).startswith(
        "reward.function: row 7 has source='prose', but the tables have essay, sums; add this"
    )


@pytest.mark.drill
def test_scores_have_the_same_bits_on_any_number_of_processes(terms, scored):
    kept = [
        [{k: v for k, v in result.items() if not k.endswith("pid")} for result in results]
        for results in (scored, score(terms, RESPONSES, processes=3))
    ]

    assert kept[0] == kept[1]


def test_message_names_the_function_that_failed_and_the_row(terms):
    with RewardPool(terms, 2, sample_seconds=LIMIT) as pool:
        with pytest.raises(RewardError) as caught:
            pool.score(["p"] * 3, ["a", "hang", "b"], [{"n": 1}] * 3, row_ids=[70, 71, 72])

    file = terms["slow"].partition(":")[0]
    assert str(caught.value).startswith(f"reward.function '{file}:faulty' ran longer than ")
    assert f"response: 'hang'\nrow 71: {{\"n\": 1}}\nfunction: {file}:9\n" in str(caught.value)


def test_function_that_takes_all_memory_fails_alone(terms):
    results = score({"faulty": terms["faulty"]}, ["a", "hog", "b"], processes=1, seconds=100.0)

    assert [result["errors"] for result in results] == [0, 1, 0]
    assert results[0]["pid"] == results[2]["pid"]  # a MemoryError, not a killed process


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)
def test_library_that_stops_itself_by_a_signal_does_so_in_a_worker_process():
    slow = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1000000!}"]
    responses = [r"\boxed{\frac{2}{4}}", *slow, r"\boxed{0.5}", r"\boxed{" + "(" * 900 + "}"]

    with RewardPool("spmdflow.rewards.math:score(seconds=2)", 1, sample_seconds=280) as pool:
        pool.score([""], ["0.5"], [{"answer": "1"}])  # imports the library
        results = pool.score([""] * 5, responses, [{"answer": "1/2"}] * 5).results

    # seconds are of the processor; a sample that went on would end the call after sample_seconds
    assert [result["score"] for result in results] == [1, 0, 0, 1, 0]


def test_pool_that_is_closed_while_it_scores_ends_all_that_ask_it(terms):
    """The first caller scores, the second waits for its turn; each would take half an hour."""
    pool = RewardPool(terms, 2, sample_seconds=200.0, on_error="zero")
    caught = list[str]()
    processes = [process._popen for process in pool._processes]

    def ask() -> None:
        try:
            pool.score([""] * 20, ["hang"] * 20, [{} for _ in range(20)])
        except RewardError as err:
            caught.append(str(err).partition(",")[0])

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    while not any(process.pending for process in pool._processes):
        time.sleep(0.01)

    pool.close()
    for thread in asking:
        thread.join(60)

    assert not any(thread.is_alive() for thread in asking)
    assert caught == ["reward.function: got the end of its run while it scored"] * 2
    assert pool._processes == [] and all(each.poll() is not None for each in processes)


FORKS = """
import os
def score(prompt, response, row):
    os.fork()
    return 1.0
"""


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_function_that_forks_and_lets_the_child_return_is_refused(
    tmp_path: Path, on_error: str
) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    name = f"{tmp_path}/forks.py:score"

    with RewardPool(name, 1, on_error=on_error) as pool, pytest.raises(RewardError) as caught:
        for _ in range(50):
            pool.score(["1+2="] * 64, ["3"] * 64, [{}] * 64)

    assert str(caught.value) == (
        f"reward.function {name!r} forked, and its child returned as well; expected one return "
        f"for each sample; end the child with os._exit(0), or start it with subprocess\n"
        f"function: {tmp_path}/forks.py:3"
    )
