"""A call's early method runs beside the calls before it, as soon as its rows are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from spmdflow.data.store import RowCondition
from spmdflow.failure.cause import Failure
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.executor import COMPUTE, Lane, Unwound
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.transfer.lane import CountedTransport
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker, WorkerContext

IDS = np.arange(3)
BEGUN = threading.Event()


class Judging(Worker):
    """Makes rows, computes until its judge has begun, and then judges."""

    def __init__(self, cfg: Any, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        self.closed = threading.Event()

    @register(transfer_mode="DP_PROTO", writes=("number",))
    def make(self, batch: TensorDict) -> TensorDict:
        """number: 0, 1, 2."""
        return TensorDict({"number": torch.arange(3.0)}, batch_size=[3])

    @register(transfer_mode="DP_PROTO", reads=("number",), writes=("late",))
    def compute(self, batch: TensorDict) -> TensorDict:
        """late: whether the judge had not begun after a while."""
        late = torch.full((3,), not BEGUN.wait(50))
        return TensorDict({"late": late}, batch_size=[3])

    @register(transfer_mode="DP_PROTO", writes=("rested",))
    def rest(self, batch: TensorDict) -> TensorDict:
        """Takes longer than what a rank waits for a server (`run`)."""
        time.sleep(0.02)
        return TensorDict({"rested": torch.ones(3)}, batch_size=[3])

    @register(transfer_mode="DP_PROTO", reads=("number",), writes=("twice",), early="judge")
    def double(self, batch: TensorDict) -> TensorDict:
        """twice: what the early method made, or makes now."""
        early_result = self.early_result
        twice = self.judge(batch, self.call) if early_result is None else early_result.result()
        return TensorDict({"twice": twice}, batch_size=[3])

    def judge(self, batch: TensorDict, call: Command) -> torch.Tensor:
        """2 * number, or what the settings want: an error, or nothing before the end."""
        BEGUN.set()
        if self.cfg == "wait":
            self.closed.wait(250)
        elif self.cfg:
            raise ValueError(self.cfg)
        assert call.row_ids.tolist() == IDS.tolist()
        return 2 * batch["number"]

    def close(self) -> None:
        """Let the judge go."""
        self.closed.set()


class Reporter:
    """What the lane said."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.lane = Lane(COMPUTE, 0, self)

    def reply(self, ticket: int, payload: dict[str, Any], duration: list[float]) -> None:
        """Not looked at."""

    def fail(self, failure: Failure) -> None:
        """Kept."""
        self.failures.append(failure)

    def stay(self) -> None:
        """The session ends."""
        self.lane.unwind()

    def lane_ended(self, name: str) -> None:
        """Not looked at."""


def early_threads() -> list[threading.Thread]:
    """Those in which an early method waits for its rows, or runs."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("early-")]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread outlives a rank that was closed."""
    BEGUN.clear()
    yield
    assert not early_threads()


def run(
    run_dir: Path,
    *methods: str,
    cfg: str = "",
    seconds: float = 60.0,
    arrival: RowCondition | None = None,
    made_by: int = 2,
    made_before: bool = False,
) -> tuple[RankState, list[Failure]]:
    """All commands wait in the lane before the first one runs.

    made_by: the call of the rows; made_before: the others come when these calls have ended.
    """
    settings = RankSettings(0, torch.device("cpu"), 0, seconds, run_dir)
    groups = GroupTable(0, timeout_seconds=60)
    transport = CountedTransport(None, seconds=60)
    state = RankState(settings, groups, transport, arrival)
    reporter = Reporter()
    reporter.lane.operations = state.operations()
    spawn = {"operation": "spawn", "name": "judging", "config": cfg, "total_steps": 1}
    spawn |= {"class": f"{__name__}:Judging", "nodes": [0]}
    spawn |= {"layout": asdict(Layout.data_parallel((0,)))}
    call = {"operation": "call", "group": "judging", "step": 1, "arguments": {}, "ids": IDS}
    call |= {"micro": 1, "mini": (), "holds": IDS}
    made = [{"result": made_by, "columns": ["number"], "ids": IDS}]
    inputs = {"make": [], "rest": [], "compute": made, "double": made}
    early = {"double": {"early": "judge"}}
    commands = [spawn]
    for name in methods:
        commands.append(call | {"method": name, "inputs": inputs[name]} | early.get(name, {}))
    for number, payload in enumerate(commands, start=1):
        if made_before and number == made_by + 1:
            reporter.lane.put(None)
            reporter.lane.run()
        reporter.lane.put(Command.from_message(number, number, COMPUTE, "test", payload))
    reporter.lane.put(None)
    reporter.lane.run()
    return state, reporter.failures


def test_early_method_runs_while_a_call_before_it_computes(tmp_path: Path) -> None:
    state, failures = run(tmp_path, "make", "compute", "double")

    assert failures == []
    assert not state.store.take(3, ["late"], IDS)["late"].to_value().any()
    assert state.store.take(4, ["twice"], IDS)["twice"].to_value().tolist() == [0, 2, 4]
    state.close()


def test_error_of_an_early_method_is_the_calls_own(tmp_path: Path) -> None:
    state, failures = run(tmp_path, "make", "compute", "double", cfg="no judge today")

    assert [(failure.number, failure.cause) for failure in failures] == [
        (4, "ValueError: no judge today")
    ]
    state.close()


def test_early_method_waits_for_its_rows_as_long_as_the_calls_before_them_take(
    tmp_path: Path,
) -> None:
    state, failures = run(
        tmp_path, "rest", "rest", "make", "compute", "double", seconds=0.01, made_by=4
    )

    assert failures == []
    assert not state.store.take(5, ["late"], IDS)["late"].to_value().any()
    assert state.store.take(6, ["twice"], IDS)["twice"].to_value().tolist() == [0, 2, 4]
    state.close()


def test_call_whose_rows_never_come_waits_until_the_session_ends_and_leaves_no_thread(
    tmp_path: Path,
) -> None:
    arrival = RowCondition()
    end = threading.Timer(0.2, arrival.end, args=[Unwound()])
    end.start()

    state, failures = run(tmp_path, "double", seconds=0.01, made_by=99, arrival=arrival)
    state.close()

    assert failures == [] and end.finished.is_set()


def test_run_that_fails_while_it_judges_leaves_at_once(tmp_path: Path) -> None:
    arrival = RowCondition()
    threading.Thread(target=lambda: BEGUN.wait(60) and arrival.end(Unwound())).start()
    start = time.monotonic()

    state, failures = run(tmp_path, "make", "double", cfg="wait", seconds=250, arrival=arrival)
    state.close()

    assert failures == [] and time.monotonic() - start < 100
