"""What may travel, and to whom: ranks that showed the run's id, names that are marked."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import spmdflow
from spmdflow.errors import ProtocolError
from spmdflow.message import HOMES, MAX_MESSAGE_BYTES
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.runtime.wire import RUN_ID_BYTES, Envelopes, Hub, Kind, RankSocket
from spmdflow.transfer.lane import CountedTransport
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker
from tests.zmtp import MORE, frame, ready

ROWS = {"ids": torch.zeros(0, dtype=torch.int64).numpy(), "inputs": []}


def wait_for_message(hub: Hub) -> tuple[int, bytes]:
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if (message := hub.receive()) is not None:
            return message
        hub.waiter.wait(0.05)
    raise AssertionError("no message came")


def test_nothing_is_sent_to_a_rank_before_it_has_shown_the_run_id() -> None:
    run_id = os.urandom(RUN_ID_BYTES)
    hub = Hub(run_id)
    envelopes = Envelopes(run_id)
    endpoint = RankSocket(hub.bind("127.0.0.1"), 1, run_id=run_id)
    endpoint.send(envelopes.seal(Kind.HELLO))
    rank, hello = wait_for_message(hub)

    before = hub.send(rank, envelopes.seal(Kind.BEAT))
    assert envelopes.open(hello, rank) == (Kind.HELLO, None)
    hub.admit(rank)
    after = hub.send(rank, envelopes.seal(Kind.BEAT))

    assert (before, after) == (False, True)
    endpoint.close()
    hub.close()
    hub.terminate()


def send_without_end(
    address: str, rank: int, hello: bytes, taken: list[int], looked: threading.Semaphore
) -> None:
    """HELLO, then parts of one message until the connection is closed; 16 for each look."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    part = frame(bytes(2**20), MORE)
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 60) as mine:
        mine.sendall(ready(rank))
        heard = b""
        while b"READY" not in heard:
            heard += mine.recv(4096)
        mine.sendall(frame(hello))
        while looked.acquire(timeout=60):
            for _ in range(16):
                mine.sendall(part)
                taken.append(len(part))


def test_message_without_end_is_cut_and_others_are_heard() -> None:
    run_id = os.urandom(RUN_ID_BYTES)
    taken = list[int]()
    looked = threading.Semaphore(0)
    hub = Hub(run_id)
    envelopes = Envelopes(run_id)
    address = hub.bind("127.0.0.1")
    hello = envelopes.seal(Kind.HELLO)
    arguments = address, 1, hello, taken, looked
    attacker = threading.Thread(target=send_without_end, args=arguments, daemon=True)
    attacker.start()
    assert wait_for_message(hub) == (1, hello)

    limit = time.monotonic() + 60
    parts = 0
    while not (cut := hub.cut_endless()) and time.monotonic() < limit:
        hub.any_lost()
        assert hub.receive() is None
        time.sleep(0.05)
        if len(taken) >= parts:  # all of the last ones came: however slow, it gets no further ahead
            parts += 16
            looked.release()
    looked.release()
    attacker.join(60)
    endpoint = RankSocket(address, 2, run_id=run_id)
    endpoint.send(hello)

    assert cut == [1] and not attacker.is_alive()
    assert MAX_MESSAGE_BYTES < sum(taken) < 20 * MAX_MESSAGE_BYTES
    assert wait_for_message(hub) == (2, hello)
    endpoint.close()
    hub.close()
    hub.terminate()


def test_large_messages_that_end_are_not_cut() -> None:
    run_id = os.urandom(RUN_ID_BYTES)
    hub = Hub(run_id)
    envelopes = Envelopes(run_id)
    endpoint = RankSocket(hub.bind("127.0.0.1"), 1, run_id=run_id)
    large = envelopes.seal(Kind.REPLY, bytes(MAX_MESSAGE_BYTES - 2**10))
    for _ in range(3):
        endpoint.send(large)
    cut = []
    sizes = []
    limit = time.monotonic() + 60
    while len(sizes) < 3 and time.monotonic() < limit:
        hub.any_lost()
        cut += hub.cut_endless()
        if (message := hub.receive()) is not None:
            sizes.append(len(message[1]))

    assert cut == [] and sizes == [len(large)] * 3
    endpoint.close()
    hub.close()
    hub.terminate()


class Toy(Worker):
    @register(transfer_mode="ONE_TO_ALL")
    def known(self) -> int:
        return 1

    def secret(self) -> int:
        return 2


def unmarked(batch: TensorDict, **_: Any) -> TensorDict:
    return batch


@pytest.fixture
def run(tmp_path: Path) -> Any:
    settings = RankSettings(0, torch.device("cpu"), 1, 1.0, tmp_path, None)
    state = RankState(settings, GroupTable(0, timeout_seconds=1), CountedTransport(None, seconds=1))
    operations = state.operations()

    def run_command(operation: str, **plain: Any) -> dict[str, Any]:
        return operations[operation]({"operation": operation, **plain}, 1)

    yield run_command


def spawn(run: Any, name: str) -> dict[str, Any]:
    layout = Layout.data_parallel((0,))
    plain = {"ranks": layout.ranks, "dp_size": 1}
    return run(
        "spawn", name="toy", layout=plain, config=None, total_steps=1, nodes=[0], **{"class": name}
    )


def test_command_runs_a_registered_method_and_no_other(run: Any) -> None:
    spawn(run, f"{__name__}:Toy")

    assert run("call", group="toy", method="known", arguments={})["value"] == 1
    for method in ("secret", "close", "__init__"):
        with pytest.raises(ProtocolError, match=rf"Toy.{method}: is not registered"):
            run("call", group="toy", method=method, arguments={})


def test_only_worker_classes_are_spawned(run: Any) -> None:
    with pytest.raises(
        ProtocolError, match="command: got os:system, expected a subclass of Worker"
    ):
        spawn(run, "os:system")


def test_only_marked_functions_are_mapped(run: Any) -> None:
    plain = {"ranks": [0], "arguments": {}, **ROWS}

    with pytest.raises(ProtocolError, match="expected a function marked with @map_function"):
        run("map", function=f"{__name__}:unmarked", **plain)


def test_every_public_worker_and_map_function_may_be_named_by_a_command() -> None:
    found = [getattr(spmdflow, name) for name in spmdflow.__all__]
    workers = [x for x in found if isinstance(x, type) and issubclass(x, Worker) and x.role]
    mapped = [x for x in found if hasattr(x, "_spmdflow_map_function")]

    assert len(workers) > 8 and len(mapped) > 4
    assert {thing.__module__ for thing in [*workers, *mapped]} <= HOMES
