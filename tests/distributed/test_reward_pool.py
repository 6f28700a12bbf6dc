"""The pool of reward processes: order, errors, limits, deaths."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spmdflow.config.schema import RewardConfig
from spmdflow.errors import ConfigError, RewardError
from spmdflow.rewards import process
from spmdflow.rewards.pool import RewardPool

LIMIT = 2.5  # seconds: far above what a sample takes on a busy machine, and no long wait

FUNCTIONS = '''
import os, re, signal, subprocess, sys, time

def score(prompt, response, row):
    """Does what the response says; prints, which must do no harm."""
    child = subprocess.Popen(["sleep", "60"]).pid if row.get("child") else 0
    print(response or "nothing", child)
    if response == "raise":
        raise ValueError("no good")
    if response == "exit":
        sys.exit(3)
    if response == "vanish":
        os._exit(7)
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "realtime":
        os.kill(os.getpid(), signal.SIGRTMIN + 6)
    if response == "job signals":  # as from a batch system, to every process of the job
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getppid(), signal.SIGINT)
        os.abort()
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    if response == "hang":
        time.sleep(60)
    if response == "hold":  # never gives up the GIL
        re.match("(a+)+$", "a" * 60 + "b")
    if response == "talk":
        for n in range(500):
            print("line", n, "ends")
    if response == "pause":
        time.sleep(0.02)
    if response == "nap":
        time.sleep(1.0)
    facts = {
        "pid": os.getpid(), "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "torch": "torch" in sys.modules, "child": child,
    }
    return {"score": float(row.get("n", 0))} | facts
'''


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process needs a while to tell its stack."""
    monkeypatch.setattr(process, "_STACK_SECONDS", 30.0)


@pytest.fixture
def function(tmp_path: Path) -> str:
    """Name of a function that obeys its response."""
    path = tmp_path / "obeys.py"
    path.write_text(FUNCTIONS)
    return f"{path}:score"


@pytest.fixture
def pool(function: str) -> Iterator[RewardPool]:
    """Two processes; errors are raised."""
    with RewardPool(function, 2, sample_seconds=LIMIT) as pool:
        yield pool


@pytest.fixture
def lenient(function: str) -> Iterator[RewardPool]:
    """Two processes; errors score 0."""
    with RewardPool(function, 2, sample_seconds=LIMIT, on_error="zero") as pool:
        yield pool


def score(pool: RewardPool, responses: list[str]) -> list[dict[str, float]]:
    """Sample n has the prompt "p<n>" and a row that says n."""
    prompts = [f"p{n}" for n in range(len(responses))]
    return pool.score(prompts, responses, [{"n": n} for n in range(len(responses))]).results


def refusal(name: str, what: str, *, number: int, response: str) -> str:
    """The message about one sample, without a traceback or stack."""
    return (
        f"reward.function {name!r} {what}; expected a finite number or a dict with "
        f'"score" within {LIMIT} s; fix the function, or set reward.on_error=drop to omit '
        f"such samples\nprompt: 'p{number}'\nresponse: {response!r}\nrow: "
        f'{{"n": {number}}}\nfunction: {name.removesuffix(":score")}:4'
    )


def assert_gone(pids: set[int]) -> None:
    """No such process, or only its entry, within a while."""
    limit = time.monotonic() + 30
    while any(map(_is_alive, pids)):
        assert time.monotonic() < limit, [pid for pid in pids if _is_alive(pid)]
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_scores_keep_the_order_and_both_processes_work(pool):
    results = score(pool, ["", "pause"] * 40)

    assert [result["score"] for result in results] == list(range(80))
    assert len({result["pid"] for result in results}) == 2
    assert not any(result["torch"] for result in results)
    assert score(pool, []) == []


