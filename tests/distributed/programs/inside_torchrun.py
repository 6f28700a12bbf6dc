"""A host program with groups of its own that launches runs on some of its ranks.

    torchrun --nproc-per-node 3 inside_torchrun.py OUT_DIR

OUT_DIR/rank-<k>.json says what each rank saw: the host's sums and its process state before and
after every launch, the exit statuses and the refusals. The toy run asserts every value itself.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

import spmdflow
from spmdflow.config.load import load
from spmdflow.config.schema import DataConfig, EngineConfig, RunConfig
from spmdflow.data.ragged import lengths_of, ragged_from_rows, rows_of
from spmdflow.errors import ConfigError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import Answer, Protocol, Shares, register_protocol
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker

ROOT = Path(__file__).parents[3]
TASK = ROOT / "algos" / "arithmetic"
ROWS = 5
launch: Any = spmdflow.launch  # the public name


def all_rows(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
    """Every rank is given everything."""
    return dict.fromkeys(layout.ranks, range(num_rows))


def every_other(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
    """The i-th rank keeps the rows i, i + size, ..., the last ones first."""
    size = layout.size
    return {rank: range(num_rows)[i::size][::-1] for i, rank in enumerate(layout.ranks)}


register_protocol(
    Protocol(
        "SEE_ALL_KEEP_SOME",
        distribute=all_rows,
        holds=every_other,
        collect=lambda layout: Answer(layout.ranks[::-1], joined=True),
        num_shares=lambda layout: 1,
    )
)


@dataclass
class ToyConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    placement: Any
    first: ToyConfig = field(default_factory=ToyConfig)
    second: ToyConfig = field(default_factory=ToyConfig)
    total_steps: int = 2
    eval_every: int = 0


class FirstWorker(Worker):
    role = "first"

    @register(transfer_mode="3D_PROTO", reads=("prompts",), writes=("number", "ragged", "text"))
    def make(self, batch: TensorDict) -> TensorDict:
        ids = self.call.row_ids.tolist()
        made = TensorDict({"number": torch.tensor(ids).float()}, batch_size=[len(ids)])
        rows = [torch.arange(i % 4) for i in ids]
        made["ragged"] = ragged_from_rows(rows, dtype=torch.int64)
        made.set_non_tensor("text", [f"row {i}" for i in ids])
        return made

    @register(
        transfer_mode="3D_PROTO",
        reads=("number", "ragged", "text", "copied", "fraction", "name"),
        writes=("total",),
    )
    def total(self, batch: TensorDict) -> TensorDict:
        ids = self.call.row_ids.tolist()
        assert batch["number"].tolist() == batch["copied"].tolist() == ids
        assert lengths_of(batch["ragged"]).tolist() == [i % 4 for i in ids]
        assert list(batch["text"]) == [f"row {i}" for i in ids]
        assert list(batch["name"]) == ["n" * i for i in ids]
        total = batch["number"] + lengths_of(batch["ragged"]) + batch["fraction"]
        return TensorDict({"total": total}, batch_size=batch.batch_size)


class SecondWorker(Worker):
    role = "second"

    @register(transfer_mode="ONE_TO_ALL", reads=("number",), writes=("copied",))
    def copy(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"copied": batch["number"].clone()}, batch_size=batch.batch_size)

    @register(transfer_mode="SEE_ALL_KEEP_SOME", reads=("number",), writes=("fraction", "name"))
    def fraction(self, batch: TensorDict) -> TensorDict:
        layout = self.context.layout
        number = batch["number"]
        mine = every_other(layout, len(number), [])[self.context.rank]
        made = TensorDict({"fraction": number[list(mine)] / number.sum()}, batch_size=[len(mine)])
        made.set_non_tensor("name", ["n" * int(number[i]) for i in mine])
        return made

    @register(transfer_mode="DP_METRIC", reads=("text", "total"))
    def count(self, batch: TensorDict) -> list[int]:
        return [self.context.rank, len(batch["text"]), len(batch["total"])]


def toy_main(flow: Any, cfg: Config) -> None:
    first = flow.spawn(FirstWorker, cfg.first)
    second = flow.spawn(SecondWorker, cfg.second)
    prompts = flow.prompts(cfg.data)
    for _ in flow.steps(cfg.total_steps):
        whole = next(prompts)
        for batch in (whole, whole[1:2], whole[:0]):  # fewer rows than ranks, and none
            _check_values(first, second, batch)
    assert flow.caller.transfers.planned_bytes == flow.caller.transfers.moved_bytes


def _check_values(first: Any, second: Any, batch: Any) -> None:
    ids = batch.ids.tolist()
    batch |= first.make(batch)
    batch |= second.copy(batch)
    batch |= second.fraction(batch)
    batch |= first.total(batch)
    values = batch.fetch("number", "ragged", "text", "copied", "fraction", "name", "total")
    assert values["number"].tolist() == values["copied"].tolist() == ids
    assert [len(row) for row in rows_of(values["ragged"])] == [i % 4 for i in ids]
    assert values["text"] == [f"row {i}" for i in ids]
    assert values["name"] == ["n" * i for i in ids]
    fraction = torch.tensor(ids).float() / sum(ids)
    torch.testing.assert_close(values["fraction"], fraction)
    torch.testing.assert_close(values["total"], torch.tensor([i + i % 4 for i in ids]) + fraction)
    counts = second.count(batch).values_by_rank()
    assert sum(rows for _, rows, _ in counts) == sum(rows for *_, rows in counts) == len(ids)


def main_without_steps(flow: Any, cfg: Config) -> None:
    first = flow.spawn(FirstWorker, cfg.first)
    prompts = flow.prompts(cfg.data)
    batch = next(prompts)
    assert first.make(batch).fetch("number")["number"].tolist() == batch.ids.tolist()


def script_of(main: Any) -> ModuleType:
    script = ModuleType(main.__name__)
    script.main = main  # type: ignore[attr-defined]
    return script


def toy_config(run_dir: Path, placement: Any) -> Config:
    data = DataConfig(
        train_path=str(TASK / "train.jsonl"),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=ROWS,
    )
    return Config(RunConfig(dir=str(run_dir), call_seconds=600, sample_every=0), data, placement)


def state() -> dict[str, str]:
    """What a host program may rely on staying as it is."""
    seen = {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "on SIGTERM": signal.getsignal(signal.SIGTERM),
        "on SIGINT": signal.getsignal(signal.SIGINT),
        "wakeup descriptor": signal.set_wakeup_fd(-1),
        "switch interval": sys.getswitchinterval(),
        "default group": id(dist.group.WORLD),
        "world size": dist.get_world_size(),
        "environment": sorted(os.environ.items()),
        "folder": os.getcwd(),
        "torch threads": torch.get_num_threads(),
        "torch random": torch.get_rng_state().sum(),
        "numpy random": np.random.get_state(legacy=True)[1:3],
        "random": random.getstate(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "log": (logging.getLogger().level, logging.getLogger().handlers),
        "garbage collection": gc.isenabled(),
        "hooks": (sys.excepthook, threading.excepthook),
    }
    return {name: repr(value) for name, value in seen.items()}


def host_sums(pair: Any) -> list[float]:
    """What the host does with its own groups: all ranks, then ranks 0 and 2."""
    whole = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(whole)
    part = torch.tensor([float(dist.get_rank() + 1)])
    if dist.get_rank() in (0, 2):
        dist.all_reduce(part, group=pair)
    return [float(whole), float(part)]


def refusal(cfg: Config, ranks: tuple[int, ...]) -> str:
    try:
        launch(script_of(toy_main), cfg, ranks=ranks)
    except ConfigError as err:
        return str(err)
    return "not refused"


def main() -> None:
    """One launch after the other, and the host's own work in between."""
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 2])
    ppo = load(ROOT / "algos" / "ppo.py", None, [f"run.dir={out / 'ppo'}", *sys.argv[2:]])
    pools = {
        name: {"roles": [name], "ranks": on} for name, on in (("first", [0]), ("second", [1, 2]))
    }
    toys = toy_config(out / "toys", pools)
    loose = toy_config(out / "loose", "colocate")
    seen: dict[str, Any] = {"sums": [host_sums(pair)], "status": {}, "changed": {}}
    for name, script, cfg, ranks in (
        ("toys", script_of(toy_main), toys, (0, 1, 2)),
        ("without steps", script_of(main_without_steps), loose, (0, 2)),
        ("ppo", ppo.script, ppo.cfg, (1, 2)),
    ):
        before = state()
        seen["status"][name] = launch(script, cfg, ranks=ranks)
        after = state()
        seen["changed"][name] = {key: after[key] for key in after if after[key] != before[key]}
        seen["sums"].append(host_sums(pair))
    seen["refused"] = [refusal(toys, ranks) for ranks in ((2, 1), (1, 3), (1, 1))]
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
