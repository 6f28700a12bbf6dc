"""Trains one step on the segments of `episode_env.several` and `choices`, on one and two ranks.

Every rank of a process group calls `run_all`. Columns of each case are in OUT_DIR/<case>.json.
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
from spmdflow.config.schema import DataConfig, EngineConfig, ModelConfig, RunConfig
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import is_ragged, rows_of
from spmdflow.models.policy import ActorWorker
from tests.distributed.programs import episode_env

TASK = Path(__file__).parents[3] / "algos" / "guess"
CASES = {
    "episode": (1, "episode", "several(by_segment=False)"),
    "episode-2": (2, "episode", "several(by_segment=False)"),
    "segment-2": (2, "segment", "several(by_segment=True)"),
    "choices": (1, "episode", "choices"),
    "choices-2": (2, "episode", "choices"),
    "requests": (1, "episode", "choices(at_once=False)"),
}
"""Ranks, the rule of credit, and the environment."""
NUM_EPISODES = 12
COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"),
    *("token_level_rewards", "scores", "valid", "row_weights", "advantages", "num_turns"),
)


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    actor: AgentActorConfig
    advantage: AdvantageConfig
    placement: Any = "colocate"
    total_steps: int = 1
    eval_every: int = 0
    found: dict[str, Any] = field(default_factory=dict)


def main(flow: Any, cfg: Config) -> None:
    actor = flow.spawn(ActorWorker, cfg.actor, pool=flow.pool("all"))
    prompts = flow.prompts(cfg.data)
    for _ in flow.steps(1):
        episodes = actor.run_episodes(next(prompts))
        batch = episodes.segments()
        batch |= actor.compute_log_prob(batch)
        batch |= batch.map(compute_advantages, estimator="grpo", cfg=cfg.advantage)
        metrics = actor.update_actor(batch)
        for name, values in batch.fetch(*COLUMNS).items():
            rows = rows_of(values) if is_ragged(values) else values
            cfg.found[name] = [row.tolist() for row in rows]
        cfg.found["ids"] = batch.ids.tolist()
        cfg.found["parents"] = batch.parents.tolist()
        cfg.found["episodes"] = episodes.ids.tolist()
        cfg.found["metrics"] = dict(metrics)


def config_of(case: str, out: Path) -> Config:
    _, credit, name = CASES[case]
    environment = f"{episode_env.__file__}:{name}"
    rollout = AgentRolloutConfig(
        engine="builtin",
        max_new_tokens=32,
        max_batch_size=1,
        max_prompt_tokens=8,
        tokenizer_path=str(TASK / "model"),
        episode=EpisodeConfig(environment, seconds=600.0, credit=credit),
    )
    data = DataConfig(
        train_path=str(TASK / "train.jsonl"),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=NUM_EPISODES // 4,
        samples_per_prompt=4,
    )
    update = PolicyUpdateConfig(old_log_probs="recompute", mini_batch_size=NUM_EPISODES)
    actor = AgentActorConfig(
        model=ModelConfig(path=str(TASK / "model")),
        engine=EngineConfig(),
        rollout=rollout,
        update=update,
    )
    run = RunConfig(dir=str(out / case), sample_every=0)
    return Config(run, data, actor, AdvantageConfig(whiten=False))


def run_all(out_dir: str) -> None:
    out = Path(out_dir)
    for case, (num_ranks, _, _) in CASES.items():
        cfg = config_of(case, out)
        code = run_flow(sys.modules[__name__], cfg, ranks=tuple(range(num_ranks)))
        assert code == 0 or dist.get_rank() >= num_ranks
        if dist.get_rank() == 0:
            (out / f"{case}.json").write_text(json.dumps(cfg.found))
        dist.barrier()
