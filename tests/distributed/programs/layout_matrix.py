"""PPO saved under one layout and resumed under another, on recorded rollouts.

Every one of four ranks calls `run_cells`. The first run records its responses by row id; all others
replay them, so that losses can be compared. A role that has loaded its state compares it with the
files, read by safetensors alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdflow import (
    AdaptiveKL,
    CriticWorker,
    Flow,
    PPOConfig,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
    measure_kl,
)
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.worker_api.worker import any_layout
from tests.distributed.programs.recorded import RecordedActor
from tests.distributed.programs.saving import ROOT, run_all, whole_tensors

LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "fsdp-d1": (1, "colocate", ("kind=fsdp",)),
    "fsdp-d4": (4, "colocate", ("kind=fsdp",)),
    "zero1-d2": (2, "colocate", ("kind=zero1",)),
    "zero3-d4": (4, "colocate", ("kind=zero3",)),
    "t2p1d2": (4, "colocate", ("kind=megatron", "layout=t2")),
    "t2p2d1": (4, "colocate", ("kind=megatron", "layout=t2p2")),
    "split": (4, "split", ("kind=fsdp",)),
    "standalone": (4, "standalone", ("kind=fsdp",)),
}
"""Number of ranks, placement, engine of actor, critic and reference."""
SAVED = 2
STEPS = 5


class Checked:
    """Says in RUN_DIR which tensors are not those of the files, in any bit."""

    @any_layout
    def load_state(self: Any, folder: Path) -> None:
        super().load_state(folder)  # type: ignore[misc]
        wholes = whole_tensors(folder)
        engine = self.engine
        wrong = [
            name
            for name, view, box in engine.state_blocks()
            if not torch.equal(view, wholes[name][box.slices()])
        ]
        found = {"wrong": wrong, "steps_done": engine.optimizer.steps_done, "of": len(wholes)}
        path = self.context.run_dir / f"loaded-{self.role}-{engine.rank}.json"
        path.write_text(json.dumps(found))


class MovedCritic(Checked, CriticWorker):
    """A critic that checks what it loads."""


class MovedActor(Checked, RecordedActor):
    """Replays its responses and checks what it loads."""


def main(flow: Flow, cfg: PPOConfig) -> None:
    """PPO with a KL weight that adapts and resumes."""
    actor = flow.spawn(MovedActor, cfg.actor)
    critic = flow.spawn(MovedCritic, cfg.critic)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    weight = flow.keep(weight=AdaptiveKL(cfg.advantage, target=1e-3))
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(measure_kl)
        weight.update(batch.mean("reference_kl"))
        applied = weight.applied_to(cfg.advantage)
        batch |= batch.map(compute_advantages, estimator="gae", cfg=applied)
        step.log(critic.update_critic(batch), actor.update_actor(batch), kl_coef=weight.value)
        flow.save(every=cfg.save_every)


def run_case(layout: str, run_dir: Path, *more: str) -> None:
    """A run of main to its last step."""
    num_ranks, placement, words = LAYOUTS[layout]
    engines = [f"{r}.engine.{word}" for r in ("actor", "critic", "reference") for word in words]
    settings = [
        *engines,
        f"run.dir={run_dir}",
        f"placement={placement}",
        f"total_steps={STEPS}",
        "eval_every=0",
        "run.keep_checkpoints=9",
        "data.prompts_per_step=32",
        "actor.update.mini_batch_size=16",
        "critic.update.mini_batch_size=16",
        "actor.engine.micro_batch_rows=8",
        "actor.optimizer.warmup_steps=3",
        "advantage.kl_coef=0.05",
        "run.call_seconds=600",
        *more,
    ]
    loaded = load(ROOT / "algos" / "ppo.py", None, settings)
    run_flow(sys.modules[__name__], loaded.cfg, ranks=tuple(range(num_ranks)))
    dist.barrier()


Cells = tuple[tuple[str, str], ...]
"""(layout that saves, layout that resumes)."""


def run_cells(out: str, cells: Cells) -> None:
    """What every rank does: OUT/A is uninterrupted, OUT/A-to-B continues after its step 2."""
    folder = Path(out)
    folder.mkdir(exist_ok=True)
    for saved in dict.fromkeys(("fsdp-d1", *(saved for saved, _ in cells))):
        run_case(saved, folder / saved, f"save_every={SAVED}")  # the first one records
    for saved, layout in cells:
        whole = folder / saved
        moved = folder / f"{saved}-to-{layout}"
        if dist.get_rank() == 0:
            moved.mkdir()
            for name in ("config.yaml", "metrics.jsonl"):
                shutil.copy(whole / name, moved)
            name = f"step-{SAVED}"
            shutil.copytree(whole / "checkpoints" / name, moved / "checkpoints" / name)
            (moved / "checkpoints" / "latest").write_text(name)
        dist.barrier()
        run_case(layout, moved, "save_every=0")


def run_all_and_cells(out: str, names: tuple[str, ...], cells: Cells) -> dict[str, list[str]]:
    """What every rank does: `saving.run_all`, then a few cells in OUT/cells."""
    found = run_all(out, names)
    run_cells(f"{out}/cells", cells)
    return found
