"""A call's early method runs beside the calls before it, as soon as its rows are there."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.executor import COMPUTE, Command, Lane
from spmdflow.runtime.failure import Failure
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.transfer.lane import CountedTransport
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import CallInfo, Worker

IDS = np.arange(3)
BEGUN = threading.Event()


class Judging(Worker):
    """Makes rows, computes until its judge has begun, and then judges."""

    @register(transfer_mode="DP_PROTO", writes=("number",))
    def make(self, batch: TensorDict) -> TensorDict:
        """number: 0, 1, 2."""
        return TensorDict({"number": torch.arange(3.0)}, batch_size=[3])

    @register(transfer_mode="DP_PROTO", reads=("number",), writes=("late",))
    def compute(self, batch: TensorDict) -> TensorDict:
        """late: whether the judge had not begun after a while."""
        late = torch.full((3,), not BEGUN.wait(20))
        return TensorDict({"late": late}, batch_size=[3])

    @register(transfer_mode="DP_PROTO", reads=("number",), writes=("twice",), early="judge")
    def double(self, batch: TensorDict) -> TensorDict:
        """twice: what the early method made."""
        assert self.begun is not None
        return TensorDict({"twice": self.begun.result()}, batch_size=[3])

    def judge(self, batch: TensorDict, call: CallInfo) -> torch.Tensor:
        """2 * number; an error if the settings want one."""
        BEGUN.set()
        if self.cfg:
            raise ValueError(self.cfg)
        assert call.row_ids.tolist() == IDS.tolist()
        return 2 * batch["number"]


class Reporter:
    """What the lane said."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.lane = Lane(COMPUTE, 0, self)

    def reply(self, ticket: int, payload: dict[str, Any]) -> None:
        """Not looked at."""

    def fail(self, failure: Failure) -> None:
        """Kept."""
        self.failures.append(failure)

    def stay(self) -> None:
        """The session ends."""
        self.lane.unwind()

    def lane_ended(self, name: str) -> None:
        """Not looked at."""


def run(run_dir: Path, error: str) -> tuple[RankState, list[Failure]]:
    """All commands wait in the lane before the first one runs."""
    BEGUN.clear()
    settings = RankSettings(0, torch.device("cpu"), 0, 5.0, run_dir)
    groups, transport = GroupTable(0, timeout_seconds=5), CountedTransport(None, seconds=5)
    state, reporter = RankState(settings, groups, transport), Reporter()
    reporter.lane.operations = state.operations()
    spawn = {"operation": "spawn", "name": "judging", "config": error, "total_steps": 1}
    spawn |= {"class": f"{__name__}:Judging", "nodes": [0]}
    spawn |= {"layout": asdict(Layout.data_parallel((0,)))}
    row_input = {"result": 2, "columns": ["number"], "ids": IDS}
    call = {"operation": "call", "group": "judging", "step": 1, "arguments": {}, "ids": IDS}
    call |= {"inputs": [row_input], "micro": 1, "mini": (), "holds": IDS}
    commands = [
        spawn,
        call | {"method": "make", "inputs": []},
        call | {"method": "compute"},
        call | {"method": "double", "early": "judge"},
    ]
    for number, payload in enumerate(commands, start=1):
        reporter.lane.put(Command(number, number, COMPUTE, "test", 60.0, payload))
    reporter.lane.put(None)
    reporter.lane.run()
    return state, reporter.failures


def test_early_method_runs_while_a_call_before_it_computes(tmp_path: Path) -> None:
    state, failures = run(tmp_path, error="")

    assert failures == []
    assert not state.store.take(3, ["late"], IDS)["late"].to_value().any()
    assert state.store.take(4, ["twice"], IDS)["twice"].to_value().tolist() == [0, 2, 4]
    state.close()


def test_error_of_an_early_method_is_the_calls_own(tmp_path: Path) -> None:
    state, failures = run(tmp_path, error="no judge today")

    assert [(failure.number, failure.cause) for failure in failures] == [
        (4, "ValueError: no judge today")
    ]
    state.close()
