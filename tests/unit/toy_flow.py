"""A flow in this process, with toy models of one rank: the real transport, store and files.

`Rank` is what lives on the rank (its store can be looked at), `flow` what a script is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.placement import Pool
from spmdflow.config.schema import DataConfig, EngineConfig, RunConfig, UpdateConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.flow import Flow
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.guarding import Guarding
from spmdflow.controller.prompts import PromptStream
from spmdflow.controller.saving import Saving
from spmdflow.controller.step import Show
from spmdflow.data.ragged import lengths_of, ragged_from_rows
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.call import InprocTransport
from spmdflow.runtime.operation import RankSettings, RankState
from spmdflow.transfer.lane import CountedTransport
from spmdflow.transfer.protocol import Answer, Protocol, Shares, register_protocol
from spmdflow.worker_api.metric import Max, Mean, Sum
from spmdflow.worker_api.register import map_function, register
from spmdflow.worker_api.worker import Worker

TASK = Path(__file__).parents[2] / "algos" / "arithmetic"
ROWS = 6
NUM_PROMPTS = 200


@dataclass
class ToyConfig:
    """Settings of a toy model."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(mini_batch_size=4))


@dataclass
class FrozenToyConfig:
    """Settings of a toy model that takes no mini-batches."""

    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class Config:
    """Settings of a toy script."""

    run: RunConfig
    data: DataConfig
    total_steps: int = 100
    eval_every: int = 0


def backwards(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
    """Every rank gets all rows, the last one first."""
    return dict.fromkeys(layout.ranks, range(num_rows)[::-1])


register_protocol(
    Protocol(
        "BACKWARDS",
        distribute=backwards,
        collect=lambda layout: Answer(layout.ranks[:1], joined=True),
        num_shares=lambda layout: 1,
    )
)


class Toy(Worker):
    """Columns that say which row they belong to, and some methods with faults."""

    role = "toy"

    @register(transfer_mode="3D_PROTO", reads=("prompts",), writes=("number", "text", "ragged"))
    def make(self, batch: TensorDict) -> TensorDict:
        """number = the row's id, text and ragged alike."""
        ids = self.call.row_ids.tolist()
        made = TensorDict({"number": torch.tensor(ids).float()}, batch_size=[len(ids)])
        made.set_non_tensor("text", [f"row {i}" for i in ids])
        rows = [torch.arange(i % 3) for i in ids]
        made["ragged"] = ragged_from_rows(rows, dtype=torch.int64)
        return made

    @register(transfer_mode="DP_PROTO", reads=("number",), optional=("text",), writes=("next",))
    def add(self, batch: TensorDict, *, what: float = 1.0) -> TensorDict:
        """next = number + what."""
        return TensorDict({"next": batch["number"] + what}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("twin",), extends=True)
    def extend(self, batch: TensorDict) -> TensorDict:
        """twin = number, and the columns of the batch."""
        return TensorDict({"twin": batch["number"].clone()}, batch_size=batch.batch_size)

    @register(transfer_mode="BACKWARDS", reads=("number",), writes=("received_at",))
    def where(self, batch: TensorDict) -> TensorDict:
        """received_at = the place at which a row came."""
        return TensorDict({"received_at": torch.arange(len(batch))}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("first", "second"))
    def return_one_of_two(self, batch: TensorDict) -> TensorDict:
        """Forgets a column."""
        return TensorDict({"first": batch["number"]}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("number_or_less",))
    def return_less(self, batch: TensorDict) -> TensorDict:
        """Forgets two rows."""
        rows = batch["number"][2:]
        return TensorDict({"number_or_less": rows}, batch_size=rows.shape)

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("value",))
    def return_a_tensor(self, batch: TensorDict) -> Any:
        """Forgets the TensorDict."""
        return batch["number"]

    @register(transfer_mode="ONE_TO_ALL")
    def describe(self, *, factor: int = 1) -> int:
        """A plain value."""
        return factor * (1 + self.context.rank)

    @register(transfer_mode="3D_PROTO", reads=("number", "ragged"))
    def measure(self, batch: TensorDict) -> dict[str, Any]:
        """Metrics of each kind."""
        self.report({"toy/reported": Sum(len(batch))})
        numbers = batch["number"]
        items = lengths_of(batch["ragged"])
        return {
            "toy/mean": Mean(float(numbers.sum()), len(numbers)),
            "toy/items": Sum(float(items.sum())),
            "toy/largest": Max(float(numbers.max())),
            "toy/plain": 2.5,
        }

    @register(transfer_mode="3D_PROTO", reads=("number",), minibatches=True)
    def update(self, batch: TensorDict) -> list[list[float]]:
        """Numbers by mini-batch."""
        return [batch["number"][mini.index].tolist() for mini in self.call.mini_batches]

    def unmarked(self) -> None:
        """Cannot be called from a script."""


