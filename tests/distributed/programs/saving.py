"""PPO on four ranks saved under every kind of layout, and every checkpoint loaded under each.

Every one of four ranks calls `save_all` and `load_all`.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.state import StateFiles
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.models.policy import ActorWorker
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine, engine_of

ROOT = Path(__file__).parents[3]
NUM_RANKS = 4
CASES: dict[str, tuple[str, ...]] = {
    "fsdp": ("kind=fsdp",),
    "s2": ("kind=fsdp", "layout=s2"),
    "zero1": ("kind=zero1",),
    "t2": ("kind=megatron", "layout=t2"),
    "p2": ("kind=megatron", "layout=p2", "options=[plain_optimizer]"),
}


def settings_of(name: str, out: Path) -> Any:
    """Of algos/ppo.py for one step, actor and critic on the case's engine."""
    engines = [f"{role}.engine.{word}" for role in ("actor", "critic") for word in CASES[name]]
    words = [
        *engines,
        f"run.dir={out / name}",
        "total_steps=1",
        "eval_every=0",
        "save_every=1",
        "data.prompts_per_step=16",
        "actor.update.mini_batch_size=8",
        "critic.update.mini_batch_size=8",
        "run.call_seconds=600",
    ]
    return load(ROOT / "algos" / "ppo.py", None, words)


def save_all(out: str, names: tuple[str, ...]) -> None:
    """A run of one step for each case; its checkpoint is OUT/NAME/checkpoints/step-1."""
    for name in names:
        loaded = settings_of(name, Path(out))
        run_flow(loaded.script, loaded.cfg, ranks=tuple(range(NUM_RANKS)))
        dist.barrier()


def engine_for(name: str, out: Path, *, model: Path | None = None) -> TrainEngine:
    """A new actor's engine on the case's layout; model: another folder than the settings'."""
    rank = dist.get_rank()
    cfg = settings_of(name, out).cfg.actor
    cfg.model.path = str(model or cfg.model.path)
    layout = ActorWorker.layout_of(cfg, tuple(range(NUM_RANKS)))
    groups = GroupTable(rank, timeout_seconds=600)
    needed = ActorWorker.needed_groups(cfg, layout)
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in needed])
    context = WorkerContext(name, layout, rank, groups, torch.device("cpu"), seed=0, total_steps=4)
    return engine_of(cfg, context, head="causal_lm")


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """What a role's files hold, read by safetensors alone: each element is there once."""
    pieces = [piece for path in folder.glob("rank-*") for piece in load_file(path).items()]
    boxes: dict[str, list[tuple[Box, Tensor]]] = {}
    for key, values in pieces:
        match = re.fullmatch(r"(.+)\[(.*)\]", key)
        assert match is not None, key
        pairs = [pair.split(":") for pair in match[2].split(",")]
        box = Box(tuple((int(low), int(high)) for low, high in pairs))
        boxes.setdefault(match[1], []).append((box, values))
    found = {}
    for name, parts in boxes.items():
        shape = [max(box.bounds[dim][1] for box, _ in parts) for dim in range(parts[0][1].dim())]
        whole = found.setdefault(name, torch.full(shape, torch.nan))
        for box, values in parts:
            assert bool(whole[box.slices()].isnan().all()), f"{name} is saved twice"
            whole[box.slices()] = values
    assert not any(bool(whole.isnan().any()) for whole in found.values())
    return found


def load_all(out: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Case, from case -> state tensors of this rank that are not those in the files."""
    found = {}
    for name in names:
        engine = engine_for(name, Path(out))
        for saved in names:
            folder = Path(out) / saved / "checkpoints" / "step-1" / "actor"
            files = StateFiles(folder, index=engine.rank, count=NUM_RANKS)
            engine.load_blocks(files.fill, files.plain["steps_done"])
            wholes = whole_tensors(folder)
            wrong = [
                key
                for key, view, box in engine.state_blocks()
                if not torch.equal(view, wholes[key][box.slices()])
            ]
            assert engine.optimizer is not None and engine.optimizer.steps_done == 2
            found[f"{name} from {saved}"] = wrong
    return found


def load_from_torch(out: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Case, loaded as model.path from what torch's distributed checkpoint wrote of FSDP's shards ->
    weights of this rank that are not those of the checkpoint."""
    saved = Path(out) / "fsdp" / "checkpoints" / "step-1" / "actor"
    folder = Path(out) / "torch"
    engine = engine_for("fsdp", Path(out))
    files = StateFiles(saved)
    engine.load_blocks(files.fill, files.plain["steps_done"])
    module: Any = engine._module  # type: ignore[attr-defined]
    dcp.save({"model": dict(module.named_parameters())}, checkpoint_id=folder)
    if engine.rank == 0:
        for path in (saved / "hugging_face").glob("*.json"):
            shutil.copy(path, folder)
    dist.barrier()
    wholes = whole_tensors(saved)
    found = {}
    for name in names:
        engine = engine_for(name, Path(out), model=folder)
        wrong = [n for n, x, box in engine.blocks() if not torch.equal(x, wholes[n][box.slices()])]
        found[f"{name} of torch"] = wrong
    return found


def run_all(out: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """What every rank does."""
    sys.modules.pop("spmdflow_script", None)
    save_all(out, names)
    return load_all(out, names) | load_from_torch(out, names)
