"""Sessions on real ranks: orders, order of events, and what is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from spmdflow.data.store import RowCondition
from spmdflow.errors import MessageError
from spmdflow.runtime.call import Call, Pending, Transport
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.io import Io
from spmdflow.runtime.session import run_session
from spmdflow.runtime.wire import Envelopes, Kind, RankSocket
from tests.distributed.session_parts import (
    global_sum,
    one_round,
    operations,
    settings_for,
    to_all,
    with_secret,
)

Spawn = Callable[..., list[Any]]


# ---- what every rank of a test runs


def _round_trips(run_dir: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def main(transport: Transport) -> None:
        everywhere = to_all(transport, {"operation": "note"})
        first = transport.submit(Call(1, "compute", "a.note", everywhere, 60.0))
        seen["replies"] = first.result()
        seen["done"] = first.done
        one = {2: {"operation": "echo", "value": {"a": [1, None, 2.5, b"x"]}}}
        seen["echo"] = transport.submit(Call(2, "compute", "a.echo", one, 60.0)).result()
        collective = to_all(transport, {"operation": "sum"})
        seen["sum"] = transport.submit(Call(3, "compute", "a.sum", collective, 60.0)).result()

    status = run_session(main, operations, settings_for(Path(run_dir)))
    return seen | {"status": status}


def test_orders_reach_their_ranks_and_replies_come_back(spawn_ranks: Spawn, tmp_path: Path) -> None:
    seen, *others = spawn_ranks(_round_trips, 3, str(tmp_path))

    assert seen["replies"] == {rank: {"rank": rank, "number": 1} for rank in range(3)}
    assert seen["done"]
    assert seen["echo"] == {2: {"value": {"a": [1, None, 2.5, b"x"]}}}
    assert [reply["sum"] for reply in seen["sum"].values()] == [3.0, 3.0, 3.0]
    assert [other["status"] for other in [seen, *others]] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def _order_of_events(run_dir: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"events": []}
    events = seen["events"]

    def main(transport: Transport) -> None:
        def release(_: Any) -> None:
            events.append("done 1")
            call = Call(5, "transfer", "release", released, 60.0)
            seen["released"] = transport.submit(call, lambda _: events.append("done 5"))

        seen_at_once = Path(run_dir) / "seen"
        slow = to_all(transport, {"operation": "note", "file": str(seen_at_once)})
        held = to_all(transport, {"operation": "note", "rank": 1, "after": 5})
        quick = to_all(transport, {"operation": "note"})
        released = {1: {"operation": "note"}}
        pending = [
            transport.submit(Call(1, "compute", "a.slow", slow, 60.0), release),
            transport.submit(Call(2, "compute", "a.held", held, 60.0)),
            transport.submit(Call(3, "compute", "a.quick", quick, 60.0)),
        ]
        transport.post(lambda: events.append("posted"))
        seen["pending at once"] = not any(one.done for one in pending)
        seen_at_once.touch()
        pending[-1].result()
        seen["released"] = seen["released"].result()
        logs = transport.submit(
            Call(6, "compute", "a.log", to_all(transport, {"operation": "log"}), 60.0)
        )
        seen["logs"] = {rank: reply["log"] for rank, reply in logs.result().items()}

    run_session(main, operations, settings_for(Path(run_dir)))
    return seen


def test_transfer_released_by_a_reply_overtakes_later_methods(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    seen = spawn_ranks(_order_of_events, 2, str(tmp_path))[0]

    assert seen["pending at once"]
    assert seen["events"] == ["posted", "done 1", "done 5"]
    assert seen["released"] == {1: {"rank": 1, "number": 5}}
    assert [number for number, _ in seen["logs"][0]] == [1, 2, 3]
    assert seen["logs"][1] == [
        [1, "MainThread"],
        [5, "transfer"],  # while call 2 was running
        [2, "MainThread"],
        [3, "MainThread"],
    ]


def _left_behind(run_dir: str) -> dict[str, Any]:
    before = _state()
    for _ in range(2):
        run_session(lambda transport: None, operations, settings_for(Path(run_dir)))
    return {"before": before, "after": _state(), "sum": global_sum(dist.get_rank())}


def _state() -> list[Any]:
    return [
        sorted(thread.name for thread in threading.enumerate()),
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        signal.getsignal(signal.SIGTERM),
        sys.getswitchinterval(),
        signal.set_wakeup_fd(-1),
    ]


def test_sessions_end_with_threads_signals_and_groups_as_they_were(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    for seen in spawn_ranks(_left_behind, 2, str(tmp_path)):
        assert seen["after"] == seen["before"]
        assert seen["sum"] == 1.0


def _on_a_subset(run_dir: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def main(transport: Transport) -> None:
        seen["size"] = transport.world_size
        orders = {1: {"operation": "note"}, 3: {"operation": "note"}}
        seen["replies"] = transport.submit(Call(1, "compute", "a.note", orders, 60.0)).result()

    if dist.get_rank() in (1, 3):
        run_session(main, operations, settings_for(Path(run_dir), ranks=(1, 3)))
    return seen


def test_session_on_some_ranks_leaves_the_others_alone(spawn_ranks: Spawn, tmp_path: Path) -> None:
    seen = spawn_ranks(_on_a_subset, 4, str(tmp_path))

    assert seen[1] == {"size": 2, "replies": {rank: {"rank": rank, "number": 1} for rank in (1, 3)}}
    assert seen[0] == seen[2] == seen[3] == {}


def _errors_before_sending(run_dir: str) -> list[str]:
    caught: list[str] = []

    def main(transport: Transport) -> None:
        for value in (torch.zeros(2), lambda: 1):
            try:
                payload = {"operation": "echo", "value": value}
                transport.submit(Call(1, "compute", "a.echo", {0: payload}, 1.0))
            except MessageError as err:
                caught.append(str(err))
        good = {0: {"operation": "echo", "value": 1}}
        transport.submit(Call(2, "compute", "a.echo", good, 60.0)).result()

    run_session(main, operations, settings_for(Path(run_dir)))
    return caught


def test_payload_that_is_no_plain_data_is_refused_in_the_script_which_may_go_on(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    tensor, function = spawn_ranks(_errors_before_sending, 1, str(tmp_path))[0]

    assert "got torch.Tensor" in tensor and "expected plain data" in tensor
    assert "got builtins.function" in function


def test_session_with_a_secret_works(spawn_ranks: Spawn, tmp_path: Path) -> None:
    assert spawn_ranks(with_secret, 2, str(tmp_path), ["word", "word"]) == [0, 0]


def _stop_by_sigterm(run_dir: str) -> list[Any]:
    seen: list[Any] = []

    def main(transport: Transport) -> None:
        everywhere = to_all(transport, {"operation": "note", "sleep": 0.05})
        deadline = time.monotonic() + 60
        while not transport.stop_requested and time.monotonic() < deadline:
            transport.submit(Call(1, "compute", "a.note", everywhere, 60.0)).result()
        seen.append(transport.stop_requested)

    def with_sigterm(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
        if rank == 1:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
        return operations(rank, arrival)  # signals are the session's by now

    run_session(main, with_sigterm, settings_for(Path(run_dir)))
    return seen


def test_sigterm_without_a_failure_asks_the_script_to_stop(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    assert spawn_ranks(_stop_by_sigterm, 2, str(tmp_path)) == [[True], []]


def _storm(run_dir: str, orders: int) -> dict[str, Any]:
    """Two script threads and every on_done submit, to both lanes."""
    done: list[int] = []
    released: list[int] = []
    wrong: list[Any] = []
    waiting: list[Any] = []

    def main(transport: Transport) -> None:
        def submit(number: int, rank: int) -> None:
            def release(replies: Any) -> None:
                done.append(number)
                if replies[rank] != {"value": number}:
                    wrong.append((number, replies))
                waiting.append(_submit_note(transport, number, rank, released))

            commands = {rank: {"operation": "echo", "value": number}, 0: {"operation": "note"}}
            pending = transport.submit(Call(number, "compute", "a.echo", commands, 60.0), release)
            if number % 3 == 0:
                pending.result()

        def work(start: int) -> None:
            for number in range(start, orders, 2):
                submit(number, 1 + start)

        other = threading.Thread(target=work, args=(1,))
        other.start()
        work(0)
        other.join()
        everywhere = to_all(transport, {"operation": "note"})
        transport.submit(Call(0, "compute", "a.note", everywhere, 60.0)).result()
        for one in list(waiting):
            one.result()

    run_session(main, operations, settings_for(Path(run_dir)))
    return {"done": done, "released": released, "wrong": wrong}


def _submit_note(transport: Transport, number: int, rank: int, released: list[int]) -> Pending:
    call = Call(number, "transfer", "r", {rank: {"operation": "note"}}, 60.0)
    return transport.submit(call, lambda _: released.append(number))


def test_thousands_of_orders_from_two_threads_and_from_on_done_all_arrive_once_in_order(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    orders = 3000
    seen = spawn_ranks(_storm, 3, str(tmp_path), orders)[0]

    assert seen["wrong"] == []
    assert sorted(seen["done"]) == sorted(seen["released"]) == list(range(orders))
    for start in (0, 1):  # one thread's orders go to one rank
        assert [n for n in seen["done"] if n % 2 == start] == list(range(start, orders, 2))
        assert [n for n in seen["released"] if n % 2 == start] == list(range(start, orders, 2))


def _foreign_message(run_dir: str) -> list[Any]:
    """A stranger who knows the address sends to the controller as if it were a rank."""
    seen: list[Any] = []

    def main(transport: Transport) -> None:
        assert isinstance(transport, Io)
        address = transport._hub.bind("127.0.0.1")
        stranger = RankSocket(address, 1, run_id=b"?" * 16)
        stranger.send(Envelopes(b"?" * 16).seal(Kind.REPLY, [1, {}]))
        stranger.send(b"")
        time.sleep(0.3)
        seen.append(one_round(transport))
        stranger.close()

    run_session(main, operations, settings_for(Path(run_dir)))
    return seen


def test_messages_of_a_stranger_do_no_harm(spawn_ranks: Spawn, tmp_path: Path) -> None:
    assert spawn_ranks(_foreign_message, 1, str(tmp_path)) == [[None]]
