"""A rank of the failure drill: something goes wrong on the victim while its peers wait for it.

    torchrun ... session_drill.py RUN_DIR WHERE HOW VICTIM SECONDS

WHERE is compute, transfer (a command of that lane) or idle; HOW is exception, exit or wait (the
test does the harm from outside). Files RUN_DIR/running-<rank> say that a rank is where it should,
the file RUN_DIR/go lets the victim harm itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from spmdflow.data.store import RowCondition
from spmdflow.failure.settings import SessionSettings
from spmdflow.log import set_up_logging
from spmdflow.runtime.call import Call, Transport
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.session import run_session

RUN_DIR = Path(sys.argv[1])
WHERE = sys.argv[2]
HOW = sys.argv[3]
LONG_SECONDS = 600.0
"""Nothing lasts as long: the test has ended everything before."""
LANE = WHERE
VICTIM = int(sys.argv[4])
SECONDS = float(sys.argv[5])


def main(transport: Transport) -> None:
    """The script: a call that works, then the one during which it happens."""
    ranks = range(transport.world_size)
    warm = dict.fromkeys(ranks, {"operation": "meet"})
    transport.submit(Call(1, "compute", "actor.meet", warm, LONG_SECONDS)).result()
    if WHERE == "idle":
        harm = {VICTIM: {"operation": "harm_later"}}
        transport.submit(Call(2, "compute", "actor.harm_later", harm, LONG_SECONDS)).result()
        for rank in ranks:
            (RUN_DIR / f"running-{rank}").touch()
        if HOW == "exception":
            raise RuntimeError("drill in the script")
        time.sleep(LONG_SECONDS)
    else:
        harm = dict.fromkeys(ranks, {"operation": "harm"})
        transport.submit(Call(2, LANE, "actor.harm", harm, SECONDS)).result()


def operations_of(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
    """What the ranks can do."""

    def meet(payload: dict[str, Any], number: int) -> dict[str, Any]:
        dist.barrier(group=GROUPS["compute"])
        return {}

    def harm(payload: dict[str, Any], number: int) -> dict[str, Any]:
        (RUN_DIR / f"running-{rank}").touch()
        if rank == VICTIM:
            _harm()
        dist.all_reduce(torch.zeros(1), group=GROUPS[LANE])  # waits for the victim
        return {}

    def harm_later(payload: dict[str, Any], number: int) -> dict[str, Any]:
        if HOW == "exit":
            threading.Thread(target=_exit_when_all_are_there, daemon=True).start()
        return {}

    return {"meet": meet, "harm": harm, "harm_later": harm_later}


def _harm() -> None:
    _await_all()
    if HOW == "exception":
        raise RuntimeError("drill in a lane")
    if HOW == "exit":
        os._exit(7)
    time.sleep(LONG_SECONDS)


def _exit_when_all_are_there() -> None:
    _await_all()
    os._exit(7)


def _await_all() -> None:
    """Until every rank is where it should be and the test says so, and a while more: into the
    collective."""
    files = [RUN_DIR / f"running-{rank}" for rank in range(dist.get_world_size())]
    files.append(RUN_DIR / "go")
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    time.sleep(0.3)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    set_up_logging(dist.get_rank())
    world = list(range(dist.get_world_size()))
    GROUPS = {"compute": dist.new_group(world), "transfer": dist.new_group(world)}
    (RUN_DIR / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    settings = SessionSettings(
        run_dir=RUN_DIR,
        ranks=tuple(world),
        start_seconds=LONG_SECONDS,
        call_seconds=SECONDS,
        heartbeat_seconds=2.0,
    )
    sys.exit(run_session(main, operations_of, settings))
