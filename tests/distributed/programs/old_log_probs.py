"""PPO with each choice of `actor.update.old_log_probs`, one update a batch, for other programs.

Nothing reads the old log-probs before the update: no KL in the reward.
"""

from __future__ import annotations

from pathlib import Path

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow

ROOT = Path(__file__).parents[3]
MODES = ("recompute", "auto", "rollout")
ROWS = 20


def run_modes(out: Path, *settings: str, ranks: tuple[int, ...]) -> None:
    """Two steps in each mode; out/MODE has its metrics."""
    for mode in MODES:
        sizes = [f"{role}.update.mini_batch_size={ROWS}" for role in ("actor", "critic")]
        loaded = load(
            ROOT / "algos" / "ppo.py",
            None,
            [
                f"run.dir={out / mode}",
                "total_steps=2",
                "eval_every=0",
                "save_every=0",
                f"data.prompts_per_step={ROWS}",
                *sizes,
                "actor.engine.micro_batch_tokens=64",
                "advantage.kl_coef=0",
                f"actor.update.old_log_probs={mode}",
                "run.call_seconds=600",
                *settings,
            ],
        )
        run_flow(loaded.script, loaded.cfg, ranks=ranks)
