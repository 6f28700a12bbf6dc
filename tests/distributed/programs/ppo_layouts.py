"""PPO under many placements inside one process group, on the same rollouts.

Every one of eight ranks calls `run_all`. The first case generates and
records its responses by row id; the others replay them, so that losses can be compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.distributed.programs.old_log_probs import run_modes
from tests.distributed.programs.recorded import RecordedActor

ROOT = Path(__file__).parents[3]
STEPS = 3
CASES: dict[str, tuple[str, int]] = {
    "colocate-1": ("colocate", 1),
    "colocate-2": ("colocate", 2),
    "colocate-4": ("colocate", 4),
    "colocate-4-again": ("colocate", 4),
    "split-2": ("split", 2),
    "split-4": ("split", 4),
    "standalone-4": ("standalone", 4),
    "standalone-8": ("standalone", 8),
    "colocate-4-s2": ("colocate", 4),
    "colocate-4-s2-resumed": ("colocate", 4),
}
ENGINES = ("fsdp", "zero2")
"""Of two ranks, for each choice of old log-probs."""
S2 = tuple(f"{role}.engine.layout=s2" for role in ("actor", "critic", "reference"))


def main(flow: Any, cfg: Any) -> None:
    """The bundled PPO script with the replaying actor, in the actor's place."""
    import spmdflow_script

    spmdflow_script.ActorWorker = RecordedActor
    spmdflow_script.main(flow, cfg)


def run_case(name: str, placement: str, num_ranks: int, out: Path, *more: str) -> None:
    settings = [
        f"run.dir={out / name}",
        f"placement={placement}",
        f"total_steps={STEPS}",
        "eval_every=0",
        "save_every=0",
        "data.prompts_per_step=37",
        "actor.update.mini_batch_size=37",
        "critic.update.mini_batch_size=37",
        "actor.engine.micro_batch_rows=5",
        "run.call_seconds=600",
        *(S2 if "s2" in name else ()),
        *more,
    ]
    loaded = load(ROOT / "algos" / "ppo.py", None, settings)
    loaded.cfg.actor.update.mini_batch_size = 13
    loaded.cfg.critic.update.mini_batch_size = 13
    loaded.cfg.advantage.kl_coef = 0.05
    run_flow(sys.modules[__name__], loaded.cfg, ranks=tuple(range(num_ranks)))


def run_all(out: str) -> None:
    """What every rank does."""
    for case, (placed, on_ranks) in CASES.items():
        if case.endswith("resumed"):
            run_case(case, placed, on_ranks, Path(out), "total_steps=2", "save_every=2")
            dist.barrier()
        run_case(case, placed, on_ranks, Path(out))
        dist.barrier()
    for kind in ENGINES:
        run_modes(Path(out) / "old" / kind, f"actor.engine.kind={kind}", ranks=(0, 1))
    dist.barrier()
