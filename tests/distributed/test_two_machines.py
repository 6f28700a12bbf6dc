"""The failure drill over two machines: network namespaces with process ids of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.drill import TORCHRUN, Drill
from tests.distributed.test_failure_drill import LIMIT, LONG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
        reason="network namespaces need root, ip and unshare",
    ),
]


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """Command prefixes that run a program on either of two connected machines."""
    name = f"spmd{uuid.uuid4().hex[:6]}"
    spaces = [f"{name}a", f"{name}b"]
    links = [f"{name}x", f"{name}y"]
    commands = [f"netns add {space}" for space in spaces]
    commands += [f"link add {links[0]} type veth peer name {links[1]}"]
    for number, (space, link) in enumerate(zip(spaces, links, strict=True), start=1):
        commands += [
            f"link set {link} netns {space}",
            f"-n {space} addr add 10.77.0.{number}/24 dev {link}",
            f"-n {space} link set {link} up",
            f"-n {space} link set lo up",
        ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
    yield [
        ["ip", "netns", "exec", space, "unshare", "--pid", "--fork", "--mount-proc"]
        + ["--kill-child", "env", f"GLOO_SOCKET_IFNAME={link}"]
        for space, link in zip(spaces, links, strict=True)
    ]
    for space in spaces:
        subprocess.run(["ip", "netns", "delete", space], check=True)


@pytest.fixture
def drill(tmp_path: Path, machines: list[list[str]]) -> Iterator[Drill]:
    """Ranks 0 and 1 on the first machine, 2 and 3 on the second."""
    torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "10.77.0.1", "--master-port", "29500", "--node-rank"]
    agents = [[*prefix, *torchrun, str(number)] for number, prefix in enumerate(machines)]
    drill = Drill(tmp_path, agents, 4)
    yield drill
    drill.end()


@pytest.mark.parametrize("victim", [3, 1])
def test_rank_that_dies_is_named_with_its_end(drill: Drill, victim: int) -> None:
    drill.start("compute", "wait", victim, LONG)
    drill.signal_rank(victim, signal.SIGKILL)
    drill.wait_until_out()

    failure = drill.failure()
    assert (failure["rank"], failure["kind"], failure["method"]) == (victim, "death", "harm")
    assert "killed by SIGKILL" in failure["cause"]


def test_controller_that_dies_is_named_on_both_machines(drill: Drill) -> None:
    drill.start("idle", "wait", 0, LONG)
    drill.signal_rank(0, signal.SIGKILL)
    drill.wait_until_out()

    for rank in (1, 2, 3):
        failure = drill.failure(f"failure-rank{rank}.json")
        assert (failure["rank"], failure["kind"]) == (0, "death")


def test_stopped_rank_of_the_other_machine_is_named_and_killed_by_its_neighbour(
    drill: Drill,
) -> None:
    drill.start("compute", "wait", 3, LIMIT)
    drill.signal_rank(3, signal.SIGSTOP)
    drill.wait_until_out()

    failure = drill.failure()
    assert (failure["rank"], failure["kind"]) == (3, "stopped")
    assert "has been silent for" in failure["cause"]