@pytest.mark.parametrize(
    ("response", "what", "line"),
    [
        ("nan", "returned nan", None),
        ("text", "returned 'good' (str)", None),
        ("hang", f"ran longer than reward.sample_seconds ({LIMIT} s)", "time.sleep(60)"),
        pytest.param(
            "hold",
            f"ran longer than reward.sample_seconds ({LIMIT} s)",
            "re.match(",
            marks=pytest.mark.drill,
        ),
        ("vanish", "ended its worker process (exit status 7)", None),
        ("segfault", "ended its worker process (signal SIGSEGV)", "signal.SIGSEGV"),
        ("realtime", f"ended its worker process (signal {signal.SIGRTMIN + 6})", None),
        ("job signals", "ended its worker process (signal SIGABRT)", "os.abort()"),
    ],
)
def test_bad_sample_is_named_with_cause_and_place_and_the_pool_goes_on(
    patience, pool, function, response, what, line
):
    with pytest.raises(RewardError) as caught:
        score(pool, ["", "", response, "", response, ""])

    message, _, stack = str(caught.value).partition("\nIt was there (innermost call first):\n")
    assert message == refusal(function, what, number=2, response=response)
    places = re.findall(r'^  File "(.*)", line (\d+) in (\w+)$', stack, re.MULTILINE)
    assert len(places) == stack.count("\n") + bool(stack), stack
    if line is None:
        assert places == []
    else:  # only the function's own results, and the line that it was at
        file, number, name = places[-1]
        assert (file, name) == (function.removesuffix(":score"), "score")
        assert line in FUNCTIONS.splitlines()[int(number) - 1]
        assert not any("spmdflow" in file for file, _, _ in places)
    assert [result["score"] for result in score(pool, [""] * 5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("response", "what", "line"),
    [
        ("raise", "raised ValueError: no good", 'raise ValueError("no good")'),
        ("exit", "raised SystemExit: 3", "sys.exit(3)"),
    ],
)
def test_exception_is_raised_with_the_traceback_of_the_function(
    pool, function, response, what, line
):
    with pytest.raises(RewardError) as caught:
        score(pool, ["", response])

    message, trace = str(caught.value).split("\nTraceback (most recent call last):\n")
    assert message == refusal(function, what, number=1, response=response)
    assert trace.startswith(f'  File "{function[:-6]}", line ')
    assert line in trace
    assert "spmdflow" not in trace


@pytest.mark.drill
def test_place_of_a_hung_function_is_not_that_of_an_earlier_signal(patience, tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, signal, time\n"
        "def warned(): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "def hang(): time.sleep(60)\n"
        "def score(prompt, response, row):\n"
        "    warned()\n"
        "    hang()\n"
    )

    with (
        RewardPool(f"{tmp_path}/own.py:score", sample_seconds=LIMIT) as pool,
        pytest.raises(RewardError, match=r"line 3 in hang\n.*line 6 in score$"),
    ):
        score(pool, [""])


def test_lines_that_processes_print_beside_each_other_stay_whole(function, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with RewardPool(function, 2, sample_seconds=60) as pool:
        score(pool, ["talk"] * 20)

    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("talk")]
    assert sorted(lines) == sorted(f"line {n} ends" for n in range(500) for _ in range(20))


@pytest.mark.drill
def test_limit_is_for_each_sample_and_not_for_the_samples_sent_together(function):
    with RewardPool(function, 1, sample_seconds=LIMIT) as pool:
        results = score(pool, ["nap"] * 6)  # sent as 3, 2 and 1; three naps exceed the limit

    assert [result["score"] for result in results] == [0, 1, 2, 3, 4, 5]


def test_first_bad_sample_is_blamed_however_late_it_is_found(pool):
    with pytest.raises(RewardError, match="prompt: 'p3'"):
        score(pool, ["pause"] * 3 + ["hang"] + ["pause"] * 8 + ["raise"] * 8)


def test_long_texts_are_shortened_in_the_message(pool):
    with pytest.raises(RewardError) as caught:
        pool.score(["a" * 150 + "b" * 150], ["nan"], [{}])

    assert f"prompt: '{'a' * 100} ... {'b' * 100}'" in str(caught.value)


def test_errors_score_zero_are_counted_and_logged_once_of_each_kind(lenient, caplog):
    bad = {0: "raise", 3: "vanish", 8: "nan", 9: "hang"}

    results = score(lenient, [bad.get(n, "") for n in range(12)])

    assert [result["score"] for result in results] == [0 if n in bad else n for n in range(12)]
    assert [result["errors"] for result in results] == [float(n in bad) for n in range(12)]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4  # one for each kind of error
    assert messages[0].startswith("reward error 1, scored 0: reward.function ")
    assert re.search(r"prompt: 'p0'\nresponse: 'raise'\nrow: .*\n.*\nTraceback", messages[0])

    score(lenient, ["raise"] * 97)  # errors 5 to 101

    assert [record.getMessage()[:17] for record in caplog.records[4:]] == ["reward error 101,"]


def test_hung_process_is_killed_with_its_children_and_replaced(lenient):
    before = {result["pid"] for result in score(lenient, ["pause"] * 20)}
    (started,) = lenient.score([""], [""], [{"child": True}]).results

    score(lenient, ["hang", "hang"])
    after = {result["pid"] for result in score(lenient, ["pause"] * 20)}

    assert len(before) == 2 and after and not before & after
    assert_gone({int(pid) for pid in before} | {int(started["child"])})


def test_process_killed_while_idle_is_replaced_without_blame(pool, caplog):
    (result,) = score(pool, [""])
    os.kill(int(result["pid"]), signal.SIGKILL)
    limit = time.monotonic() + 60
    while not any(process.ended for process in pool._processes):  # its last thread, too
        assert time.monotonic() < limit
        time.sleep(0.01)

    assert [result["score"] for result in score(pool, ["", ""])] == [0, 1]
    assert [r.getMessage() for r in caplog.records] == [
        f"reward worker process {int(result['pid'])} ended while idle; replaced"
    ]


@pytest.mark.drill
def test_stopped_process_that_reads_nothing_counts_as_too_slow(lenient):
    pids = {int(result["pid"]) for result in score(lenient, ["pause"] * 20)}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    results = lenient.score(["p" * 1_000_000] * 3, [""] * 3, [{"n": 1}] * 3).results

    assert [result["errors"] for result in results] == [1, 1, 0]


def test_pool_of_a_thread_that_blocks_sigterm_neither_blocks_nor_dies_of_it(function):
    results: list[dict[str, float]] = []

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with RewardPool(function, 1, sample_seconds=60) as pool:
            results.extend(score(pool, [""]))
            os.kill(int(results[0]["pid"]), signal.SIGTERM)
            results.extend(score(pool, [""]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert [result["blocked"] for result in results] == [0, 0]
    assert results[0]["pid"] == results[1]["pid"]


def test_processes_made_by_a_thread_outlive_it(function):
    made: list[RewardPool] = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(function, 1)))
    thread.start()
    thread.join()

    with made[0] as pool:
        assert score(pool, ["", ""])[1]["score"] == 1


def test_close_leaves_no_process_and_may_be_repeated(function):
    pool = RewardPool(function, 2)
    pids = {int(result["pid"]) for result in score(pool, ["pause"] * 20)}
    (started,) = pool.score([""], [""], [{"child": True}]).results

    pool.close()
    pool.close()

    assert_gone(pids | {int(started["child"])})


@pytest.mark.parametrize("response", ["hang", "hold"])
def test_processes_and_their_children_go_when_their_rank_is_killed(function, response):
    program = (
        "import sys\n"
        "from spmdflow.rewards.pool import RewardPool\n"
        "pool = RewardPool(sys.argv[1], 2, sample_seconds=60)\n"
        "print(*[process.pid for process in pool._processes], flush=True)\n"
        "pool.score([''] * 2, [sys.argv[2]] * 2, [{'child': True}] * 2)\n"
    )
    command = [sys.executable, "-c", program, function, response]
    folder = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as rank:
        try:
            assert rank.stdout is not None
            pids = set(map(int, rank.stdout.readline().split()))
            while len(pids) < 4:  # each process says what it started; their lines may mix
                line = rank.stdout.readline()
                assert line, "the program ended"
                pids.update(map(int, re.findall(r"\d+", line)))
            time.sleep(0.1)  # into the sleep or the match
            assert len(pids) == 4 and all(map(_is_alive, pids))
        finally:
            rank.kill()
        rank.wait()
        assert_gone(pids)


def test_process_that_cannot_be_started_leaves_no_descriptor(function, monkeypatch):
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    with pytest.raises(FileNotFoundError):
        RewardPool(function)

    assert sorted(os.listdir("/proc/self/fd")) == before


def test_missing_function_is_refused_at_construction(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RewardPool(f"{tmp_path}/none.py:score", 2)

    assert str(caught.value) == (
        f"reward.function: got '{tmp_path}/none.py:score', but there is no file "
        f'{tmp_path}/none.py in {Path.cwd()}, expected "path/file.py:name" or '
        f'"module:name"; correct the path'
    )


def test_module_that_raises_is_refused_with_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import helper_beside_it\nraise OSError('no disk')\n")
    (tmp_path / "helper_beside_it.py").write_text("")

    with pytest.raises(RewardError) as caught:
        RewardPool(f"{path}:score", 2)

    assert str(caught.value) == (
        f"reward.function '{path}:score': its module raised OSError: no disk\n"
        f"Traceback (most recent call last):\n"
        f'  File "{path}", line 2, in <module>\n'
        f"    raise OSError('no disk')\n"
        f"OSError: no disk\n"
        f"expected a module that can be imported; fix it"
    )


@pytest.mark.parametrize(
    ("text", "seconds", "cause", "line"),
    [
        ("import time\ntime.sleep(60)", 0.4, "did not end within 0.4 s", 2),
        ("import os\nos._exit(4)", 60, "ended its worker process (exit status 4)", None),
    ],
)
def test_module_that_hangs_or_vanishes_is_refused(tmp_path, text, seconds, cause, line):
    path = tmp_path / "stuck.py"
    path.write_text(text)

    with pytest.raises(RewardError) as caught:
        RewardPool(f"{path}:score", 1, start_seconds=seconds)

    message, _, stack = str(caught.value).partition("\nIt was there (innermost call first):\n")
    assert stack in ("", f'  File "{path}", line {line} in <module>')  # "": not yet that far
    assert message == (
        f"reward.function '{path}:score': importing its module {cause}; expected a module that "
        f"can be imported on its own; run `python -c` on it to see why"
    )


def cpu_seconds(pool: RewardPool) -> float:
    """Of this process and the pool's, as far as they have used them."""
    pids = [os.getpid(), *(process.pid for process in pool._processes)]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def test_a_thousand_samples_take_less_than_the_target():
    cfg = RewardConfig(function="spmdflow.rewards.arithmetic:exact_match")
    with RewardPool.from_config(cfg) as pool:
        before = cpu_seconds(pool)
        for _ in range(10):
            results = pool.score(["1+2="] * 1000, ["3"] * 1000, [{"answer": "3"}] * 1000).results
        seconds = cpu_seconds(pool) - before

    assert results == [{"score": 1.0, "accuracy": 1.0}] * 1000
    assert seconds / 10 < 0.2  # of a core, for whoever else runs beside it
