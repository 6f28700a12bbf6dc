"""One step of GRPO on episodes of a program; its rows are written to RUN_DIR/recorded.json.

`algos/grpo_agent.py` with a generator of its own, and without a reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmdflow import ActorWorker, Flow, compute_advantages
from spmdflow.data.ragged import is_ragged, rows_of
from tests.programs.scripted_generator import ScriptedConfig

COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"),
    *("token_level_rewards", "scores", "valid", "row_weights", "num_turns"),
)


def main(flow: Flow, cfg: ScriptedConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.total_steps):
        batch = actor.run_episodes(next(prompts)).segments()
        batch |= actor.compute_log_prob(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        found: dict[str, Any] = {}
        for name, values in batch.fetch(*COLUMNS).items():
            rows = rows_of(values) if is_ragged(values) else values
            found[name] = [row.tolist() for row in rows]
        (Path(cfg.run.dir) / "recorded.json").write_text(json.dumps(found))
