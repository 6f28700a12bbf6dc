"""Sessions that fail inside a program that goes on: RunFailed on every rank, groups that work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from spmdflow.data.store import RowCondition
from spmdflow.errors import RunFailed
from spmdflow.runtime import executor
from spmdflow.runtime.call import Call, Transport
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.session import run_session
from tests.distributed.ranks import watch_ranks
from tests.distributed.session_parts import global_sum, settings_for, to_all

Spawn = Callable[..., list[Any]]


def _operations(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
    def fail(payload: dict[str, Any], number: int) -> dict[str, Any]:
        if rank in payload["on"]:
            raise ValueError(f"on rank {rank}")
        if payload.get("together"):
            dist.all_reduce(torch.ones(1), group=payload_groups[-1])
        return {}

    def await_rows(payload: dict[str, Any], number: int) -> dict[str, Any]:
        return {"there": arrival.wait_until(lambda: False, 600.0)}

    def rest(payload: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(payload["seconds"])
        return {}

    return {"fail": fail, "await rows": await_rows, "rest": rest}


payload_groups: list[Any] = []
"""A group of this session's, in the process of a rank."""


def _order(transport: Transport, operation: str, lane: str = "compute", **payload: Any) -> Any:
    everywhere = to_all(transport, {"operation": operation, **payload})
    return transport.submit(Call(1, lane, f"actor.{operation}", everywhere, 600.0))


def _raise_in_script(transport: Transport) -> None:
    _order(transport, "rest", seconds=10.5)
    raise KeyError("in the script")


def _fail_in_lane(transport: Transport) -> None:
    _order(transport, "fail", on=[1]).result()


def _fail_in_transfer(transport: Transport) -> None:
    waiting = _order(transport, "await rows")
    _order(transport, "fail", "transfer", on=[1]).result()
    waiting.result()


def _fail_beside_a_collective(transport: Transport) -> None:
    _order(transport, "fail", on=[2], together=True).result()


def _swallow(transport: Transport) -> None:
    try:
        _order(transport, "fail", on=[0, 1, 2]).result()
    except RunFailed:
        _order(transport, "rest", seconds=0.0).result()


SCRIPTS = {
    "script": (_raise_in_script, "rank 0: KeyError: 'in the script'"),
    "lane": (_fail_in_lane, "rank 1, actor.fail (call 1, compute lane): ValueError: on rank 1"),
    "transfer": (_fail_in_transfer, "rank 1, actor.fail (call 1, transfer lane): ValueError"),
    "collective": (_fail_beside_a_collective, "rank 2, actor.fail (call 1, compute lane): "),
    "swallowed": (_swallow, "actor.fail (call 1, compute lane): ValueError: on rank"),
}


def _run_all(folder: str, names: Sequence[str]) -> list[tuple[str, dict[str, Any], float, float]]:
    """One failing session after the other; what each rank was told, and a sum after it."""
    found = []
    for name in names:
        script, _ = SCRIPTS[name]
        payload_groups.append(dist.new_group([0, 1, 2]))
        # calls that are let through after an error in the script may take longer than this
        executor._LAST_RESORT_SECONDS = 10.0 if name == "script" else 600.0
        settings = settings_for(Path(folder) / name, unwinds=True)
        start = time.monotonic()
        with pytest.raises(RunFailed) as caught:
            run_session(script, _operations, settings, release=_release)
        took = time.monotonic() - start
        _release()
        found.append((str(caught.value), caught.value.record, took, global_sum(1)))
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    return found


def _release() -> None:
    if payload_groups:
        dist.destroy_process_group(payload_groups.pop())


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(tuple(SCRIPTS)[1:], id="lanes"),
        pytest.param(tuple(SCRIPTS)[:1], id="script", marks=pytest.mark.drill),
    ],
)
def test_failed_session_reaches_every_rank_as_an_exception_and_the_program_goes_on(
    spawn_ranks: Spawn, tmp_path: Path, names: tuple[str, ...]
) -> None:
    by_rank = spawn_ranks(_run_all, 3, str(tmp_path), names)

    for found in by_rank:
        for (text, record, seconds, total), name in zip(found, names, strict=True):
            _, expected = SCRIPTS[name]
            assert expected in text and record["cause"] in text
            assert record["traceback"] and total == 3.0 and seconds < 200.0, (text, seconds)
    assert by_rank[0][0][0] == by_rank[2][0][0]
    if "script" in names:
        assert '"kind": "script"' in (tmp_path / "script" / "failure.json").read_text()


def _hang(folder: str) -> None:
    def stuck(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
        def work(payload: dict[str, Any], number: int) -> dict[str, Any]:
            if rank == 1:
                raise ValueError("on rank 1")
            time.sleep(60.0)
            return {}

        return {"work": work}

    run_session(
        lambda transport: _order(transport, "work").result(),
        stuck,
        settings_for(Path(folder), unwinds=True),
    )


@pytest.mark.slow
def test_rank_that_does_not_come_back_ends_the_processes(tmp_path: Path) -> None:
    outcomes = watch_ranks(_hang, 2, str(tmp_path))

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    text = (tmp_path / "failure.json").read_text()
    assert "ValueError: on rank 1" in text and "did not leave the failed run within 10 s" in text
