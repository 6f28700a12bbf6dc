"""Trains two steps on episodes that call other models by name, on one and two ranks.

Every rank of a process group calls `run_all`. What was trained is in OUT_DIR/<case>.json, the
replies of the other models in OUT_DIR/<case>/replies.jsonl, and the checkpoints in OUT_DIR/<case>.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdflow import compute_advantages
from spmdflow.config.episode import AgentActorConfig, AgentRolloutConfig, EpisodeConfig
from spmdflow.config.objective import AdvantageConfig, PolicyUpdateConfig
from spmdflow.config.schema import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import is_ragged, rows_of
from spmdflow.models.policy import ActorWorker
from tests.distributed.programs import models_env
from tests.unit.episodes.judge_server import Answer, JudgeServer, says

TASK = Path(__file__).parents[3] / "algos" / "guess"
CASES = {"alone": 1, "models": 1, "models-2": 2}
"""Ranks of each case. Only "alone" calls no other model."""
NUM_EPISODES = 4
NUM_STEPS = 2
COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "token_level_rewards"),
    *("scores", "valid", "num_turns"),
)
MODELS: dict[str, Any] = {
    "reference": {},
    "policy@step": {"loaded": 1},
    "down": {"url": "http://127.0.0.1:9/v1", "attempts": 1},
}


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    actor: AgentActorConfig
    advantage: AdvantageConfig
    placement: Any = "colocate"
    total_steps: int = NUM_STEPS
    save_every: int = 1
    eval_every: int = 0
    found: list[Any] = field(default_factory=list)


def main(flow: Any, cfg: Config) -> None:
    actor = flow.spawn(ActorWorker, cfg.actor, pool=flow.pool("all"))
    prompts = flow.prompts(cfg.data)
    for _ in flow.steps(NUM_STEPS):
        batch = actor.run_episodes(next(prompts)).segments()
        batch |= actor.compute_log_prob(batch)
        batch |= batch.map(compute_advantages, estimator="grpo", cfg=cfg.advantage)
        metrics = actor.update_actor(batch)
        flow.save(every=1)
        columns: dict[str, Any] = {}
        for name, values in batch.fetch(*COLUMNS).items():
            rows = rows_of(values) if is_ragged(values) else values
            columns[name] = [row.tolist() for row in rows]
        columns["metrics"] = dict(metrics)
        cfg.found.append(columns)


def config_of(case: str, out: Path, judge_url: str) -> Config:
    calls = case != "alone"
    log = out / f"{case}-replies"
    log.mkdir()
    rollout = AgentRolloutConfig(
        engine="builtin",
        max_new_tokens=32,
        max_batch_size=1,
        max_prompt_tokens=8,
        tokenizer_path=str(TASK / "model"),
        episode=EpisodeConfig(
            f"{models_env.__file__}:duel(calls={calls}, log='{log}')",
            seconds=600.0,
            models=MODELS | {"judge": {"url": judge_url}} if calls else {},
        ),
    )
    data = DataConfig(
        train_path=str(TASK / "train.jsonl"),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=NUM_EPISODES // 4,
        samples_per_prompt=4,
    )
    actor = AgentActorConfig(
        model=ModelConfig(path=str(TASK / "model")),
        engine=EngineConfig(),
        optimizer=OptimizerConfig(lr=1e-2),
        rollout=rollout,
        update=PolicyUpdateConfig(old_log_probs="recompute", mini_batch_size=NUM_EPISODES),
    )
    run = RunConfig(dir=str(out / case), sample_every=0)
    return Config(run, data, actor, AdvantageConfig(whiten=False))


def run_all(out_dir: str) -> None:
    out = Path(out_dir)
    with JudgeServer(judge) as server:
        _run_cases(out, server.url)


def judge(body: dict[str, Any]) -> Answer:
    """Says how many messages it has read."""
    return says(f"{len(body['messages'])} messages")


def _run_cases(out: Path, judge_url: str) -> None:
    for case, num_ranks in CASES.items():
        cfg = None
        if dist.get_rank() == 0:
            cfg = config_of(case, out, judge_url)
        cases = [cfg]
        dist.broadcast_object_list(cases)
        code = run_flow(sys.modules[__name__], cases[0], ranks=tuple(range(num_ranks)))
        assert code == 0 or dist.get_rank() >= num_ranks
        if dist.get_rank() == 0:
            (out / f"{case}.json").write_text(json.dumps(cases[0].found))
        dist.barrier()
