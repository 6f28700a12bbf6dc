"""Sessions on real ranks: orders, order of events, limits, and what is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from spmdflow.controller.executor import Operation
from spmdflow.controller.io import Order, Transport
from spmdflow.controller.session import Member, SessionSettings, run_session
from spmdflow.errors import MessageError, ProtocolError
from tests.distributed.ranks import watch_ranks

Spawn = Callable[..., list[Any]]


def _settings(run_dir: Path, **changes: Any) -> SessionSettings:
    ranks = changes.pop("ranks", tuple(range(dist.get_world_size())))
    return SessionSettings(run_dir=run_dir, ranks=ranks, start_seconds=30.0, **changes)


def _operations(member: Member) -> Mapping[str, Operation]:
    log: list[Any] = []

    def note(payload: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(payload.get("sleep", 0.0))
        log.append([number, threading.current_thread().name])
        return {"rank": member.rank, "number": number}

    return {
        "note": note,
        "echo": lambda payload, number: {"value": payload["value"]},
        "log": lambda payload, number: {"log": log},
        "sum": lambda payload, number: {"sum": _global_sum(member.rank)},
    }


def _global_sum(value: int) -> float:
    total = torch.tensor([float(value)])
    dist.all_reduce(total, group=dist.group.WORLD)
    return float(total)


def _to_all(transport: Transport, payload: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(transport.world_size), payload)


# ---- what every rank of a test runs


def _round_trips(run_dir: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def main(transport: Transport) -> None:
        everywhere = _to_all(transport, {"operation": "note"})
        first = transport.submit(Order(1, "compute", "a.note", everywhere, 10.0))
        seen["replies"] = first.result()
        seen["done"] = first.done
        one = {2: {"operation": "echo", "value": {"a": [1, None, 2.5, b"x"]}}}
        seen["echo"] = transport.submit(Order(2, "compute", "a.echo", one, 10.0)).result()
        collective = _to_all(transport, {"operation": "sum"})
        seen["sum"] = transport.submit(Order(3, "compute", "a.sum", collective, 10.0)).result()

    status = run_session(main, _operations, _settings(Path(run_dir)))
    return seen | {"status": status}


def test_orders_reach_their_ranks_and_replies_come_back(spawn_ranks: Spawn, tmp_path: Path) -> None:
    seen, *others = spawn_ranks(_round_trips, 3, str(tmp_path))

    assert seen["replies"] == {rank: {"rank": rank, "number": 1} for rank in range(3)}
    assert seen["done"]
    assert seen["echo"] == {2: {"value": {"a": [1, None, 2.5, b"x"]}}}
    assert [reply["sum"] for reply in seen["sum"].values()] == [3.0, 3.0, 3.0]
    assert [other["status"] for other in [seen, *others]] == [0, 0, 0]
    assert not list(tmp_path.iterdir())


def _order_of_events(run_dir: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"events": []}
    events = seen["events"]

    def main(transport: Transport) -> None:
        def release(_: Any) -> None:
            events.append("done 1")
            order = Order(
                5, "transfer", "release", released, 10.0, lambda _: events.append("done 5")
            )
            seen["released"] = transport.submit(order)

        slow = _to_all(transport, {"operation": "note", "sleep": 0.3})
        quick = _to_all(transport, {"operation": "note"})
        released = {1: {"operation": "note"}}
        pending = [
            transport.submit(Order(1, "compute", "a.slow", slow, 10.0, release)),
            transport.submit(Order(2, "compute", "a.slow", slow, 10.0)),
            transport.submit(Order(3, "compute", "a.quick", quick, 10.0)),
        ]
        transport.post(lambda: events.append("posted"))
        seen["pending at once"] = not any(one.done for one in pending)
        pending[-1].result()
        seen["released"] = seen["released"].result()
        logs = transport.submit(
            Order(6, "compute", "a.log", _to_all(transport, {"operation": "log"}), 9.0)
        )
        seen["logs"] = {rank: reply["log"] for rank, reply in logs.result().items()}

    run_session(main, _operations, _settings(Path(run_dir)))
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
        run_session(lambda transport: None, _operations, _settings(Path(run_dir)))
    return {"before": before, "after": _state(), "sum": _global_sum(dist.get_rank())}


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
        seen["replies"] = transport.submit(Order(1, "compute", "a.note", orders, 10.0)).result()

    if dist.get_rank() in (1, 3):
        run_session(main, _operations, _settings(Path(run_dir), ranks=(1, 3)))
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
                transport.submit(Order(1, "compute", "a.echo", {0: payload}, 1.0))
            except MessageError as err:
                caught.append(str(err))
        good = {0: {"operation": "echo", "value": 1}}
        transport.submit(Order(2, "compute", "a.echo", good, 1.0)).result()

    run_session(main, _operations, _settings(Path(run_dir)))
    return caught


def test_payload_that_is_no_plain_data_is_refused_in_the_script_which_may_go_on(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    tensor, function = spawn_ranks(_errors_before_sending, 1, str(tmp_path))[0]

    assert "got torch.Tensor" in tensor and "expected plain data" in tensor
    assert "got builtins.function" in function


def _with_secret(run_dir: str, secrets: list[str | None]) -> int:
    secret = secrets[dist.get_rank()]
    settings = _settings(Path(run_dir), secret=secret, heartbeat_seconds=2.0)
    return run_session(_one_round, _operations, settings)


def _one_round(transport: Transport) -> None:
    everywhere = _to_all(transport, {"operation": "note"})
    transport.submit(Order(1, "compute", "a.note", everywhere, 10.0)).result()


def test_session_with_a_secret_works(spawn_ranks: Spawn, tmp_path: Path) -> None:
    assert spawn_ranks(_with_secret, 2, str(tmp_path), ["word", "word"]) == [0, 0]


@pytest.mark.parametrize("secrets", [["word", None], ["word", "other"], [None, "word"]])
def test_rank_with_another_secret_ends_the_run_within_seconds(
    tmp_path: Path, secrets: list[str | None]
) -> None:
    start = time.monotonic()
    outcomes = watch_ranks(_with_secret, 2, str(tmp_path), secrets, seconds=60)

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert time.monotonic() - start < 20
    assert "SPMDFLOW_SECRET" in (tmp_path / "failure-rank1.json").read_text()


def _stop_by_sigterm(run_dir: str) -> list[Any]:
    seen: list[Any] = []
    settings = _settings(Path(run_dir), on_sigterm=lambda: seen.append("hook"))

    def main(transport: Transport) -> None:
        everywhere = _to_all(transport, {"operation": "note", "sleep": 0.05})
        deadline = time.monotonic() + 20
        while not transport.stop_requested and time.monotonic() < deadline:
            transport.submit(Order(1, "compute", "a.note", everywhere, 10.0)).result()
        seen.append(transport.stop_requested)

    def operations(member: Member) -> Mapping[str, Operation]:
        if member.rank == 1:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
        return _operations(member)

    run_session(main, operations, settings)
    return seen


def test_sigterm_without_a_failure_asks_the_script_to_stop(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    start = time.monotonic()
    seen = spawn_ranks(_stop_by_sigterm, 2, str(tmp_path))

    assert seen == [["hook", True], []]
    assert time.monotonic() - start < 15


def _forever(run_dir: str, operation: str) -> int:
    def main(transport: Transport) -> None:
        everywhere = _to_all(transport, {"operation": operation})
        transport.submit(Order(1, "compute", "a.work", everywhere, 1.0)).result()

    return run_session(main, _endless, _settings(Path(run_dir)))


def _endless(member: Member) -> Mapping[str, Operation]:
    def only_rank_1(payload: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(60.0 if member.rank == 1 else 0.0)
        return {}

    return {"hang": only_rank_1}


def test_call_beyond_its_limit_ends_the_run_and_names_rank_and_method(tmp_path: Path) -> None:
    outcomes = watch_ranks(_forever, 2, str(tmp_path), "hang", seconds=60)
    text = (tmp_path / "failure.json").read_text()

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for part in ('"rank": 1', '"method": "work"', '"kind": "deadline"', "limit of 1 s"):
        assert part in text
    assert "only_rank_1" in (tmp_path / "stacks-rank1.txt").read_text()


def test_unknown_operation_ends_the_run_naming_the_known_ones(tmp_path: Path) -> None:
    watch_ranks(_forever, 2, str(tmp_path), "walk", seconds=60)

    text = (tmp_path / "failure.json").read_text()
    assert ProtocolError.__name__ in text and "'walk'" in text and "hang" in text
