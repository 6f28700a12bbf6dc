"""Two calls whose early methods, transfers and turns come in every possible order.

Rank 0 makes the rows of two batches, rank 1 judges them. Lanes, row store, early methods and the
code that plans and releases transfers are the real ones; threads take turns as `interleaving` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.schema import RunConfig
from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup
from spmdflow.failure.cause import Failure
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.runtime import early
from spmdflow.runtime.call import Call, OnDone, Pending
from spmdflow.runtime.executor import COMPUTE, TRANSFER, Lane
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.transfer import lane as transfer_lane
from spmdflow.transfer.lane import CountedTransport
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.metric import Mean
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker
from tests.unit.interleaving import (
    EveryOrder,
    Network,
    ScheduledCondition,
    ScheduledQueue,
    Scheduler,
    thread_class,
)

NUM_ROWS = 3
MAKER = 0
JUDGE = 1


class Maker(Worker):
    """Makes numbers that nobody else has."""

    @register(transfer_mode="DP_PROTO", writes=("number",))
    def make(self, batch: TensorDict, *, start: float) -> TensorDict:
        """number: start, start + 1, ..."""
        return TensorDict({"number": start + torch.arange(float(len(batch)))}, [len(batch)])


class Judge(Worker):
    """Judges numbers, early if there is time."""

    pause: Callable[[], None]
    """Lets others come in between, set by the test."""

    @register(transfer_mode="DP_PROTO", reads=("number",), writes=("score",), early="judge")
    def score(self, batch: TensorDict) -> TensorDict:
        """score: 10 * number; reports the largest one."""
        number = self.call.number
        self.pause()
        if self.early_result is None:
            scores, judged_by = self.judge(batch, self.call)
        else:
            scores, judged_by = self.early_result.result()
        self.report({"largest": Mean(float(scores.max()), 1)})
        assert number == self.call.number == judged_by
        return TensorDict({"score": scores}, [len(batch)])

    def judge(self, batch: TensorDict, call: Command) -> tuple[torch.Tensor, int]:
        """The scores, and the number of the call they are for."""
        self.pause()
        scores = 10 * batch["number"]
        return scores, call.number


@dataclass
class Ranks:
    """Two ranks with their lanes, and the controller's transport between them."""

    scheduler: Scheduler
    network: Network
    run_dir: Path
    states: dict[int, RankState] = field(default_factory=dict)
    lanes: dict[tuple[int, str], Lane] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    open: dict[int, Pending] = field(default_factory=dict)
    posted: list[Callable[[], None]] = field(default_factory=list)
    world_size: int = 2
    stop_requested: bool = False

    def __post_init__(self) -> None:
        for rank in (MAKER, JUDGE):
            settings = RankSettings(rank, torch.device("cpu"), 0, 60.0, self.run_dir)
            groups = GroupTable(rank, timeout_seconds=60)
            transport = CountedTransport(None, seconds=60)
            arrival = ScheduledCondition(self.scheduler)
            self.states[rank] = RankState(settings, groups, transport, arrival)
            for name in (COMPUTE, TRANSFER):
                lane = Lane(name, rank, Reporter(self, rank))
                lane.operations = self.states[rank].operations()
                lane._commands = ScheduledQueue(self.scheduler)
                self.lanes[rank, name] = lane

    def spawn(self, caller: Caller, worker_class: type[Worker], rank: int) -> WorkerGroup:
        """A worker on one rank."""
        name = worker_class.__name__.lower()
        layout = Layout.data_parallel((rank,))
        command = {"operation": "spawn", "name": name, "config": None, "total_steps": 1}
        command |= {"class": f"{__name__}:{worker_class.__name__}", "nodes": [0, 0]}
        command |= {"layout": asdict(layout)}
        self.states[rank].operations()["spawn"](command, 0)
        return WorkerGroup(caller, Target(name, worker_class, layout, None))

    def run_lane(self, rank: int, name: str) -> None:
        """The thread of a lane."""
        self.network.be(rank)
        self.lanes[rank, name].run()

    def shared_state(self) -> Hashable:
        """Everything that threads of the judge's rank share, and what is under way."""
        state = self.states[JUDGE]
        rows = {
            (result, name): sorted(np.concatenate([ids for ids, _ in column._parts]).tolist())
            for result, columns in state.store._results.items()
            for name, column in columns.items()
        }
        early = {number: each.done() for number, each in state._early._results.items()}
        worker = vars(state._workers["judge"])
        shared = {name: value for name, value in worker.items() if name not in ("context", "cfg")}
        waiting = {key: lane._commands.qsize() for key, lane in self.lanes.items()}
        running = {key: lane.running and lane.running[0].ticket for key, lane in self.lanes.items()}
        state_text = repr((rows, early, shared, waiting, running, len(self.failures)))
        return re.sub(" at 0x[0-9a-f]+", "", state_text)

    # What the controller asks of a transport

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        """Hand the commands to the lanes of their ranks."""
        pending = Pending(call, lambda pending: None, on_done)
        ticket = len(self.open)
        self.open[ticket] = pending
        for rank, payload in call.commands.items():
            command = Command.from_message(
                ticket, call.number, call.lane, call.label, dict(payload)
            )
            self.lanes[rank, call.lane].put(command)
        return pending

    def post(self, function: Callable[[], None]) -> None:
        """Run function in order, as the io thread does."""
        self.posted.append(function)
        if len(self.posted) == 1:
            while self.posted:
                self.posted[0]()
                self.posted.pop(0)

    def node_of(self, rank: int) -> int:
        """All on one node."""
        return 0

    def on_stop(self, say: Callable[[], str]) -> None:
        """Nobody stops."""

    def close(self) -> None:
        """Let the lanes end once they have run everything."""
        for lane in self.lanes.values():
            lane.put(None)

    def is_done(self) -> bool:
        """Whether every order that was given has its replies."""
        return all(pending.done for pending in self.open.values())

    def take_reply(self, rank: int, ticket: int, payload: dict[str, Any]) -> None:
        """A lane has run a command."""
        pending = self.open[ticket]
        pending.replies[rank] = payload
        if pending.replies.keys() == pending.call.commands.keys():
            pending.run_on_done()
            pending.resolve(pending.replies)


