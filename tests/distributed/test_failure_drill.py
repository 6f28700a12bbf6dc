"""Every way to go, in every place: soon out, the culprit named, no process left.

Each case is a real torchrun with three ranks. By default an exception and a kill; one case of each
kind is a drill, and the whole matrix is slow.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.drill import TORCHRUN, Drill

LONG = 600.0
LIMIT = 10.0
"""Limits of the call: one that nobody reaches, and one after which a stopped rank is named."""


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    drill = Drill(run_dir, [[*TORCHRUN, "--standalone", "--nproc-per-node", "3"]], 3)
    yield drill
    drill.end()


CAUSES = {
    "exception": ("exception", "RuntimeError: drill in a lane"),
    "exit": ("death", "exited with status 7"),
    "kill": ("death", "killed by SIGKILL"),
}
MARKS: dict[tuple[str, str, int], list[pytest.MarkDecorator]] = {
    ("compute", "exception", 2): [pytest.mark.drill],
    ("compute", "kill", 0): [],
    ("transfer", "exit", 2): [pytest.mark.drill],
    ("transfer", "kill", 2): [pytest.mark.drill],
    ("idle", "kill", 2): [pytest.mark.drill],
    ("transfer", "exception", 0): [pytest.mark.drill],
}
MATRIX = [
    pytest.param(*case, marks=MARKS.get(case, [pytest.mark.slow]))
    for where in ("compute", "transfer", "idle")
    for how in ("exception", "exit", "kill")
    for victim in (2, 0)
    if (where, how) != ("idle", "exception")  # nothing runs: see the error in the script
    for case in [(where, how, victim)]
]


@pytest.mark.parametrize(("where", "how", "victim"), MATRIX)
def test_rank_that_fails_is_named_and_everything_ends(
    drill: Drill, where: str, how: str, victim: int
) -> None:
    kind, cause = CAUSES[how]
    lives_to_tell = victim != 0 or how == "exception"
    names = ["failure.json"] if lives_to_tell else ["failure-rank1.json", "failure-rank2.json"]

    drill.start(where, "wait" if how == "kill" else how, victim, LONG)
    with drill.stopped_torchrun(until=names):
        drill.let_go()
        if how == "kill":
            drill.signal_rank(victim, signal.SIGKILL)
    drill.wait_until_out()

    for name in names:
        failure = drill.failure(name)
        assert (failure["rank"], failure["kind"]) == (victim, kind), failure
        assert cause in failure["cause"]
        assert lives_to_tell or where == "idle" or "running actor.harm" in failure["cause"]
    if lives_to_tell and where != "idle":
        assert (failure["role"], failure["method"]) == ("actor", "harm")
        assert (failure["call"], failure["lane"]) == (2, where)
        assert f"RUN FAILED: rank {victim}, actor.harm (call 2, {where} lane): " in drill.log()
    if where == "idle" and how == "kill" and lives_to_tell:
        assert re.search(r"while idle after \S+ \(call \d+\)", failure["cause"])
    if how == "exception":
        assert 'raise RuntimeError("drill in a lane")' in failure["traceback"]


@pytest.mark.drill
def test_error_in_the_script_is_shown_with_its_traceback(drill: Drill) -> None:
    drill.start("idle", "exception", 0, LONG)
    drill.wait_until_out()

    failure = drill.failure()
    assert (failure["rank"], failure["kind"]) == (0, "script")
    assert failure["cause"] == "RuntimeError: drill in the script"
    assert drill.log().count('raise RuntimeError("drill in the script")') == 1


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("compute", marks=pytest.mark.slow),
        pytest.param("transfer", marks=pytest.mark.slow),
        pytest.param("idle", marks=pytest.mark.drill),
    ],
)
def test_ranks_end_when_torchrun_is_killed(drill: Drill, where: str) -> None:
    drill.start(where, "wait", 1, LONG)
    drill.torchruns[0].kill()
    drill.wait_until_out()

    failure = drill.failure()
    assert failure["kind"] == "launcher"
    assert f"parent process {drill.torchruns[0].pid}" in failure["cause"]


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        pytest.param("compute", 1, marks=pytest.mark.drill),
        pytest.param("compute", 0, marks=pytest.mark.drill),
        pytest.param("transfer", 1, marks=pytest.mark.slow),
        pytest.param("transfer", 0, marks=pytest.mark.slow),
    ],
)
def test_stopped_rank_is_named_at_the_limit_of_the_call(
    drill: Drill, where: str, victim: int
) -> None:
    drill.start(where, "wait", victim, LIMIT)
    drill.signal_rank(victim, signal.SIGSTOP)
    drill.wait_until_out()

    for name in ["failure-rank1.json", "failure-rank2.json"] if victim == 0 else ["failure.json"]:
        failure = drill.failure(name)
        assert (failure["rank"], failure["kind"]) == (victim, "stopped"), failure


@pytest.mark.drill
@pytest.mark.parametrize("victim", [2, 0])
def test_reports_of_a_run_go_into_no_folder_that_took_the_place_of_its_own(
    drill: Drill, victim: int
) -> None:
    """The controller reports the end of rank 2, the other ranks that of the controller."""
    drill.start("compute", "wait", victim, LONG)
    drill.run_dir.rename(drill.run_dir.with_name("moved"))
    drill.run_dir.mkdir()
    drill.signal_rank(victim, signal.SIGKILL)
    drill.wait_until_out()

    assert list(drill.run_dir.iterdir()) == []


@pytest.mark.slow
def test_rank_that_does_not_run_while_its_neighbour_ends_a_stopped_controller_names_it_alike(
    drill: Drill,
) -> None:
    drill.start("compute", "wait", 0, LIMIT)
    drill.signal_rank(0, signal.SIGSTOP)
    time.sleep(3.0)  # every rank has looked
    drill.signal_rank(2, signal.SIGSTOP)
    drill.wait_until(lambda: drill.alive_ranks() == [2])
    drill.signal_rank(2, signal.SIGCONT)
    drill.wait_until_out()

    for name in ("failure-rank1.json", "failure-rank2.json"):
        failure = drill.failure(name)
        assert (failure["rank"], failure["kind"]) == (0, "stopped"), failure


@pytest.mark.slow
def test_sigterm_to_torchrun_without_a_failure_ends_every_rank(drill: Drill) -> None:
    drill.start("compute", "wait", 1, LIMIT)  # else torchrun ends it
    drill.torchruns[0].terminate()
    drill.wait_until_out()

    assert "asked to end by SIGTERM" in drill.log()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["compute", "idle"])
def test_ctrl_c_pressed_again_ends_every_rank(drill: Drill, where: str) -> None:
    drill.start(where, "wait", 1, LONG)
    drill.torchruns[0].send_signal(signal.SIGINT)
    drill.wait_until(lambda: "press Ctrl-C again to stop at once" in drill.log())
    drill.torchruns[0].send_signal(signal.SIGINT)
    drill.wait_until_out()

    assert drill.failure()["kind"] == "interrupt"
