"""What somebody on the network can do to a run: its port, torchrun's store, nothing else.

The attacker is one more rank of the world, outside of the session. It reads and writes the store as
it likes, and speaks to the controller's port through raw sockets. It cannot read RUN_DIR.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from spmdflow.failure.process import Process, node_identity
from spmdflow.message import decode, encode
from spmdflow.runtime import session, wire
from spmdflow.runtime.call import Call, Transport
from spmdflow.runtime.wire import RUN_ID_BYTES, Envelopes, Hub, Kind
from tests.distributed.ranks import watch_ranks
from tests.distributed.session_parts import operations, settings_for, to_all
from tests.zmtp import GREETING, MORE, frame, ready

Spawn = Callable[..., list[Any]]
MANY = 1500
"""Connections of a drill, of which rank 0 could keep about 950."""
SOME = 200
"""Connections by default."""
GREETING_SECONDS = 60
"""What a stranger's greeting may take here: far more than a call on a busy machine."""


class Attacker:
    """Reads the store like a rank, and connects to what it names."""

    def __init__(self, store: Any, ranks: tuple[int, ...], launch: int) -> None:
        members = hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest()
        self.store = store
        self.prefix = f"spmdflow/{members}/{launch}"

    def read(self, key: str) -> Any:
        return decode(bytes.fromhex(self.store.get(f"{self.prefix}/{key}").decode()))

    def write(self, key: str, value: Any) -> None:
        self.store.set(f"{self.prefix}/{key}", encode(value).hex())

    def wait(self, key: str, seconds: float = 600.0) -> None:
        self.store.wait([key], timedelta(seconds=seconds))

    def learn(self) -> None:
        """All that the store tells: run id, controller, address."""
        self.wait(f"{self.prefix}/controller")
        self.run_id, self.controller, addresses, _ = self.read("controller")
        (address,) = addresses.values()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.address = host, int(port)

    def say(self, data: bytes, *, seconds: float) -> bytes:
        """Send from a new connection; what comes back until it is closed, or seconds are over."""
        heard = b""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError), socket.create_connection(self.address, seconds) as mine:
            mine.sendall(data)
            while (left := until - time.monotonic()) > 0:
                mine.settimeout(left)
                if not (more := mine.recv(4096)):
                    break
                heard += more
        return heard

    def pour(self, head: bytes, piece: bytes, *, seconds: float, until: str = "") -> int:
        """Send pieces until seconds are over and a key is set, reconnecting; how many bytes were
        taken."""
        taken = 0
        end = time.monotonic() + seconds

        def goes_on() -> bool:
            return time.monotonic() < end or bool(until and not self.store.check([until]))

        while goes_on():
            with contextlib.suppress(OSError), socket.create_connection(self.address, 1) as mine:
                mine.settimeout(1)
                mine.sendall(head)
                while goes_on():
                    mine.sendall(piece)
                    taken += len(piece)
        return taken

    def crowd(self, first: bytes, *, size: int) -> list[socket.socket]:
        """Connections that say this and no more."""
        idle = [socket.socket() for _ in range(size)]
        for mine in idle:
            mine.setblocking(False)
            mine.connect_ex(self.address)
        time.sleep(0.3)
        for mine in idle:
            with contextlib.suppress(OSError):
                mine.send(first)
        return idle

    def memory(self) -> float:
        """MB that the controller's process holds."""
        status = Path(f"/proc/{self.controller.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.controller.pid}/fd"))


def _attack(attacker: Attacker, release: str, size: int) -> dict[str, Any]:
    """Before rank 2 connects: its name, an endless message, a flood, a crowd; then once more.

    size: of the crowd.
    """
    attacker.learn()
    found: dict[str, Any] = {}
    envelopes = Envelopes(attacker.run_id)
    memory = attacker.memory()
    hello = envelopes.seal(Kind.HELLO)
    found["heard as rank 2"] = attacker.say(ready(2) + frame(hello), seconds=1.5)
    part = frame(bytes(2**20), MORE)
    found["endless"] = attacker.pour(ready(2) + frame(b"", MORE), part, seconds=0.5)
    flood = frame(envelopes.seal(Kind.REPLY, [1, {}])) * 100
    found["flood"] = attacker.pour(ready(1), flood, seconds=0.5)
    idle = attacker.crowd(GREETING[:1], size=size)
    time.sleep(0.3)
    found["descriptors"] = attacker.descriptors()
    for mine in idle:
        mine.close()
    limit = time.monotonic() + 200
    while (grown := attacker.memory() - memory) >= 30 and time.monotonic() < limit:
        time.sleep(0.05)  # the endless message is cut at a look, and freed by libzmq's thread
    found["MB"] = grown
    attacker.store.set(f"{release}/go", "")
    attacker.wait(f"{release}/all here")
    try:
        socket.create_connection(attacker.address, 60.0).close()
        found["still listens"] = True
    except OSError:
        found["still listens"] = False
    idle = attacker.crowd(b"", size=size)
    attacker.store.set(f"{release}/crowd", "")
    enough = f"{release}/enough"
    found["flood after"] = attacker.pour(ready(1), flood, seconds=0.5, until=enough)
    found["descriptors after"] = attacker.descriptors()
    attacker.store.set(f"{release}/over", "")
    for mine in idle:
        mine.close()
    return found


