"""Runs that generate on servers: without any for a minute, after a kill, and disturbed at random.

Exact mode: every run must equal the first one bit for bit, in rows, metrics and weights.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import server_chains  # noqa: E402 a script
from chains.servers import ServerProcess, ServerSetup  # noqa: E402
from chains.verify import check_each_once, verify_exact  # noqa: E402

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