@dataclass(frozen=True)
class Reporter:
    """Where the lanes of a rank send replies and failures."""

    ranks: Ranks
    rank: int

    def reply(self, ticket: int, payload: dict[str, Any], duration: list[float]) -> None:
        """A command was run."""
        self.ranks.post(partial(self.ranks.take_reply, self.rank, ticket, payload))

    def fail(self, failure: Failure) -> None:
        """A command has failed."""
        self.ranks.failures.append(failure)

    def stay(self) -> None:
        """The lane ends with its failure."""
        for lane in self.ranks.lanes.values():
            lane.unwind()

    def lane_ended(self, name: str) -> None:
        """Not looked at."""


def play(
    scheduler: Scheduler, starts: Sequence[float], run_dir: Path, patch: pytest.MonkeyPatch
) -> None:
    """A batch for each start is made on one rank and judged on the other; all results are right."""
    network = Network(scheduler)
    with patch.context() as inside:
        inside.setattr(transfer_lane.dist, "isend", network.isend)
        inside.setattr(transfer_lane.dist, "irecv", network.irecv)
        inside.setattr(early.threading, "Thread", thread_class(scheduler))
        ranks = Ranks(scheduler, network, run_dir)
        caller = Caller(ranks, RunConfig(), (MAKER, JUDGE))
        maker = ranks.spawn(caller, Maker, MAKER)
        judge = ranks.spawn(caller, Judge, JUDGE)
        ranks.states[JUDGE]._workers["judge"].pause = scheduler.pause
        made: list[Batch] = []

        def script() -> None:
            for start in starts:
                ids = caller.row_ids.take(NUM_ROWS)
                rows = Batch(caller, ids, ids, {})
                made.append(rows | maker.make(rows, start=start))
            judged = []
            for batch in made:
                scheduler.pause()
                judged.append(judge.score(batch))
            made[:] = [batch | scores for batch, scores in zip(made, judged, strict=True)]

            scheduler.pause(lambda: ranks.is_done() or bool(ranks.failures))
            ranks.close()

        scheduler.shared = ranks.shared_state
        scheduler.add("script", script)
        for rank, name in ranks.lanes:
            label = f"{'maker' if rank == MAKER else 'judge'} {name}"
            scheduler.add(label, partial(ranks.run_lane, rank, name))
        scheduler.run()
        check_results(ranks, caller, made, starts)
        for state in ranks.states.values():
            state.close()


def check_results(ranks: Ranks, caller: Caller, made: list[Batch], starts: Sequence[float]) -> None:
    """What is the same in every order."""
    assert [failure.traceback for failure in ranks.failures] == [], ranks.scheduler.trace
    refs = [batch.column("score") for batch in made]
    for ref, start in zip(refs, starts, strict=True):
        expected = [10 * start, 10 * start + 10.0, 10 * start + 20.0]
        rows = ranks.states[JUDGE].store.take(ref.result.number, ["score"], ref.ids)
        assert rows["score"].to_value().tolist() == expected
        assert ref.result.metrics == [{"largest": Mean(expected[-1], 1)}]
    row_bytes = len(starts) * NUM_ROWS * 4
    assert caller.transfers.moved_bytes == {(MAKER, JUDGE): row_bytes}
    assert caller.transfers.planned_bytes == {(MAKER, JUDGE): row_bytes}


@pytest.mark.parametrize(
    ("starts", "num_orders"),
    [((100.0,), 100), pytest.param((0.0, 100.0), 1_000_000, marks=pytest.mark.drill)],
    ids=["one batch", "two batches"],
)
def test_scores_are_right_in_every_order_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: tuple[float, ...], num_orders: int
) -> None:
    program = partial(play, starts=starts, run_dir=tmp_path, patch=monkeypatch)
    orders = EveryOrder(program, urgent=("maker transfer",))

    num_runs = len(list(orders))

    print(f"{orders.num_orders()} orders through {orders.num_states} states in {num_runs} runs")
    assert orders.num_orders() > num_orders


def test_every_order_of_two_threads_is_tried_and_an_update_that_is_lost_is_found() -> None:
    sums = []

    def program(scheduler: Scheduler) -> None:
        shared = {"sum": 0}

        def add_one() -> None:
            before = shared["sum"]
            scheduler.pause()
            shared["sum"] = before + 1

        scheduler.shared = lambda: shared["sum"]
        scheduler.add("a", add_one)
        scheduler.add("b", add_one)
        scheduler.run()
        sums.append(shared["sum"])

    orders = EveryOrder(program)

    list(orders)

    assert orders.num_orders() == 6  # 4 steps, 2 of each thread: 4! / (2! 2!)
    assert {1, 2} == set(sums)