class Other(Toy):
    """The same with a role that no pool has."""

    role = "other"


@map_function(reads=("number",), optional=("next",), writes=("share",))
def share(batch: TensorDict, *, reduce: Any, report: Any, scale: float = 1.0) -> TensorDict:
    """share = scale * number / sum of numbers."""
    total = reduce(batch["number"].double().sum())
    report({"toy/total": float(total)})
    part = (batch["number"].double() / total * scale).float()
    return TensorDict({"share": part}, batch_size=batch.batch_size)


@map_function(reads=("prompts",), writes=("num_tokens",))
def count_tokens(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """num_tokens = the prompt's length."""
    return TensorDict({"num_tokens": lengths_of(batch["prompts"])}, batch_size=batch.batch_size)


def unmarked_maths(batch: TensorDict) -> TensorDict:
    """Declares no columns."""
    return batch


@dataclass
class Rank:
    """The only rank, and the script's view of it."""

    state: RankState
    flow: Flow
    config: Config

    @property
    def num_results(self) -> int:
        """Results that the rank holds."""
        return self.state.store.num_results()


def draw(prompts: PromptStream, toy: WorkerGroup) -> Batch:
    """The next rows with the columns of Toy.make."""
    rows = next(prompts)
    return rows | toy.make(rows)


def numbers(batch: Batch, name: str = "number") -> list[Any]:
    """Values of a column, as plain numbers or texts."""
    values = batch.fetch(name)[name]
    return values.tolist() if isinstance(values, torch.Tensor) else values


@contextlib.contextmanager
def rank_of_one(run_dir: Path, *, guards: Sequence[str] = (), **data: Any) -> Iterator[Rank]:
    """Everything that `launch(..., inproc=True)` makes for a script.

    Its prompts are the first of the bundled task, because each run reads and checks all of them.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    prompts = run_dir / "prompts.jsonl"
    num_prompts = max(NUM_PROMPTS, data.get("prompts_per_step", ROWS))
    with open(TASK / "train.jsonl") as file:
        prompts.write_text("".join(islice(file, num_prompts)))
    rows = DataConfig(
        train_path=str(prompts),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=ROWS,
    )
    config = Config(
        RunConfig(dir=str(run_dir), sample_every=0, guards=list(guards)), replace(rows, **data)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = RankSettings(0, torch.device("cpu"), 0, 60.0, run_dir)
    groups = GroupTable(0, timeout_seconds=60)
    state = RankState(settings, groups, CountedTransport(None, seconds=60))
    show = Show(config, run_dir, last_step=0, script=Path(__file__))
    try:
        flow = _flow(state, show, run_dir, config)
        with flow._saving.finishing():
            yield Rank(state, flow, config)
    finally:
        show.close()
        state.close()
        dist.destroy_process_group()


def _flow(state: RankState, show: Show, run_dir: Path, config: Config) -> Flow:
    transport = InprocTransport(state.operations())
    caller = Caller(transport, config.run, (0,))
    pools = {"all": Pool(("toy",), (0,))}
    saving = Saving(run_dir, None, config.run, "")
    guarding = Guarding(config.run.guards, caller, run_dir)
    return Flow(caller, config, pools, run_dir, saving, show, backend="gloo", guarding=guarding)
