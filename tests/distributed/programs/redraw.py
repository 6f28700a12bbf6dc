"""Three generations of the same rows in each step, under several placements and sizes.

Every rank of a process group calls `run_all`. The responses of each step and generation are in
OUT_DIR/<case>.json by row id, training and held-out rows apart.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdflow.config.schema import (
    ActorConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import rows_of
from spmdflow.models.policy import ActorWorker

TASK = Path(__file__).parents[3] / "algos" / "arithmetic"
STEPS = 2
ROWS = 64
SAMPLING = {"max_new_tokens": 6, "temperature": 1e4}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "four": (4, {}),
    "halves": (4, {"in_halves": True}),
    "other pool": (4, {"placement": {"last": {"roles": ["actor"], "ranks": [2, 3]}}}),
    "stopped": (2, {"total_steps": 1}),
    "stopped, resumed": (2, {}),
}
"""Ranks and settings; a name before a comma is the run that is continued."""


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    actor: ActorConfig
    placement: Any = "colocate"
    in_halves: bool = False
    total_steps: int = STEPS
    eval_every: int = 0
    drawn: dict[str, Any] = field(default_factory=dict)


def main(flow: Any, cfg: Config) -> None:
    actor = flow.spawn(ActorWorker, cfg.actor)
    prompts = flow.prompts(cfg.data)

    def generate(batch: Batch) -> Batch:
        if not cfg.in_halves:
            return actor.generate_sequences(batch)
        half = len(batch) // 2
        parts = [actor.generate_sequences(part) for part in (batch[half:], batch[:half])]
        return concatenate(parts)

    for step in flow.steps(cfg.total_steps):
        for name, rows in (("train", next(prompts)), ("held out", prompts.eval_batch())):
            flow.caller.phase = "train" if name == "train" else "eval"
            actor.generate_sequences(rows, greedy=True)
            made = [_by_row(generate(rows)) for _ in range(3)]
            cfg.drawn[f"{name} {step.number}"] = made
        flow.caller.phase = "train"
        flow.save()


def _by_row(batch: Batch) -> dict[int, list[int]]:
    rows = rows_of(batch.fetch("responses")["responses"])
    return {int(i): row.tolist() for i, row in zip(batch.ids, rows, strict=True)}


def config_of(case: str, out: Path, **changes: Any) -> Config:
    data = DataConfig(
        train_path=str(TASK / "train.jsonl"),
        eval_path=str(TASK / "eval.jsonl"),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=ROWS,
        eval_prompts=8,
    )
    actor = ActorConfig(
        model=ModelConfig(path=str(TASK / "model")),
        engine=EngineConfig(),
        rollout=RolloutConfig(**SAMPLING),
    )
    folder = out / case.partition(",")[0].replace(" ", "_")
    return Config(RunConfig(dir=str(folder), sample_every=0), data, actor, **changes)


def run_all(out_dir: str) -> None:
    out = Path(out_dir)
    for case, (num_ranks, changes) in CASES.items():
        cfg = config_of(case, out, **changes)
        if dist.get_rank() < num_ranks:
            assert run_flow(sys.modules[__name__], cfg, ranks=tuple(range(num_ranks))) == 0
        else:
            run_flow(sys.modules[__name__], cfg, ranks=tuple(range(num_ranks)))
        if dist.get_rank() == 0:
            (out / f"{case}.json").write_text(json.dumps(cfg.drawn))
        dist.barrier()
