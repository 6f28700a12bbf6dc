"""Worker processes against what users' code starts, sees and writes where it should not."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spmdflow.config.episode import EpisodeConfig
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.errors import RewardError
from spmdflow.rewards.pool import RewardPool

NUM_SLEEPERS = 10
CODE = '''
import asyncio, json, os, socket, stat, subprocess

def start_sleepers():
    """Sleepers with sessions of their own; every other one is nobody's child."""
    pids = []
    for number in range(10):
        command = ["sleep", "600"]
        if number % 2:
            command = ["sh", "-c", "setsid sleep 600 >&2 & echo $!"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            pids.append(int(done.stdout))
        else:
            pids.append(subprocess.Popen(command, start_new_session=True).pid)
    return {f"sleeper_{number}": pid for number, pid in enumerate(pids)}

def write_to_sockets(data):
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, data)
        except OSError:
            pass

def score(prompt, response, row):
    if response == "sleepers":
        return {"score": 1.0, "pid": os.getpid(), "keeper": os.getppid()} | start_sleepers()
    if response == "tell sleepers":
        print(*start_sleepers().values(), flush=True)
        os.kill(os.getpid(), 19)
    if response == "secret":
        with open("/proc/self/environ") as file:
            found = [("SPMDFLOW_SECRET" in os.environ), ("SPMDFLOW_SECRET" in file.read())]
        return {"score": float(any(found)), "other": float(os.environ["OTHER"])}
    if response.startswith("write "):
        write_to_sockets(response.removeprefix("write ").encode() + b"\\n")
    if response == "patch":
        json.dumps = lambda *_, **__: "nonsense"
        json.loads = lambda *_, **__: {}
    return 1.0

async def episode(row, **_):
    if row["does"] == "write":
        write_to_sockets(b"hello\\n")
        await asyncio.sleep(600)
    if row["does"] == "fork":
        pid = os.fork()
        if pid:
            await asyncio.to_thread(os.waitpid, pid, 0)
            await asyncio.sleep(600)
        elif row["waits"]:
            await asyncio.sleep(0)
    if row["does"] == "sleepers":
        return {"score": 1.0} | start_sleepers()
    return 1.0
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("started") / "started.py"
    path.write_text(CODE)
    return str(path)


@pytest.fixture
def pool(code: str) -> Iterator[RewardPool]:
    with RewardPool(f"{code}:score", 1, sample_seconds=60.0, on_error="drop") as made:
        yield made


def sleepers_of(result: dict[str, Any]) -> set[int]:
    return {int(result[f"sleeper_{number}"]) for number in range(NUM_SLEEPERS)}


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def left_of(pids: set[int], seconds: float = 60.0) -> list[int]:
    """Those that have not ended; waits for them."""
    limit = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    return [pid for pid in pids if is_alive(pid)]


def judged(pool: RewardPool, *responses: str) -> tuple[list[dict[str, Any]], str]:
    made = pool.score([""] * len(responses), responses, [{} for _ in responses])
    return made.results, made.first_failure


@pytest.mark.parametrize("killed", ["", "pid", "keeper"])
def test_sleepers_with_sessions_of_their_own_end_with_their_worker_process(
    pool: RewardPool, killed: str
) -> None:
    ((result,), _) = judged(pool, "sleepers")
    sleepers = sleepers_of(result)
    assert all(map(is_alive, sleepers)) and len(sleepers) == NUM_SLEEPERS

    if killed:
        os.kill(int(result[killed]), signal.SIGKILL)
    if killed != "pid":  # a worker process that was killed takes them with it, unasked
        pool.close()

    assert left_of(sleepers | {int(result["pid"]), int(result["keeper"])}) == []


def test_sleepers_end_with_a_killed_rank_and_let_its_pipe_end(code: str) -> None:
    program = (
        "import sys\n"
        "from spmdflow.rewards.pool import RewardPool\n"
        "with RewardPool(sys.argv[1], 1, sample_seconds=600) as pool:\n"
        "    pool.score([''], ['tell sleepers'], [{}])\n"
    )
    command = [sys.executable, "-c", program, f"{code}:score"]
    folder = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as rank:
        assert rank.stdout is not None
        sleepers = set(map(int, rank.stdout.readline().split()))
        rank.kill()  # its worker process is stopped
        # the pipe ends when nobody has it: long before the sleepers would by themselves
        is_at_end, _, _ = select.select([rank.stdout], [], [], 60.0)

    assert len(sleepers) == NUM_SLEEPERS and is_at_end
    assert left_of(sleepers) == []


