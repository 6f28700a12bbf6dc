"""Toy models on several pools: every row that arrives is checked against its id.

Every rank of a process group calls `run_all`: one run after the other inside the same group,
under several placements, once on a subset of the ranks. OUT_DIR/<case>.json says what
torch.distributed itself was asked to send.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.schema import DataConfig, EngineConfig, RunConfig, UpdateConfig
from spmdflow.controller.flow import Flow
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import lengths_of, ragged_from_rows, rows_of
from spmdflow.worker_api.metric import Mean, Sum
from spmdflow.worker_api.register import map_function, register
from spmdflow.worker_api.worker import Worker

ROWS = 11


@dataclass
class ToyConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    placement: Any
    first: ToyConfig = field(default_factory=ToyConfig)
    second: ToyConfig = field(default_factory=ToyConfig)
    total_steps: int = 3
    writes_in_place: bool = False
    eval_every: int = 0


WIDE = 1 << 14
"""Numbers of a wide row: an edge of a few rows is too large for one message."""


def expected_ragged(row: int) -> list[int]:
    return list(range(row, row + row % 5))


class FirstWorker(Worker):
    role = "first"

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "prompt_text", "row"),
        writes=("number", "ragged", "text", "wide"),
        extends=True,
    )
    def make(self, batch: TensorDict) -> TensorDict:
        ids = self.call.row_ids
        made = TensorDict({"number": ids.float()}, batch_size=batch.batch_size)
        rows = [torch.tensor(expected_ragged(i), dtype=torch.int64) for i in ids.tolist()]
        made["ragged"] = ragged_from_rows(rows, dtype=torch.int64)
        made["wide"] = ids.float()[:, None] + torch.arange(WIDE)
        made.set_non_tensor("text", [f"row {i} \u00fc" for i in ids.tolist()])
        self.report({"toy/rows": Sum(len(ids))})
        return made

    @register(transfer_mode="ONE_TO_ALL")
    def whoami(self) -> int:
        return self.context.rank

    @register(transfer_mode="ALL_TO_ALL")
    def add_rank(self, number: int, *, scale: int) -> int:
        return number * scale + self.context.rank

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("own",))
    def fill_own(self, batch: TensorDict, *, value: float) -> TensorDict:
        """A slice of a buffer that the next call fills anew."""
        self.buffer = getattr(self, "buffer", torch.zeros(ROWS)).fill_(value)
        return TensorDict({"own": self.buffer[: len(batch)]}, batch_size=batch.batch_size)

    @register(transfer_mode="DP_PROTO", reads=("checked",), writes=("doubled",))
    def double(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"doubled": batch["checked"] * 2}, batch_size=batch.batch_size)


class SecondWorker(Worker):
    role = "second"

    @register(
        transfer_mode="3D_PROTO", reads=("number", "ragged", "text", "wide"), writes=("checked",)
    )
    def check(self, batch: TensorDict) -> TensorDict:
        self._verify(batch)
        assert torch.equal(batch["wide"], batch["number"][:, None] + torch.arange(WIDE))
        return TensorDict({"checked": batch["number"] + 0.5}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number", "ragged", "text"), minibatches=True)
    def update(self, batch: TensorDict) -> dict[str, Any]:
        self._verify(batch)
        used = [self.call.row_ids[mini.index].tolist() for mini in self.call.mini_batches]
        return {"toy/used": Sum(sum(map(len, used))), "toy/steps": float(len(used))}

    @register(transfer_mode="3D_PROTO", reads=("own",), writes=("seen",))
    def see(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"seen": batch["own"]}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("moved",))
    def write(self, batch: TensorDict) -> TensorDict:
        numbers = batch["number"]
        numbers -= 100
        return TensorDict({"moved": numbers}, batch_size=batch.batch_size)

    def _verify(self, batch: TensorDict) -> None:
        for at, i in enumerate(self.call.row_ids.tolist()):
            assert batch["number"][at] == i, (i, batch["number"])
            assert rows_of(batch["ragged"])[at].tolist() == expected_ragged(i)
            assert list(batch["text"])[at] == f"row {i} \u00fc"


@map_function(reads=("checked", "ragged"), writes=("share",))
def share_of_total(batch: TensorDict, *, reduce: Any, report: Any, scale: float) -> TensorDict:
    total = reduce(batch["checked"].double().sum())
    report({"toy/items": Mean(float(lengths_of(batch["ragged"]).sum()), 1)})
    share = batch["checked"].double() / total * scale
    return TensorDict({"share": share.float()}, batch_size=batch.batch_size)


def main(flow: Any, cfg: Config) -> None:
    first = flow.spawn(FirstWorker, cfg.first)
    second = flow.spawn(SecondWorker, cfg.second)
    prompts = flow.prompts(cfg.data)
    assert first.whoami().values_by_rank() == list(first.target.layout.ranks)
    ranks = list(first.target.layout.ranks)
    added = first.add_rank([10 * place for place, _ in enumerate(ranks)], scale=3)
    assert added.values_by_rank() == [30 * place + rank for place, rank in enumerate(ranks)]
    for step in flow.steps(cfg.total_steps):
        batch = first.make(next(prompts))
        batch |= second.check(batch)
        batch |= first.double(batch)
        batch |= batch.map(share_of_total, scale=2.0)
        step.log(second.update(batch))
        used = len(flow.caller.fetched_bytes)
        values = batch.fetch("number", "ragged", "text", "doubled", "share", "prompt_text")
        assert values["number"].tolist() == batch.ids.tolist()
        assert [row.tolist() for row in rows_of(values["ragged"])] == [
            expected_ragged(i) for i in batch.ids.tolist()
        ]
        assert values["text"] == [f"row {i} \u00fc" for i in batch.ids.tolist()]
        checked = torch.tensor(batch.ids) + 0.5
        torch.testing.assert_close(values["doubled"], checked.float() * 2)
        torch.testing.assert_close(values["share"], (checked / checked.sum() * 2).float())
        assert len(values["prompt_text"]) == ROWS and used <= 1
        filled = [first.fill_own(batch, value=float(value)) for value in (1, 2)]
        seen = [second.see(own).fetch("seen")["seen"].tolist() for own in filled]
        assert seen == [[1.0] * ROWS, [2.0] * ROWS]
        if cfg.writes_in_place:
            second.write(batch)
        late = second.check(batch[2:5])
        assert late.fetch("checked")["checked"].tolist() == checked[2:5].tolist()
    if type(flow) is Flow:  # in a dry run nothing moves
        assert flow.caller.transfers.planned_bytes == flow.caller.transfers.moved_bytes


class WireCounter:
    """Counts what torch.distributed is asked to send, independent of ours."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._send = dist.isend

    def __enter__(self) -> WireCounter:
        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_bytes += tensor.nbytes
            return self._send(tensor, *args, **kwargs)

        dist.isend = counting
        return self

    def __exit__(self, *_: object) -> None:
        dist.isend = self._send


