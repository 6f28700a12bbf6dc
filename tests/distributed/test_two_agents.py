"""Two torchrun agents, as on two machines: launch/multinode.sh starts PPO with two ranks each.

The machines are namespaces of networks, process ids, mounts and host names, joined by a pair of
veth devices, with boot ids of their own. Each knows the other by name and takes its own name for
127.0.1.1, as Debian does; nothing of one is reachable from the other but over the pair. Where that
is not possible the two agents share the loopback device.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.plan.replay import Replay
from tests.algos.runs import SCRIPT, SMALL, check_prediction, finish, log_of, start, steps_of
from tests.distributed.ports import reserved_port

pytestmark = pytest.mark.drill

SETTINGS = (*SMALL, "total_steps=2", "eval_every=0", "placement=split")
DEVICE = "veth0"
PORT = 29400
OWN = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Host name, process ids and mounts of a machine's own; with it ends all that runs on it."""
BEGIN = (
    'hostname "$0" && mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id && exec "${@:2}"'
)
COUNTED = Path(__file__).with_name("programs") / "counted_ppo.py"
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
            (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{known}")

    def machines(self) -> list[Machine]:
        """The first one is that of rank 0. The settings are those of launch/multinode.sh."""
        variables = {"FIRST_NODE": self.names[0], "PORT": str(PORT), "INTERFACE": DEVICE}
        return [
            Machine(
                ("ip", "netns", "exec", name, *OWN, "bash", "-c", BEGIN, name, str(_etc(name))),
                variables,
            )
            for name in self.names
        ]

    def sent_bytes(self) -> list[int]:
        """Bytes that each machine has sent over the pair, as the kernel counts them."""
        found = []
        for name in self.names:
            link = ("ip", "-n", name, "-s", "-j", "link", "show", DEVICE)
            shown = subprocess.run(link, check=True, capture_output=True, text=True).stdout
            found.append(json.loads(shown)[0]["stats64"]["tx"]["bytes"])
        return found

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
def two_namespaces() -> Iterator[Namespaces]:
    namespaces = Namespaces()
    try:
        namespaces.begin()
        yield namespaces
    finally:
        namespaces.end()


@contextlib.contextmanager
def one_loopback(address: str) -> Iterator[list[Machine]]:
    with reserved_port(address) as port:
        here = {"FIRST_NODE": address, "ADDRESS": address, "PORT": str(port)}
        yield [Machine(("env",), here)] * 2


def run_agents(machines: list[Machine], run_dir: Path) -> list[int]:
    """Run the same line on both; exit statuses. Ranks leave their counts beside RUN_DIR."""
    beside = str(Path(sys.executable).parent)
    path = {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "NODES": "2", "RANKS": "2"}
    path["COUNTS"] = str(run_dir.parent)
    yaml = str(SCRIPT.with_suffix(".yaml"))
    words = ("launch/multinode.sh", str(COUNTED), yaml, f"run.dir={run_dir}", *SETTINGS)
    agents = [
        start([*machine.prefix, *words], agent_log(run_dir, i), path | machine.variables)
        for i, machine in enumerate(machines)
    ]
    limit = time.monotonic() + 700
    return [finish(agent, seconds=max(1.0, limit - time.monotonic())) for agent in agents]


def agent_log(run_dir: Path, agent: int) -> Path:
    return log_of(run_dir).with_suffix(f".{agent}.log")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without torchrun, to compare with."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    loaded = load(SCRIPT, None, [*SETTINGS, "placement=colocate", f"run.dir={run_dir}"])
    run_flow(loaded.script, loaded.cfg, inproc=True)
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
def test_two_machines_run_ppo_over_their_network_and_agree_with_one_process(
    tmp_path: Path, one_process: Path
) -> None:
    run_dir = tmp_path / "run"
    with two_namespaces() as namespaces:
        statuses = run_agents(namespaces.machines(), run_dir)
        on_the_wire = namespaces.sent_bytes()

    logs = [agent_log(run_dir, agent).read_text() for agent in range(2)]
    assert statuses == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    assert "controller listens on tcp://10.201.0.1:" in logs[0]
    assert "step 2/2" in logs[0] and "step 2/2" not in logs[1]
    judge(run_dir, one_process)
    judge_network(run_dir, on_the_wire)


def judge_network(run_dir: Path, on_the_wire: list[int]) -> None:
    """Rows between the machines were sent over the pair.

    Ranks 0 and 1 are one machine, 2 and 3 the other, by all that the code sees of a machine.
    """
    counts = [json.loads((run_dir.parent / f"rank-{i}.json").read_text()) for i in range(4)]
    parts = [count["node"].split("/") for count in counts]
    assert parts[0] == parts[1] and parts[2] == parts[3]
    boot_ids, pid_spaces = ({own[i] for own in parts} for i in (0, -2))
    assert len(boot_ids) == len(pid_spaces) == 2
    replay = Replay.of_run(run_dir)
    assert replay.nodes == {0: 0, 1: 0, 2: 2, 3: 2}
    planned = [0, 0]
    sent = [0, 0]
    for step in replay.steps:
        for (source, to), num_bytes in replay.edges(step).items():
            planned[source // 2] += num_bytes if source // 2 != to // 2 else 0
    for rank, count in enumerate(counts):
        sent[rank // 2] += sum(n for to, n in count["sent"].items() if int(to) // 2 != rank // 2)
    for here in range(2):
        assert 0 < planned[here] <= sent[here] <= on_the_wire[here], (planned, sent, on_the_wire)


@needs_namespaces
def test_namespaces_are_gone_afterwards_with_all_that_ran_in_them() -> None:
    with two_namespaces() as namespaces:
        names = namespaces.names
        sleeper = subprocess.Popen(["ip", "netns", "exec", names[1], "sleep", "600"])
        limit = time.monotonic() + 200
        while sleeper.pid not in pids_in(names[1]) and time.monotonic() < limit:
            time.sleep(0.02)

    assert sleeper.wait(60) == -signal.SIGKILL
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
