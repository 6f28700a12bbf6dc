"""Dry runs for tests of `spmdflow.plan`: the bundled scripts, small, without reading data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmdflow.config.load import load
from spmdflow.plan.record import Trace
from spmdflow.plan.trace import TraceSettings, trace

ROOT = Path(__file__).parents[2]
ALGORITHMS = ROOT / "algos"
SMALL = (
    "data.prompts_per_step=12",
    "actor.update.mini_batch_size=6",
    "critic.update.mini_batch_size=6",
    "eval_every=0",
)
SMALL_GROUPS = (
    "data.prompts_per_step=4",
    "data.samples_per_prompt=3",
    "actor.update.mini_batch_size=6",
    "eval_every=0",
)


def settings_of(world: int, *, node_size: int = 2, **more: Any) -> TraceSettings:
    """A world of nodes of two ranks, data unread."""
    nodes = tuple(rank // node_size for rank in range(world))
    return TraceSettings(tuple(range(world)), nodes, read_data=False, **more)


def traced(script: str, world: int, *settings: str, **more: Any) -> Trace:
    """A dry run of one of the bundled scripts."""
    loaded = load(ALGORITHMS / f"{script}.py", None, settings)
    return trace(loaded.script, loaded.cfg, settings_of(world, **more))


def write_script(folder: Path, body: str) -> Path:
    """A script of the user's own: PPO's models, then `body` inside of the step."""
    lines = "\n".join(" " * 8 + line for line in body.splitlines())
    path = folder / "own.py"
    path.write_text(
        "from spmdflow import ActorWorker, PromptStream, RewardWorker\n\n\n"
        "def main(flow, cfg):\n"
        "    actor = flow.spawn(ActorWorker, cfg.actor)\n"
        "    reward = flow.spawn(RewardWorker, cfg.reward)\n"
        "    prompts = flow.keep(prompts=PromptStream(cfg.data))\n"
        f"    for step in flow.steps(cfg.total_steps):\n{lines}\n"
    )
    (folder / "own.yaml").write_text((ALGORITHMS / "ppo.yaml").read_text())
    return path
