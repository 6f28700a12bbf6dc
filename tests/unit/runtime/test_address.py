"""A node that has no 127.0.0.1: a network namespace of its own, for one thread of this process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from spmdflow.config.schema import RunConfig
from spmdflow.errors import ConfigError
from spmdflow.run import _join_group
from spmdflow.runtime.rendezvous import StartRefused, _loopback, refusal_without_address
from spmdflow.runtime.wire import Hub

CLONE_NEWNET = 0x40000000
Result = TypeVar("Result")


def in_own_network(work: Callable[[], Result], *commands: str) -> Result:
    """What work returns in an empty network namespace, once the `ip` commands have run there."""

    def run() -> Result:
        if shutil.which("ip") is None or ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
            pytest.skip("no right to make a network namespace, or no `ip`")
        if not Path("/proc/net/if_inet6").exists():
            pytest.skip("no IPv6")
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


ONLY_IPV6 = ("link set lo up", "address del 127.0.0.1/8 dev lo")


def gloo_error() -> RuntimeError:
    """What gloo raises on this node."""
    with pytest.raises(RuntimeError) as caught:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    return caught.value


def test_gloo_without_an_address_is_refused_with_the_interfaces_of_this_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    refusal = in_own_network(lambda: refusal_without_address(gloo_error(), ""), *ONLY_IPV6)

    assert str(refusal) == (
        "start: gloo found no address of this node to listen on (Cannot resolve 127.0.0.1 to a "
        "(local) address); set GLOO_SOCKET_IFNAME to the interface that reaches the other ranks "
        "(this node has lo; use lo if all ranks are on this node), and torchrun's --master-addr to "
        "an address of that interface"
    )


def test_interface_that_is_not_there_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ether9")

    refusal = refusal_without_address(gloo_error(), "ether9")

    assert str(refusal).startswith(
        "GLOO_SOCKET_IFNAME: got 'ether9', expected an interface of this node with an address ("
    )
    assert str(refusal).endswith("; set it to the one that reaches the other ranks, or unset it")


def test_rank_that_joins_without_an_address_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    place = {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "ether9"}
    for name, value in (address | place).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(StartRefused, match="GLOO_SOCKET_IFNAME: got 'ether9'"):
        _join_group(RunConfig())


def test_another_error_of_a_process_group_is_no_refusal() -> None:
    assert refusal_without_address(RuntimeError("Connection reset by peer"), "lo") is None


def test_controller_listens_on_the_loopback_address_that_the_node_has() -> None:
    def bind() -> str:
        hub = Hub(b"r" * 16, key=b"k" * 32, max_ranks=2)
        try:
            return hub.bind(_loopback())
        finally:
            hub.close()

    assert bind().startswith("tcp://127.0.0.1:")
    assert in_own_network(bind, *ONLY_IPV6).startswith("tcp://[::1]:")


def test_node_without_any_loopback_address_is_refused() -> None:
    commands = (*ONLY_IPV6, "address del ::1/128 dev lo")

    with pytest.raises(ConfigError, match=r"no loopback address, expected 127\.0\.0\.1 or ::1"):
        in_own_network(_loopback, *commands)