def test_worker_processes_have_the_environment_without_the_secret(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMDFLOW_SECRET", "hidden")
    monkeypatch.setenv("OTHER", "7")
    with RewardPool(f"{code}:score", 1, sample_seconds=60.0) as pool:
        ((result,), _) = judged(pool, "secret")

    assert result == {"score": 0.0, "other": 7.0}


@pytest.mark.parametrize(
    "data",
    [
        "hello",
        "[1, 2]",
        "[" * 3000,
        '{"ready": ["x"]}',
        '{"scores": {"score": "good"}}',
        '{"scores": {"score": NaN}}',
        '{"forked": 5}',
        '{"broken": []}',
        '{"worker": "1"}',
        '{"worker": 1}',
    ],
)
def test_function_that_writes_to_its_channel_is_named_and_its_sample_is_dropped(
    pool: RewardPool, code: str, data: str
) -> None:
    results, first_failure = judged(pool, "", f"write {data}", "")

    assert [result["errors"] for result in results] == [0.0, 1.0, 0.0]
    shown = re.escape(f"reward.function '{code}:score' wrote ")
    assert re.match(shown + ".* to the socket between its worker process and", first_failure)
    assert "response: 'write " in first_failure


def test_function_that_writes_to_its_channel_ends_a_strict_call_by_a_sentence(code: str) -> None:
    with (
        RewardPool(f"{code}:score", 1, sample_seconds=60.0) as pool,
        pytest.raises(RewardError, match=r"started.py:score' wrote 'hello' to the socket"),
    ):
        judged(pool, "write hello")


@pytest.mark.parametrize("data", ['{"broken": ["x"]}', '{"ready": {}}', '{"worker": "x"}'])
def test_module_that_writes_to_its_channel_is_refused_by_a_sentence(
    tmp_path: Path, data: str
) -> None:
    path = tmp_path / "writes.py"
    path.write_text(f"{CODE}\nwrite_to_sockets({data.encode()} + b'\\n')\n")
    said = f"importing its module wrote {data!r} to the socket between"

    with pytest.raises(RewardError, match=re.escape(said)):
        RewardPool(f"{path}:score")
    with pytest.raises(RewardError, match=re.escape(said)):
        play(str(path), [{"does": ""}])


def test_environment_whose_module_hangs_is_refused_with_the_limit_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hangs.py"
    path.write_text("import time\ntime.sleep(600)\nasync def episode(row, **_): pass\n")
    monkeypatch.setattr("spmdflow.episodes.pool._START_SECONDS", 2.0)

    with pytest.raises(RewardError, match=r"importing its module did not end within 2 s; expected"):
        play(str(path), [{}])


def test_function_that_replaces_json_scores_as_any_other(pool: RewardPool) -> None:
    results, first_failure = judged(pool, "patch", "", "")

    assert [(result["score"], result["errors"]) for result in results] == [(1.0, 0.0)] * 3
    assert first_failure == ""


def play(code: str, rows: list[dict[str, Any]]) -> dict[int, EndedEpisode]:
    """Episodes without an endpoint: how each row's ended."""
    cfg = EpisodeConfig(environment=f"{code}:episode", seconds=300.0)
    pool = EnvironmentPool(cfg)
    told = {"base_url": "", "model": "", "api_key": ""}
    _other, wake = socket.socketpair()
    pool.begin(dict(enumerate(rows)))
    ended: list[EndedEpisode] = []
    limit = time.monotonic() + 120
    try:
        while len(ended) < len(rows):
            assert time.monotonic() < limit
            pool.start_waiting(lambda number: told)
            ended += pool.advance(1.0, wake=wake.fileno(), faults=dict)
    finally:
        pool.close()
    return {each.number: each for each in ended}


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"does": "write"}, "wrote 'hello' to the socket between its worker process and the rank"),
        ({"does": "fork", "waits": False}, "forked, and its child went on as well"),
        ({"does": "fork", "waits": True}, "forked, and its child went on as well"),
    ],
)
def test_environment_that_misuses_its_process_is_named_and_harms_no_other(
    code: str, row: dict[str, Any], cause: str
) -> None:
    ended = play(code, [{"does": ""}, row, {"does": ""}])

    assert f"environment '{code}:episode' {cause}" in ended[1].cause
    assert [ended[number].scores for number in (0, 2)] == [{"score": 1.0}] * 2


def test_sleepers_of_an_environment_end_with_its_pool(code: str) -> None:
    ended = play(code, [{"does": "sleepers"}])

    assert ended[0].scores is not None
    assert left_of(sleepers_of(ended[0].scores)) == []