def _besieged(run_dir: str, secrets: list[str | None], size: int) -> list[dict[str, Any]]:
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    seen = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024) if rank == 0 else (limit, limit))
    for launch, secret in enumerate(secrets, 1):
        release = f"test/{launch}"
        if rank == 3:
            seen.append(_attack(Attacker(store, (0, 1, 2), launch), release, size))
        else:
            settings = settings_for(Path(run_dir), ranks=(0, 1, 2), secret=secret)
            seen.append(_defend(settings, release, is_late=rank == 2))
        dist.barrier()
    return seen


def _defend(settings: Any, release: str, *, is_late: bool) -> dict[str, Any]:
    """A session whose rank 2 connects when it is told to, and calls until the attack is over.

    The attack is over when there were calls enough.
    """
    store = dist.distributed_c10d._get_default_store()
    found = {"calls": 0, "longest": 0.0}
    beside = 0
    connect = session.RankSocket

    def late(*arguments: Any, **more: Any) -> Any:
        store.wait([f"{release}/go"], timedelta(seconds=600))
        return connect(*arguments, **more)

    def main(transport: Transport) -> None:
        nonlocal beside
        store.set(f"{release}/all here", "")
        while not store.check([f"{release}/over"]):
            began = time.monotonic()
            found["calls"] += 1
            everywhere = to_all(transport, {"operation": "note"})
            order = Call(found["calls"], "compute", "a.note", everywhere, 600.0)
            assert len(transport.submit(order).result()) == 3
            found["longest"] = max(found["longest"], time.monotonic() - began)
            beside += store.check([f"{release}/crowd"])
            if beside == 100:
                store.set(f"{release}/enough", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RankSocket", late if is_late else connect)
        patch.setattr(wire, "_HANDSHAKE_MILLISECONDS", 1000 * GREETING_SECONDS)
        assert session.run_session(main, operations, settings) == 0
    return found


@pytest.mark.drill
@pytest.mark.parametrize(
    ("secrets", "size"),
    [(["word"], SOME), ([None, "word"], MANY)],
)
def test_whoever_reaches_the_port_gets_nothing_and_the_run_goes_on(
    secrets: list[str | None], size: int, spawn_ranks: Spawn, tmp_path: Path
) -> None:
    defended, *_, attacks = spawn_ranks(_besieged, 4, str(tmp_path), secrets, size)

    sys.stdout.write(f"{defended}\n{attacks}\n")
    for attack in attacks:
        assert len(attack["heard as rank 2"]) <= 64, "more than a greeting"
        assert attack["MB"] < 30
        assert attack["descriptors"] <= 1024
        assert not attack["still listens"]
        assert attack["flood after"] == 0
        assert attack["descriptors after"] < 150
    for session_ in defended:
        assert session_["calls"] >= 100
        assert session_["longest"] < GREETING_SECONDS, "no call has waited for a greeting"
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# ---- the store


def _believed(run_dir: str) -> Any:
    """Two sessions, each waiting for rank 4, which has put itself in the controllers' place."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    sessions: dict[str, Any] = {"plain": ((0, 1, 4), None), "secret": ((2, 3, 4), "word")}
    if rank < 4:
        folder = "plain" if rank < 2 else "secret"
        ranks, secret = sessions[folder]
        dist.barrier()
        settings = settings_for(Path(run_dir) / folder, ranks=ranks, secret=secret)
        return session.run_session(_never, operations, replace(settings, start_seconds=8.0))
    network = f"{node_identity()}/{os.readlink('/proc/self/ns/net')}"
    hubs = []
    for (ranks, _), key in zip(sessions.values(), (None, b"guessed"), strict=True):
        run_id = os.urandom(RUN_ID_BYTES)
        hubs.append(Hub(run_id, key=key))
        here = [run_id, Process.of(os.getpid()), {network: hubs[-1].bind("127.0.0.1")}, []]
        Attacker(store, ranks, 1).write("controller", here)
    dist.barrier()
    heard = 0
    visited = set[Hub]()
    until = time.monotonic() + 400.0
    while len(visited) < len(hubs) and time.monotonic() < until:
        heard += sum(hub.receive() is not None for hub in hubs)
        visited |= {hub for hub in hubs if hub.any_lost()}
        time.sleep(0.01)
    heard += sum(hub.receive() is not None for hub in hubs)
    return {"heard": heard, "visited": len(visited)}


def _never(transport: Transport) -> None:
    raise AssertionError("the ranks have met")


def test_whoever_writes_the_store_is_not_obeyed_as_controller(tmp_path: Path) -> None:
    outcomes = watch_ranks(_believed, 5, str(tmp_path))

    assert outcomes[4].value == {"heard": 0, "visited": 2}
    for folder, first in (("plain", 0), ("secret", 2)):
        assert re.search(r"ranks \[4\] did not arrive within \d+ s", str(outcomes[first].error))
        assert outcomes[first + 1].exit_code == 1
        text = (tmp_path / folder / f"failure-rank{first + 1}.json").read_text()
        assert "its connection is lost" in text and '"others": []' in text
