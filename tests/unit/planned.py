"""Dry runs for tests of `spmdflow.plan`: the bundled scripts, small, without reading data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config.load import load
from spmdflow.plan.record import Problem, Trace
from spmdflow.plan.replay import Replay
from spmdflow.plan.trace import TraceSettings, settings_of_run, trace
from spmdflow.runtime.call import Call
from tests.proofs.batches import check_batches
from tests.proofs.rows import check_rows

Commands = dict[int, Any]

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


def trace_replayed(script: ModuleType, cfg: Any, replay: Replay) -> Trace:
    """The steps of a run that a transcript has, with the run's own lengths and values."""
    return trace(script, cfg, settings_of_run(replay), replay)


def write_script(folder: Path, body: str) -> Path:
    """A script of the user's own: PPO's models, then `body` inside of the step."""
    lines = "\n".join(" " * 8 + line for line in body.splitlines())
    path = folder / "own.py"
    path.write_text(
        "from spmdflow import ActorWorker, RewardWorker\n\n\n"
        "def main(flow, cfg):\n"
        "    actor = flow.spawn(ActorWorker, cfg.actor)\n"
        "    reward = flow.spawn(RewardWorker, cfg.reward)\n"
        "    prompts = flow.prompts(cfg.data)\n"
        f"    for step in flow.steps(cfg.total_steps):\n{lines}\n"
    )
    (folder / "own.yaml").write_text((ALGORITHMS / "ppo.yaml").read_text())
    return path


def layered_trace() -> Trace:
    """PPO with tensor and pipeline parallel models and peers that hold the same rows."""
    megatron = [
        text
        for role in ("actor", "critic")
        for text in (f"{role}.engine.kind=megatron", f"{role}.engine.layout=t2p2")
    ]
    return traced("ppo", 8, *SMALL, *megatron, "critic.update.num_epochs=2")


def grouped_trace() -> Trace:
    """GRPO; samples of one prompt stay together: two prompts fill a mini-batch."""
    return traced("grpo", 4, *SMALL_GROUPS, "placement=split")


def changed(trace: Trace, changed_call: Call, change: Callable[[Commands], object]) -> Trace:
    """The trace with the commands of one call changed."""
    commands: Commands = {rank: dict(plain) for rank, plain in changed_call.commands.items()}
    for plain in commands.values():
        for name in ("sends", "receives", "mini"):
            if name in plain:
                plain[name] = [list(entry) for entry in plain[name]]
    change(commands)
    calls = [
        replace(call, commands=commands) if call is changed_call else call for call in trace.calls
    ]
    return replace(trace, calls=tuple(calls))


def find(trace: Trace, label: str) -> Call:
    return next(call for call in trace.calls if call.label == label)


def row_problems(trace: Trace) -> list[Problem]:
    """Problems with rows and mini-batches; an empty list proves the controller's row planner."""
    return check_rows(trace) + check_batches(trace)


def texts(problems: list[Any]) -> str:
    return "\n".join(problem.text for problem in problems)
