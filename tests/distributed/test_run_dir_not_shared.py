"""Two nodes with disks of their own: mount namespaces, of which the second has another RUN_DIR."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdflow.checkpoint.run_dir import find_latest
from tests.algos.runs import SCRIPT, SMALL, log_of, start
from tests.distributed.ports import reserved_port
from tests.unit.checkpoint_files import verify_checkpoint

pytestmark = pytest.mark.drill

OWN_MOUNTS = ["unshare", "--mount", "sh", "-c"]


def can_mount(folder: Path) -> bool:
    """Whether this user may have mounts of its own."""
    command = [*OWN_MOUNTS, f"mount -t tmpfs none {folder}"]
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except FileNotFoundError:
        return False


class Nodes:
    """A run of ppo.py on two nodes of one rank each, which share the network and all but a disk."""

    def __init__(self, run_dir: Path, port: int) -> None:
        self.run_dir = run_dir
        self._port = port
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *settings: str, own_run_dir: bool) -> None:
        """own_run_dir: the second node has a disk of its own at RUN_DIR."""
        mount = f"mount -t tmpfs none {self.run_dir} && " if own_run_dir else ""
        for node, prefix in enumerate(([], [*OWN_MOUNTS, mount + 'exec "$0" "$@"'])):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            torchrun += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--node-rank={node}"]
            run = ["-m", "spmdflow.run", str(SCRIPT), f"run.dir={self.run_dir}", *SMALL]
            words = [*prefix, *torchrun, f"--master-port={self._port}", *run, *settings]
            self.agents.append(start(words, log_of(self.run_dir)))

    def wait_until_out(self, *, seconds: float) -> list[int]:
        """Exit statuses of both agents."""
        limit = time.monotonic() + seconds
        return [agent.wait(max(0.1, limit - time.monotonic())) for agent in self.agents]

    def log(self) -> str:
        """What both nodes wrote."""
        return log_of(self.run_dir).read_text()

    def end(self) -> None:
        """Leave no process behind."""
        for agent in self.agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes, not started yet."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if not can_mount(run_dir):
        pytest.skip("mount namespaces are not allowed here")
    with reserved_port("127.0.0.1") as port:
        nodes = Nodes(run_dir, port)
        yield nodes
        nodes.end()


def test_a_node_with_another_run_dir_is_refused_before_models_are_built(nodes: Nodes) -> None:
    nodes.start("placement=split", "total_steps=2", "save_every=1", own_run_dir=True)

    statuses = nodes.wait_until_out(seconds=600)

    host = socket.gethostname()
    assert 0 not in statuses
    assert (
        f"run.dir: got {nodes.run_dir}, where rank 1 on node {host} cannot read the file that "
        f"rank 0 on node {host} wrote there, expected one folder that every node shares"
    ) in nodes.log()
    assert "set run.dir to a shared folder" in nodes.log()
    assert not list(nodes.run_dir.glob("checkpoints/*"))
    assert not (nodes.run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_dir_that_another_node_loses_ends_the_run_and_keeps_the_last_whole_checkpoint(
    nodes: Nodes,
) -> None:
    nodes.start(
        "placement=split",
        "total_steps=1000",
        "save_every=1",
        "eval_every=0",
        "run.keep_checkpoints=1",
        own_run_dir=False,
    )
    latest = nodes.run_dir / "checkpoints" / "latest"
    limit = time.monotonic() + 240
    while not latest.exists():
        assert time.monotonic() < limit and nodes.agents[0].poll() is None, nodes.log()[-3000:]
        time.sleep(0.05)
    enter = ["nsenter", "--mount", "--target", str(nodes.agents[1].pid)]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(latest.parent)], check=True)

    statuses = nodes.wait_until_out(seconds=600)

    assert 0 not in statuses
    assert "RUN_DIR is not one folder that every node shares" in nodes.log()
    assert "that rank 1 wrote there on node" in nodes.log()
    info = find_latest(nodes.run_dir)
    assert info is not None and "critic/rank-0.safetensors" in info.files
    verify_checkpoint(info)
    assert [path.name for path in sorted(latest.parent.iterdir())] == ["latest", info.folder.name]
