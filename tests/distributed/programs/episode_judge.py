"""Episodes whose scores a judge gives, on one and two ranks and from a queue.

Every rank of a process group calls `run_all`. Columns of each case are in OUT_DIR/<case>.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdflow.config.episode import AgentActorConfig, AgentRolloutConfig, EpisodeConfig
from spmdflow.config.objective import PolicyUpdateConfig
from spmdflow.config.schema import DataConfig, EngineConfig, ModelConfig, RunConfig
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import is_ragged, rows_of
from spmdflow.models.generator import GeneratorWorker
from spmdflow.models.policy import ActorWorker, PolicyWorker
from tests.distributed.programs import judge_env

TASK = Path(__file__).parents[3] / "algos" / "guess"
CASES = {"one": 1, "two": 2, "queue": 3}
"""Ranks; of a queue, one trains and two generate."""
DOES = ("ranks", "asks", "raises", "short", "omits", "partly")
SAMPLES = 4
COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "token_level_rewards"),
    *("scores", "valid", "num_turns"),
)


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    actor: AgentActorConfig
    generator: AgentActorConfig
    placement: Any = "colocate"
    total_steps: int = 1
    eval_every: int = 0
    found: dict[str, Any] = field(default_factory=dict)


def main(flow: Any, cfg: Config) -> None:
    prompts = flow.prompts(cfg.data)
    if cfg.run.dir is not None and cfg.run.dir.endswith("queue"):
        actor = flow.spawn(PolicyWorker, cfg.actor, pool=flow.pool("trains"))
        generator = flow.spawn(GeneratorWorker, cfg.generator, pool=flow.pool("generates"))
        weights = flow.connect(actor, generator)
        weights.sync()
        source: Any = flow.queue(prompts, weights, max_staleness=1)
        for _ in flow.steps(1):
            record(cfg, next(source))
        return
    actor = flow.spawn(ActorWorker, cfg.actor, pool=flow.pool("all"))
    for _ in flow.steps(1):
        rows = next(prompts)
        cfg.found["row"] = rows.fetch("row")["row"]
        record(cfg, actor.run_episodes(rows))


def record(cfg: Config, episodes: Any) -> None:
    batch = episodes.segments()
    cfg.found["metrics"] = dict(episodes.metrics)
    for name, values in batch.fetch(*COLUMNS).items():
        rows = rows_of(values) if is_ragged(values) else values
        cfg.found[name] = [row.tolist() for row in rows]
    cfg.found["ids"] = batch.ids.tolist()
    cfg.found["parents"] = batch.parents.tolist()


def config_of(case: str, out: Path) -> Config:
    rollout = AgentRolloutConfig(
        engine="builtin",
        max_new_tokens=32,
        max_batch_size=1,
        max_prompt_tokens=8,
        tokenizer_path=str(TASK / "model"),
        episode=EpisodeConfig(
            f"{judge_env.__file__}:episode",
            judge=f"{judge_env.__file__}:judge(scale=2.0)",
            max_failed_fraction=1.0,
        ),
    )
    data = DataConfig(
        train_path=str(out / "rows.jsonl"),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=len(DOES),
        samples_per_prompt=SAMPLES,
    )
    update = PolicyUpdateConfig(old_log_probs="recompute")
    actor = AgentActorConfig(
        model=ModelConfig(path=str(TASK / "model")),
        engine=EngineConfig(),
        rollout=rollout,
        update=update,
    )
    cfg = Config(RunConfig(dir=str(out / case), sample_every=0), data, actor, actor)
    if case == "queue":
        cfg.placement = {
            "trains": {"roles": ["actor"], "ranks": [0]},
            "generates": {"roles": ["generator"], "ranks": [1, 2]},
        }
    return cfg


def write_rows(out: Path, all_do: tuple[str, ...] = DOES) -> None:
    """Writes the data on the first rank. All ranks call it together."""
    if dist.get_rank() == 0:
        lines = [json.dumps({"prompt": "guess", "does": does}) + "\n" for does in all_do]
        (out / "rows.jsonl").write_text("".join(lines))
    dist.barrier()


def run_strict(out_dir: str) -> None:
    """A run on two ranks that ends at the first failure of the judge."""
    write_rows(Path(out_dir), ("ranks", "ranks", "raises", "ranks", "ranks", "ranks"))
    cfg = config_of("two", Path(out_dir))
    cfg.actor.rollout.episode.on_error = "raise"
    run_flow(sys.modules[__name__], cfg, ranks=(0, 1))


def run_all(out_dir: str) -> None:
    out = Path(out_dir)
    write_rows(out)
    for case, num_ranks in CASES.items():
        cfg = config_of(case, out)
        code = run_flow(sys.modules[__name__], cfg, ranks=tuple(range(num_ranks)))
        assert code == 0 or dist.get_rank() >= num_ranks
        if dist.get_rank() == 0:
            (out / f"{case}.json").write_text(json.dumps(cfg.found))
        dist.barrier()