def cases(world: int) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
    half = world // 2
    ranks = list(range(world))

    def pools(first: list[int], second: list[int]) -> dict[str, Any]:
        return {
            "one": {"roles": ["first"], "ranks": first},
            "two": {"roles": ["second"], "ranks": second},
        }

    return {
        "colocate": ("colocate", None),
        "standalone": ("standalone", None),
        "uneven": (pools(ranks[:1], ranks[1:]), None),
        "reversed": (pools(ranks[half:], ranks[:half]), None),
        "subset": ("standalone", tuple(ranks[1:3])),
    }


def config_of(name: str, placement: Any, out: Path, data: str, tokenizer: str) -> Config:
    cfg = Config(
        run=RunConfig(dir=str(out / name), call_seconds=600, sample_every=0),
        data=DataConfig(train_path=data, tokenizer_path=tokenizer, prompts_per_step=ROWS),
        placement=placement,
    )
    cfg.second.update.mini_batch_size = 4
    cfg.second.update.num_epochs = 2
    return cfg


def run_case(name: str, placement: Any, ranks: Any, out: Path, data: str, tokenizer: str) -> None:
    cfg = config_of(name, placement, out, data, tokenizer)
    with WireCounter() as counter:
        status = run_flow(sys.modules[__name__], cfg, ranks=ranks)
    counted = torch.tensor(counter.num_bytes)
    dist.all_reduce(counted)
    if dist.get_rank() == 0:
        summary = {"sent": int(counted), "status": status}
        (out / f"{name}.json").write_text(json.dumps(summary))


def run_in_place(placement: str, out: str, data: str, tokenizer: str) -> None:
    """A run that fails, as a method writes into rows that it was given."""
    cfg = config_of(placement, placement, Path(out), data, tokenizer)
    cfg.writes_in_place = True
    run_flow(sys.modules[__name__], cfg)


def run_all(out: str, data: str, tokenizer: str) -> None:
    """What every rank does."""
    for case, (placed, on_ranks) in cases(dist.get_world_size()).items():
        run_case(case, placed, on_ranks, Path(out), data, tokenizer)
