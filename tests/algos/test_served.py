"""Runs that generate on servers: without any for a minute, after a kill, and disturbed at random.

Exact mode: every run must equal the first one bit for bit, in rows, metrics and weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import server_chains  # noqa: E402 a script
from chains.servers import ServerProcess, ServerSetup  # noqa: E402
from chains.verify import (  # noqa: E402
    check_each_once,
    different_metrics,
    metrics_of,
    verify_exact,
)

from tests.algos.runs import log_of, torchrun  # noqa: E402

WAITED = re.compile(r"no generation server is ready for ([6-9]\d|\d{3}) s")
SECONDS = 600
CHAIN = server_chains.Chain(1, is_exact=True, num_disturbances=4)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
    pytest.mark.timeout(1800),
    pytest.mark.drill,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs of this file, with the key of the servers."""
    path = tmp_path_factory.mktemp("served")
    (path / "key").write_text("k" * 32, encoding="ascii")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """A server that does not run yet."""
    setup = ServerSetup(str(server_chains.MODEL), folder / "key", folder, is_exact=True)
    process = ServerProcess(setup, 0)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def first_run(folder: Path, server: ServerProcess) -> Path:
    """RUN_DIR of a run whose server comes after a minute."""
    run_dir = folder / "first"
    url = f"http://127.0.0.1:{server.port}"
    process = server_chains.start_run(CHAIN, run_dir, [url], folder / "key")
    log = folder / "first.log"
    try:
        end = time.monotonic() + SECONDS
        while not WAITED.search(log.read_text()):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.2)
        server.start()
        assert process.wait(SECONDS) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return run_dir


def kill_and_resume(folder: Path, name: str, urls: list[str]) -> Path:
    """A run that is killed after its second step and started again; return RUN_DIR."""
    run_dir = folder / name
    for attempt in range(2):
        words = ["save_every=1"]
        process = server_chains.start_run(CHAIN, run_dir, urls, folder / "key", words)
        try:
            if attempt == 0:
                server_chains.wait_for_step(run_dir, 3, process)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            else:
                assert process.wait(SECONDS) == 0, (folder / f"{name}.log").read_text()[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return run_dir


def test_a_run_without_servers_for_a_minute_goes_on_when_one_comes(first_run: Path) -> None:
    rows = server_chains.PROMPTS * server_chains.SAMPLES

    assert (first_run / "finished").is_file()
    assert check_each_once(first_run, steps=CHAIN.steps, rows_per_step=rows) == []


def test_a_killed_run_finds_the_servers_at_given_addresses_again(
    folder: Path, first_run: Path, server: ServerProcess
) -> None:
    before = server.ask("facts")
    run_dir = kill_and_resume(folder, "given", [f"http://127.0.0.1:{server.port}"])
    after = server.ask("facts")

    assert before is not None and after is not None
    assert after["instance"] == before["instance"]
    assert verify_exact(run_dir, first_run).problems == []


def test_a_killed_run_starts_its_own_servers_again(folder: Path, first_run: Path) -> None:
    run_dir = kill_and_resume(folder, "own", [])

    assert verify_exact(run_dir, first_run).problems == []


def test_a_chain_of_four_disturbances_changes_no_bit(tmp_path: Path, first_run: Path) -> None:
    run_dir = server_chains.run_chain(
        server_chains.Chain(1, is_exact=True, num_disturbances=4), tmp_path
    )
    verdict = server_chains.verify(CHAIN, run_dir, first_run)

    assert verdict.problems == []


def listener(port: int) -> int:
    """The process that listens on a port of this machine."""
    for connection in psutil.net_connections("tcp"):
        is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_it and connection.pid is not None:
            return int(connection.pid)
    raise AssertionError(f"nobody listens on port {port}")


def run_pool(folder: Path, name: str, num_generators: int, *, loses_a_server: bool) -> Path:
    """A run with servers of its own, one for each generating rank; return RUN_DIR."""
    run_dir = folder / name
    process = server_chains.start_run(
        CHAIN, run_dir, [], folder / "key", num_trainers=1, num_generators=num_generators
    )
    try:
        if loses_a_server:
            server_chains.wait_for_step(run_dir, 2, process)
            (url,) = json.loads((run_dir / "servers" / "roster-1.json").read_text())["urls"]
            os.killpg(os.getpgid(listener(int(url.rpartition(":")[2]))), signal.SIGKILL)
        assert process.wait(SECONDS) == 0, (folder / f"{name}.log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return run_dir


def test_two_generating_ranks_of_which_one_loses_its_server_draw_as_one_rank(
    tmp_path: Path,
) -> None:
    alone = run_pool(tmp_path, "alone", 1, loses_a_server=False)
    pool = run_pool(tmp_path, "pool", 2, loses_a_server=True)

    problems = [each for each in verify_exact(pool, alone).problems if ": rollout/" not in each]
    assert problems == []
    for ours, theirs in zip(metrics_of(pool), metrics_of(alone), strict=True):
        for name in theirs:  # sums over the rows of two ranks are rounded otherwise
            if name.startswith("rollout/") and name != "rollout/synced_bytes":
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-9), name
    assert sum(step["servers/deaths"] for step in metrics_of(pool)) >= 1
    assert all(step["servers/deaths"] == 0 for step in metrics_of(alone))


def test_episodes_on_a_server_are_those_of_vllm_in_process(tmp_path: Path) -> None:
    words = ["total_steps=2", "eval_every=0", "save_every=0", "data.prompts_per_step=4"]
    words += ["data.samples_per_prompt=4", "actor.update.mini_batch_size=16"]
    words += ["actor.rollout.max_batch_size=1", "actor.update.old_log_probs=recompute"]
    found = []
    for engine in ("vllm", "served"):
        run_dir = tmp_path / engine
        own = [f"actor.rollout.engine={engine}"]
        if engine == "served":
            own.append("actor.rollout.server.exact=true")
        process = torchrun(
            run_dir, *words, *own, num_ranks=1, script=ROOT / "algos" / "grpo_agent.py", small=()
        )
        try:
            assert process.wait(SECONDS) == 0, log_of(run_dir).read_text()[-3000:]
        finally:
            if process.poll() is None:
                process.terminate()
        found.append(run_dir)

    assert different_metrics(*found) == []
    assert metrics_of(found[0])[0]["episodes/turns"] > 1
