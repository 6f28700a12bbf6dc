"""What the tests of sessions share: settings, operations, a script of one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from spmdflow.data.store import RowCondition
from spmdflow.failure.settings import SessionSettings
from spmdflow.runtime.call import Call, Transport
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.session import run_session


def settings_for(run_dir: Path, **changes: Any) -> SessionSettings:
    ranks = changes.pop("ranks", tuple(range(dist.get_world_size())))
    settings = {"start_seconds": 600.0, **changes}
    return SessionSettings(run_dir=run_dir, ranks=ranks, **settings)


def operations(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
    log: list[Any] = []

    def note(payload: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(payload.get("sleep", 0.0))
        if "file" in payload:
            wait_for(Path(payload["file"]).exists)
        if rank == payload.get("rank"):
            wait_for(lambda: payload["after"] in [noted for noted, _ in log])
        log.append([number, threading.current_thread().name])
        return {"rank": rank, "number": number}

    return {
        "note": note,
        "echo": lambda payload, number: {"value": payload["value"]},
        "log": lambda payload, number: {"log": log},
        "sum": lambda payload, number: {"sum": global_sum(rank)},
    }


def wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    """Until it holds, or for so long."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def global_sum(value: int) -> float:
    total = torch.tensor([float(value)])
    dist.all_reduce(total, group=dist.group.WORLD)
    return float(total)


def to_all(transport: Transport, payload: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(transport.world_size), payload)


def with_secret(run_dir: str, secrets: list[str | None]) -> int:
    secret = secrets[dist.get_rank()]
    settings = settings_for(
        Path(run_dir), secret=secret, heartbeat_seconds=2.0, start_seconds=600.0
    )
    return run_session(one_round, operations, settings)


def one_round(transport: Transport) -> None:
    everywhere = to_all(transport, {"operation": "note"})
    transport.submit(Call(1, "compute", "a.note", everywhere, 60.0)).result()
