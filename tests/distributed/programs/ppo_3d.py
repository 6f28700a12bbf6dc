"""PPO with 3D-parallel actors and critics, on the rollouts of a single rank.

Usage: torchrun -m tests.distributed.programs.ppo_3d FOLDER CASE...

The first case, one rank without any parallelism, generates and records its responses; the others
generate too, count the rows that differ, and go on with the recorded ones, so that losses can be
compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.worker_api.metric import Max, Sum
from tests.distributed.programs.old_log_probs import run_modes
from tests.distributed.programs.recorded import RecordedActor, Rows

ROOT = Path(__file__).parents[3]
STEPS = 3


class Case(NamedTuple):
    """One run: ranks, the actor's layouts and how its weights pass."""

    ranks: int
    train: str
    generate: str = "auto"
    weights: str = "auto"
    generator: str = "vllm"
    more: tuple[str, ...] = ()


JUDGE = ("reward.function=null", "reward.model.path=${run.dir}/../judge")
APART = (
    "placement={a: {roles: [actor, reference], ranks: [0, 1]}, b: {roles: [critic], ranks: [2]}, "
    "c: {roles: [reward], ranks: [3]}}",
    "critic.engine.kind=fsdp",
    "critic.engine.layout=t1",
    "reward.engine.kind=zero2",
)
CASES = {
    "one": Case(
        1, "t1", generator="builtin", more=("actor.engine.kind=fsdp", "critic.engine.kind=fsdp")
    ),
    "t4-t2": Case(4, "t4", "t2", "blocks"),
    "t2p2-t2": Case(
        4, "t2p2", "t2", "flat", more=("actor.engine.offload=[parameters,gradients,optimizer]",)
    ),
    "t2p2-t1": Case(4, "t2p2", "t1", "copy"),
    "t2d2-t1": Case(4, "t2", "t1", "blocks", more=("actor.engine.options=[sequence_parallel]",)),
    "t2d2-t2": Case(4, "t2", "t2", "blocks", more=("actor.engine.options=[plain_optimizer]",)),
    "t2d2-builtin": Case(4, "t2", generator="builtin"),
    "t2d2-t4": Case(4, "t2", "t4", "copy"),
    "p2-p2": Case(4, "p2", "p2", "blocks", more=("critic.engine.layout=t4",)),
}
MIXED = {
    "one-judged": Case(
        1,
        "t1",
        generator="builtin",
        more=("actor.engine.kind=fsdp", "critic.engine.kind=fsdp", *JUDGE),
    ),
    "mixed": Case(4, "t2", generator="builtin", more=(*JUDGE, *APART)),
}
T2 = tuple(
    f"{role}.engine.{x}" for role in ("actor", "critic") for x in ("kind=megatron", "layout=t2")
)
LARGE = {"t2p2d2-t2": Case(8, "t2p2", "t2", "blocks")}


class ReplayActor(RecordedActor):
    """Counts the rows that it would have made otherwise."""

    def kind_of(self, run_dir: Path) -> str:
        """With a reward model or a function."""
        return "judged-" if run_dir.name in MIXED else "plain-"

    def compare(self, made: Rows, recorded: Rows) -> None:
        """Rows of other tokens, and the largest gap in log-probs of the equal ones."""
        pairs = list(zip(made, recorded, strict=True))
        same = [torch.equal(own["responses"], kept["responses"]) for own, kept in pairs]
        gaps = [
            float((own["rollout_log_probs"] - kept["rollout_log_probs"]).abs().max())
            for (own, kept), is_same in zip(pairs, same, strict=True)
            if is_same
        ]
        self.report({"replay/other_rows": Sum(same.count(False)), "replay/gap": Max(max(gaps))})


def main(flow: Any, cfg: Any) -> None:
    """The bundled PPO script with the replaying actor, in the actor's place."""
    import spmdflow_script

    spmdflow_script.ActorWorker = ReplayActor
    spmdflow_script.main(flow, cfg)


def run_case(name: str, case: Case, out: Path) -> None:
    """One run on the first ranks of the world."""
    settings = [
        f"run.dir={out / name}",
        f"total_steps={STEPS}",
        "eval_every=0",
        "save_every=0",
        "data.prompts_per_step=22",
        "actor.update.mini_batch_size=11",
        "critic.update.mini_batch_size=11",
        "actor.engine.micro_batch_rows=3",
        "run.call_seconds=600",
        "actor.engine.kind=megatron",
        f"actor.engine.layout={case.train}",
        f"actor.rollout.engine={case.generator}",
        f"actor.rollout.layout={case.generate}",
        f"actor.rollout.weights={case.weights}",
        "critic.engine.kind=megatron",
        f"critic.engine.layout={case.train}",
        f"reference.engine.kind={'fsdp' if case.train == 't1' else 'megatron'}",
        f"reference.engine.layout={case.train}",
        *case.more,
    ]
    loaded = load(ROOT / "algos" / "ppo.py", None, settings)
    loaded.cfg.advantage.kl_coef = 0.05
    run_flow(sys.modules[__name__], loaded.cfg, ranks=tuple(range(case.ranks)))


def run_rank(out: str, names: list[str]) -> None:
    """One rank under torchrun."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_all(out, names)
    dist.destroy_process_group()


def run_all(out: str, names: list[str]) -> None:
    """What every rank does."""
    for name in names:
        run_case(name, (CASES | MIXED | LARGE)[name], Path(out))
        dist.barrier()
    if set(MIXED) <= set(names):
        run_modes(Path(out) / "old", *T2, ranks=(0, 1))
        dist.barrier()


if __name__ == "__main__":
    from tests.distributed.programs import ppo_3d  # classes are named by their module

    ppo_3d.run_rank(sys.argv[1], sys.argv[2:])
