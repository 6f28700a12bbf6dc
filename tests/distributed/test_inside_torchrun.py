"""`spmdflow.launch` inside a torchrun program, on some of its ranks; one torchrun, the tests judge.

The host has groups of its own and works with them before, between and after three launches: toy
models (every value asserted on arrival), a script without steps, and algos/ppo.py. Launches that
fail are drills; tests/distributed/test_session_unwound.py has sessions that fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.algos.runs import SMALL, steps_of
from tests.forked import torchrun

PROGRAMS = Path(__file__).parent / "programs"
WORLD_SIZE = 3
LAUNCHES = {"toys": (0, 1, 2), "without steps": (0, 2), "ppo": (1, 2)}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inside")
    run_program("inside_torchrun.py", str(folder), seconds=840)
    return folder


def run_program(name: str, *words: str, seconds: float) -> None:
    """torchrun programs/NAME WORDS, PPO being small; words begin with the folder of its output."""
    program = [f"--nproc-per-node={WORLD_SIZE}", str(PROGRAMS / name), *words]
    log = Path(words[0]) / "log.txt"
    torchrun([*program, *SMALL, "total_steps=1", "eval_every=0"], log, seconds=seconds)


@pytest.fixture(scope="module")
def ranks(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_every_launch_ends_with_status_0_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [seen["status"] for seen in ranks] == [dict.fromkeys(LAUNCHES, 0)] * WORLD_SIZE


def test_the_groups_of_the_host_work_before_between_and_after(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        alone = 2.0 if rank == 1 else 4.0
        assert seen["sums"] == [[6.0, alone]] * (1 + len(LAUNCHES))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_process_of_the_host_is_left_as_it_was(ranks: list[dict], launch: str) -> None:
    """Signals, threads, default group, environment ...; only building models draws numbers."""
    for rank, seen in enumerate(ranks):
        builds = launch == "ppo" and rank in LAUNCHES[launch]
        assert set(seen["changed"][launch]) <= ({"torch random"} if builds else set())


def test_a_run_on_some_ranks_moves_rows_and_writes_its_metrics(out: Path) -> None:
    assert [step["step"] for step in steps_of(out / "ppo")] == [1]
    assert [step["step"] for step in steps_of(out / "toys")] == [1, 2]
    assert all(step["transfer/bytes"] > 0 for step in steps_of(out / "toys"))
    assert (out / "ppo" / "config.yaml").is_file()
    compared = json.loads((out / "ppo" / "prediction.json").read_text())
    assert compared["bytes_agree"] and compared["steps"] == [1]
    assert [s["planned"] == s["counted"] > 0 for s in compared["weight_syncs"]] == [True]
    assert all(stage["measured"] > 0 for stage in compared["stages"])


def test_only_ranks_of_the_run_take_part(out: Path) -> None:
    spans = json.loads((out / "ppo" / "trace.json").read_text())

    assert {span["pid"] for span in spans} == set(LAUNCHES["ppo"])


def test_ranks_that_are_none_are_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["refused"] == [
            f"launch: got ranks {ranks}, expected ascending ranks from 0 to 2, each at most once; "
            f"correct the argument `ranks`"
            for ranks in ((2, 1), (1, 3), (1, 1))
        ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_launches_leave_no_descriptor_thread_or_group_behind(tmp_path: Path) -> None:
    rounds = 50
    run_program("many_launches.py", str(tmp_path), str(rounds), seconds=1500)

    for rank in range(WORLD_SIZE):
        left = json.loads((tmp_path / f"left-{rank}.json").read_text())
        assert left == [left[0]] * (1 + rounds), "descriptors, threads, groups"


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("failing")
    run_program("failing_launches.py", str(folder), seconds=840)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


FAILURES = {
    "script": ('RunFailed: run failed: rank 0: KeyError: "in the script\'s second step"', "", ""),
    "spawn": ("no weights here", "second", "spawn"),
    "reward": ("RewardError: reward.function", "reward", "compute_reward"),
    "judging": ("ValueError: while it judges", "second", "fail"),
    "asked later": ("KeyError", "", ""),
}


@pytest.mark.drill
@pytest.mark.parametrize("launch", FAILURES)
def test_failure_of_a_run_reaches_every_rank_as_an_exception_and_the_program_goes_on(
    failed: list[dict[str, Any]], launch: str
) -> None:
    cause, role, method = FAILURES[launch]
    for seen in failed:
        assert seen[launch]["result"].startswith("RunFailed: run failed: rank ")
        assert cause in seen[launch]["result"]
        record = seen[launch]["record"]
        assert (record["role"], record["method"]) == (role, method) and record["traceback"]
        assert seen[launch]["sum"] == WORLD_SIZE and seen[launch]["seconds"] < 80, seen[launch]


@pytest.mark.drill
def test_settings_that_cannot_work_are_refused_on_every_rank_before_anything_starts(
    failed: list[dict[str, Any]],
) -> None:
    for seen in failed:
        assert seen["settings"]["result"].startswith("SettingErrors: actor.model.path: no folder")
        assert seen["settings"]["sum"] == WORLD_SIZE


@pytest.mark.drill
@pytest.mark.parametrize("launch", ["made in Python", "loaded", "by name"])
def test_settings_made_in_python_loaded_or_named_run_after_runs_that_failed(
    failed: list[dict[str, Any]], launch: str
) -> None:
    assert [seen[launch]["result"] for seen in failed] == [0] * WORLD_SIZE


@pytest.mark.drill
def test_launches_that_fail_or_finish_leave_no_descriptor_thread_or_group_behind(
    failed: list[dict[str, Any]],
) -> None:
    for seen in failed:
        counts = [seen[name]["left"] for name in seen]
        assert counts == [counts[0]] * len(counts) and counts[0][2] == 1
