"""A session of one rank, threads and sockets in one process: which thread runs what, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spmdflow.checkpoint.lock import claim_run_dir
from spmdflow.data.store import RowCondition
from spmdflow.errors import ConfigError, RunFailed
from spmdflow.failure.settings import SessionSettings
from spmdflow.runtime.call import Call, Pending, Transport
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.session import run_session


class Ranks:
    """What the one rank does: notes who ran which command, in order."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.arrived: set[int] = set()

    def operations_of(self, rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
        def move(payload: dict[str, Any], number: int) -> dict[str, Any]:
            time.sleep(payload.get("seconds", 0.0))
            self._note(f"transfer {number}")
            self.arrived.add(number)
            arrival.wake()
            return {}

        def call(payload: dict[str, Any], number: int) -> dict[str, Any]:
            awaited = payload["awaits"]
            there = arrival.wait_until(lambda: awaited <= len(self.arrived), payload["seconds"])
            self._note(f"call {number}")
            return {"there": there}

        return {"move": move, "call": call}

    def _note(self, what: str) -> None:
        self.ran.append((what, threading.current_thread().name))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = Ranks()

    def run_script(script: Any, **changes: Any) -> list[tuple[str, str]]:
        settings = replace(SessionSettings(tmp_path, (0,)), **changes)
        assert run_session(script, ranks.operations_of, settings) == 0
        return ranks.ran

    yield run_script
    dist.destroy_process_group()


def move(transport: Transport, number: int, **payload: float) -> Pending:
    command = {"operation": "move", **payload}
    return transport.submit(Call(number, "transfer", f"transfer {number}", {0: command}, 60.0))


def call(transport: Transport, number: int, *, awaits: int, seconds: float = 50.0) -> Pending:
    command = {"operation": "call", "awaits": awaits, "seconds": seconds}
    return transport.submit(Call(number, "compute", f"call {number}", {0: command}, 60.0))


def test_transfer_brings_rows_before_the_call_that_waits_for_them(run: Any) -> None:
    def script(transport: Transport) -> None:
        for number in range(1, 51):
            moved = move(transport, number)
            assert call(transport, number, awaits=number).result() == {0: {"there": True}}
            moved.result()

    ran = run(script)

    assert [what for what, _ in ran] == [
        f"{kind} {number}" for number in range(1, 51) for kind in ("transfer", "call")
    ]


def test_transfer_runs_while_a_call_waits_for_its_rows(run: Any) -> None:
    def script(transport: Transport) -> None:
        for number in range(1, 21):
            waiting = call(transport, number, awaits=number)
            time.sleep(0.01)
            move(transport, number).result()
            assert waiting.result() == {0: {"there": True}}

    ran = run(script)

    assert [what for what, _ in ran] == [
        f"{kind} {number}" for number in range(1, 21) for kind in ("transfer", "call")
    ]
    assert {thread for what, thread in ran if "transfer" in what} == {"transfer"}


def test_transfers_run_beside_calls_in_their_order(run: Any) -> None:
    def script(transport: Transport) -> None:
        slow = move(transport, 1, seconds=0.1)
        bringing = move(transport, 2)
        assert call(transport, 1, awaits=0).result() == {0: {"there": True}}
        assert call(transport, 2, awaits=2).result() == {0: {"there": True}}
        slow.result()
        bringing.result()

    ran = run(script)

    assert [what for what, _ in ran if "transfer" in what] == ["transfer 1", "transfer 2"]


def test_a_session_whose_io_thread_ends_while_the_script_looks_has_ended_well(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = Pending.done.fget
    assert is_done is not None

    def look(pending: Pending) -> bool:
        """As on a busy machine: between this look and the next line the session ends."""
        found = is_done(pending)
        if pending.label == "end" and not found:
            time.sleep(0.5)
        return found

    monkeypatch.setattr(Pending, "done", property(look))

    assert run(lambda transport: None) == []


def test_rows_that_never_come_are_missed_at_the_limit(run: Any) -> None:
    def script(transport: Transport) -> None:
        late = call(transport, 1, awaits=1, seconds=1.0)
        assert late.result() == {0: {"there": False}}

    ran = run(script)

    assert ran == [("call 1", "MainThread")]


def test_a_second_start_in_the_folder_of_a_live_run_writes_nothing_there(
    run: Any, tmp_path: Path
) -> None:
    lock = claim_run_dir(tmp_path)
    for name in ("stacks-rank7.txt", "failure-rank7.json", "status.json", "metrics.jsonl"):
        (tmp_path / name).write_text("of the live run")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with pytest.raises(ConfigError, match="in use by a live run"):
        run(lambda transport: None)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    lock.release()
    run(lambda transport: None)
    assert not (tmp_path / "failure-rank7.json").exists()


def test_a_run_whose_folder_was_replaced_writes_and_removes_no_report_in_the_new_one(
    run: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    others = ("status.json", "stacks-wanted", "failure.json")

    def script(transport: Transport) -> None:
        run_dir.rename(tmp_path / "moved")
        claim_run_dir(run_dir).release()
        for name in others:
            (run_dir / name).write_text("of the other run")
        time.sleep(1.0)  # some heartbeats, of which each would write status.json
        raise ValueError("the end")

    with pytest.raises(RunFailed, match="the end"):
        run(script, run_dir=run_dir, heartbeat_seconds=0.1, unwinds=True)

    assert sorted(path.name for path in run_dir.iterdir()) == sorted([".lock", *others])
    assert {(run_dir / name).read_text() for name in others} == {"of the other run"}
