"""PPO with 3D-parallel actors and critics, on the rollouts of a single rank.

Every rank calls `run_all`. The first case, one rank without any parallelism, generates and records
its responses; the others generate too, count the rows that differ, and go on with the recorded
ones, so that losses can be compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.models.policy import ActorWorker
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Max, Sum
from tests.distributed.programs.old_log_probs import run_modes

ROOT = Path(__file__).parents[3]
STEPS = 3
_COLUMNS = ("responses", "response_mask", "rollout_log_probs")


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
    "t2p2-t2": Case(4, "t2p2", "t2", "flat", more=("actor.engine.residency=offload",)),
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


class ReplayActor(ActorWorker):
    """Records its responses in the first case and replays them in the others."""

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=_COLUMNS,
        extends=True,
        draws=True,
    )
    def generate_sequences(self, batch: TensorDict, *, greedy: bool = False) -> TensorDict:
        made = super().generate_sequences(batch, greedy=greedy)
        run_dir = self.context.run_dir
        assert run_dir is not None
        path, ids = self._record(run_dir), self.call.row_ids.tolist()
        rows = {name: rows_of(made[name]) for name in _COLUMNS}
        if run_dir.name in ("one", "one-judged"):
            torch.save({row: [rows[n][i] for n in _COLUMNS] for i, row in enumerate(ids)}, path)
            return made
        recorded = torch.load(path)
        self._compare(rows, recorded, ids)
        replayed = TensorDict({}, batch_size=batch.batch_size)
        for place, name in enumerate(_COLUMNS):
            dtype = made[name].dtype
            rows_now = [recorded[row][place] for row in ids]
            replayed[name] = ragged_from_rows(rows_now, dtype=dtype)
        return replayed

    def _record(self, run_dir: Path) -> Path:
        kind = "judged" if run_dir.name in MIXED else "plain"
        return run_dir.parent / f"rollouts-{kind}-{self.call.step}.pt"

    def _compare(self, rows: dict[str, Any], recorded: dict[int, Any], ids: list[int]) -> None:
        same = [torch.equal(rows["responses"][i], recorded[row][0]) for i, row in enumerate(ids)]
        gaps = [
            float((rows["rollout_log_probs"][i] - recorded[row][2]).abs().max())
            for i, row in enumerate(ids)
            if same[i]
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
        "actor.engine.micro_batch=3 rows",
        "run.call_seconds=120",
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


def run_all(out: str, names: tuple[str, ...]) -> None:
    """What every rank does."""
    for name in names:
        run_case(name, (CASES | MIXED | LARGE)[name], Path(out))
        dist.barrier()
    if set(MIXED) <= set(names):
        run_modes(Path(out) / "old", *T2, ranks=(0, 1))
        dist.barrier()
