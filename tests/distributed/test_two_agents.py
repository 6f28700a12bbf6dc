"""Two torchrun agents, as on two machines: launch/multinode.sh starts PPO with two ranks each.

The machines are network namespaces joined by a pair of veth devices. Each knows the other by
name and takes its own name for 127.0.1.1, as Debian does; nothing of one is reachable from the
other but over the pair. Where that is not possible the two agents share the loopback device.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.controller.launch import launch
from tests.algos.runs import SCRIPT, SMALL, check_prediction, finish, log_of, start, steps_of

SETTINGS = (*SMALL, "total_steps=2", "eval_every=0", "placement=split")
DEVICE, PORT = "veth0", 29400
COMPARED = (
    "reward/mean", "rollout/response_tokens", "actor/pg_loss", "actor/grad_norm", "actor/entropy",
    "actor/reference_kl", "critic/loss", "critic/grad_norm", "critic/value_mean",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """How to start launch/multinode.sh on one of the two."""

    prefix: tuple[str, ...]
    variables: dict[str, str]


class Namespaces:
    """Two network namespaces that reach each other; `end` removes them and what runs in them."""

    def __init__(self) -> None:
        self.names = [f"spmdflow-{os.getpid()}-{letter}" for letter in "ab"]

    def begin(self) -> None:
        """Make them; CalledProcessError if this user or kernel may not."""
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        peer = ("type", "veth", "peer", "name", DEVICE, "netns", second)
        _ip("link", "add", DEVICE, "netns", first, *peer)
        known = "".join(f"10.201.0.{i} {name}\n" for i, name in enumerate(self.names, start=1))
        for i, name in enumerate(self.names, start=1):
            _ip("-n", name, "addr", "add", f"10.201.0.{i}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _ip("-n", name, "link", "set", device, "up")
            folder = _etc(name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{known}")

    def machines(self) -> list[Machine]:
        """The first one is that of rank 0. The settings are those of launch/multinode.sh."""
        variables = {"FIRST_NODE": self.names[0], "PORT": str(PORT), "INTERFACE": DEVICE}
        return [
            Machine(
                ("ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c")
                + (f'hostname {name} && exec "$@"', "multinode"),
                variables,
            )
            for name in self.names
        ]

    def end(self) -> None:
        """Leave nothing behind, however far `begin` came."""
        for name in self.names:
            for pid in pids_in(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(_etc(name), ignore_errors=True)


def pids_in(name: str) -> list[int]:
    """Processes of a namespace; none if there is no such namespace."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def _etc(name: str) -> Path:
    """Files that `ip netns exec` puts over those of /etc."""
    return Path("/etc/netns") / name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@cache
def why_no_namespaces() -> str:
    """The reason why this machine cannot have two namespaces; empty if it can."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (iproute2, util-linux)"
    pair = ("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", "peer0")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", *pair], capture_output=True, text=True
    )
    return f"network namespaces are not allowed here: {tried.stderr}" if tried.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
covered_by_namespaces = [] if why_no_namespaces() else [pytest.mark.slow]


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[Machine]]:
    namespaces = Namespaces()
    try:
        namespaces.begin()
        yield namespaces.machines()
    finally:
        namespaces.end()


@contextlib.contextmanager
def one_loopback(address: str) -> Iterator[list[Machine]]:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = str(probe.getsockname()[1])
    here = {"FIRST_NODE": address, "ADDRESS": address, "PORT": port}
    yield [Machine(("env",), here)] * 2


def run_agents(machines: list[Machine], run_dir: Path) -> list[int]:
    """Run the same line on both; exit statuses."""
    beside = str(Path(sys.executable).parent)
    path = {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "NODES": "2", "RANKS": "2"}
    words = ("launch/multinode.sh", str(SCRIPT), f"run.dir={run_dir}", *SETTINGS)
    agents = [
        start([*machine.prefix, *words], agent_log(run_dir, i), path | machine.variables)
        for i, machine in enumerate(machines)
    ]
    limit = time.monotonic() + 150
    return [finish(agent, seconds=max(1.0, limit - time.monotonic())) for agent in agents]


def agent_log(run_dir: Path, agent: int) -> Path:
    return log_of(run_dir).with_suffix(f".{agent}.log")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without torchrun, to compare with."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    loaded = load(SCRIPT, None, [*SETTINGS, "placement=colocate", f"run.dir={run_dir}"])
    launch(loaded.script, loaded.cfg, inproc=True)
    return run_dir


def judge(run_dir: Path, one_process: Path) -> None:
    """All four ranks worked, and on the same numbers as one process.

    Tolerance: float32 sums in another order, relative 2e-5, as between placements.
    """
    spans = json.loads((run_dir / "trace.json").read_text())
    assert {span["pid"] for span in spans} == {0, 1, 2, 3}
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == [1, 2]
    for step, expected in zip(steps, steps_of(one_process), strict=True):
        for name in COMPARED:
            assert step[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
        assert step["transfer/bytes"] == step["transfer/planned_bytes"] > 0
        assert step["controller/tensor_bytes"] == 0
    check_prediction(run_dir)


@needs_namespaces
def test_two_machines_run_ppo_and_agree_with_one_process(tmp_path: Path, one_process: Path) -> None:
    run_dir = tmp_path / "run"
    with two_namespaces() as machines:
        statuses = run_agents(machines, run_dir)

    logs = [agent_log(run_dir, agent).read_text() for agent in range(2)]
    assert statuses == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    assert "controller listens on tcp://10.201.0.1:" in logs[0]
    assert "step 2/2" in logs[0] and "step 2/2" not in logs[1]
    judge(run_dir, one_process)


@needs_namespaces
def test_namespaces_are_gone_afterwards_with_all_that_ran_in_them() -> None:
    with two_namespaces() as machines:
        names = [machine.prefix[3] for machine in machines]
        sleeper = subprocess.Popen(["ip", "netns", "exec", names[1], "sleep", "60"])
        limit = time.monotonic() + 20
        while sleeper.pid not in pids_in(names[1]) and time.monotonic() < limit:
            time.sleep(0.02)

    assert sleeper.wait(5) == -signal.SIGKILL
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not [name for name in names if name in listed or _etc(name).exists()]


@pytest.mark.parametrize("address", [pytest.param("127.0.0.1", marks=covered_by_namespaces)])
def test_two_agents_on_one_machine_run_ppo_and_agree_with_one_process(
    address: str, tmp_path: Path, one_process: Path
) -> None:
    run_dir = tmp_path / "run"
    with one_loopback(address) as machines:
        statuses = run_agents(machines, run_dir)

    logs = [agent_log(run_dir, agent).read_text() for agent in range(2)]
    assert statuses == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    judge(run_dir, one_process)
