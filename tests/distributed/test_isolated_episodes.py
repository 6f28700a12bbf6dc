"""A process for each episode: what one does reaches no other, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.episode import EpisodeConfig, check_episode
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.errors import ConfigError
from tests.distributed.programs import isolated_env

ENVIRONMENT = f"{isolated_env.__file__}:episode"
WAIT_SECONDS = 300.0
KEY = "actor.rollout.episode"
MEMORY_MB = 200
OUTPUT_BYTES = 20_000


def play(
    rows: Sequence[dict[str, Any]], *, seconds: float = WAIT_SECONDS, **settings: Any
) -> list[EndedEpisode]:
    """Runs these rows at once, each in a process of its own; how they ended, in order."""
    values = {"environment": ENVIRONMENT, "seconds": seconds, "isolation": "process", **settings}
    pool = EnvironmentPool(EpisodeConfig(**values))
    waker, wake = socket.socketpair()
    with waker, wake:
        pool.begin(dict(enumerate(rows)))
        ended: dict[int, EndedEpisode] = {}
        limit = time.monotonic() + WAIT_SECONDS
        while len(ended) < len(rows):
            assert time.monotonic() < limit
            pool.start_waiting(lambda number: {"base_url": "", "model": "", "api_key": ""})
            for each in pool.advance(10.0, wake=wake.fileno(), faults=dict):
                ended[each.number] = each
        pool.close()
    return [ended[number] for number in range(len(rows))]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


CAUSES = {
    "prints": ["raised ValueError: after a line", "Its last output:\na line"],
    "memory": ["raised MemoryError", f"{KEY}.memory_mb is {MEMORY_MB}", "isolated_env.py"],
    "memory of children": ["MB of memory in", f"more than {KEY}.memory_mb ({MEMORY_MB} MB)"],
    "output": [f"{KEY}.max_output_bytes ({OUTPUT_BYTES} bytes)", "flood flood"],
    "vanishes": ["ended its process (exit status 7)"],
    "writes": ["wrote 'garbage' to the pipe between its process and the rank"],
    "forks": ["forked, and its child went on as well"],
}


@pytest.fixture(scope="module")
def among_faults() -> dict[str, EndedEpisode]:
    """Every kind of episode, all at once, between good ones."""
    does = ["", *CAUSES, "leaves children", "good"]
    ended = play(
        [{"does": each} for each in does], memory_mb=MEMORY_MB, max_output_bytes=OUTPUT_BYTES
    )
    return dict(zip(does, ended, strict=True))


@pytest.mark.parametrize("does", CAUSES)
def test_what_an_episode_does_fails_it_alone_and_is_named(
    among_faults: dict[str, EndedEpisode], does: str
) -> None:
    failed = among_faults[does]

    assert failed.scores is None
    for part in (*CAUSES[does], f'row: {{"does": "{does}"}}'):
        assert part in failed.cause
    for good in ("", "good", "leaves children"):
        assert among_faults[good].cause == ""


def test_episodes_have_processes_and_random_numbers_of_their_own_and_leave_nothing(
    among_faults: dict[str, EndedEpisode],
) -> None:
    scores = [among_faults[each].scores or {} for each in ("", "good", "leaves children")]
    child = int(scores[2]["child"])

    assert len({each["pid"] for each in scores}) == 3
    assert len({each["random"] for each in scores}) == 3
    assert not is_running(child)
    assert not any(is_running(int(each["pid"])) for each in scores)


@pytest.mark.drill
def test_episode_that_never_yields_is_killed_and_its_line_is_shown() -> None:
    good, busy = play([{"does": ""}, {"does": "busy"}], seconds=5.0)

    assert good.cause == ""
    assert f"kept its process busy for longer than {KEY}.seconds" in busy.cause
    assert "isolated_env.py" in busy.cause and "in episode" in busy.cause


@pytest.mark.drill
def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    row = {"does": "waits", "path": str(told)}
    code = f"from {__name__} import play; play([{row!r}])"
    run = subprocess.Popen([sys.executable, "-c", code])
    limit = time.monotonic() + WAIT_SECONDS
    while not told.exists():
        assert run.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    pids = [int(each) for each in told.read_text().split()]
    assert all(map(is_running, pids))

    run.send_signal(signal.SIGKILL)

    run.wait()
    while any(map(is_running, pids)):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_memory_limit_without_processes_is_refused_in_words() -> None:
    cfg = EpisodeConfig(environment=ENVIRONMENT, memory_mb=100)

    with pytest.raises(ConfigError, match=r"memory_mb: got 100 with .*isolation=shared, expected"):
        check_episode(KEY, cfg)
