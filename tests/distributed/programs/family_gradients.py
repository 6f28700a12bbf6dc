"""One optimizer step of families of transformers on pools of 1, 2 and 4 ranks; gradients measured.

Usage: torchrun --nproc-per-node 4 family_gradients.py FOLDER KIND,... FAMILY ...
KIND: an engine's. Rank 0 writes FOLDER/results.json: a list of cases, each with the gap between its
gradient and that of plain transformers on the rows one by one, over the norm of the latter.
Mixtures of experts have the auxiliary loss in both.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import transformers
from engine_state import whole_state
from engine_world import engine_config, split
from tensordict import TensorDict
from torch import Tensor, nn

from scripts.families.tiny import save_tiny_model
from spmdflow.config.schema import ModelConfig, OptimizerConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.supervised import SupervisedLoss
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.weights.folder import attention_of
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.model import load_model

POOLS = (1, 2, 4)
SIGMOIDS = ("deepseek_v3", "dots1", "glm4_moe", "minimax_m2")
"""Families whose routers score with sigmoids."""
BALANCE = 0.5
"""Weight of the auxiliary loss: as large a part of the gradient as the cross-entropy."""


def main() -> None:
    """Measure all families on all pools and engines."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = GroupTable(rank, timeout_seconds=600)
    pools = [tuple(range(size)) for size in POOLS]
    alone = [(member,) for member in range(1, POOLS[-1])]
    pairs = [(0, 2), (1, 3), (2, 3)]  # zero1's replicas are pools of one shard
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in pools + alone + pairs])
    found = []
    for family in sys.argv[3:]:
        if rank == 0:
            save_tiny_model(family, folder / family)
        dist.barrier()
        expected = Expected(folder / family) if rank == 0 else None
        for kind in sys.argv[2].split(","):
            for ranks in pools:
                if rank in ranks:
                    state, metrics = one_step(folder / family, kind, ranks, rank, groups)
                    if expected is not None:
                        case = {"family": family, "kind": kind, "dp": len(ranks)}
                        found.append(case | expected.gaps(state, metrics))
                dist.barrier()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def rows() -> list[tuple[Tensor, Tensor]]:
    """Prompts and responses of nine rows."""
    draw = torch.Generator().manual_seed(3)
    result = []
    for prompt, response in ((5, 14), (17, 3), (1, 9), (3, 14), (9, 1), (2, 2), (8, 6), (4, 11)):
        result.append(
            (
                torch.randint(3, 320, (prompt,), generator=draw),
                torch.randint(3, 320, (response,), generator=draw),
            )
        )
    return [*result, result[0]]


def one_step(
    folder: Path, kind: str, ranks: tuple[int, ...], rank: int, groups: GroupTable
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the complete state after one step, whose exp_avg is the gradient, and the metrics."""
    layout = Layout.data_parallel(ranks)
    context = WorkerContext("actor", layout, rank, groups, torch.device("cpu"), seed=0)
    optimizer = OptimizerConfig(lr=1e-3, betas=[0.0, 0.95], weight_decay=0.0, clip_norm=1e9)
    engine = resolve(engine_kind(kind).implementation)(
        load_model(ModelConfig(path=str(folder)), head="causal_lm"),
        replace(engine_config(recompute=len(ranks) == 2), kind=kind),
        context,
        optimizer=optimizer,
        total_optimizer_steps=1,
    )
    engine.router_balance_coef = BALANCE
    columns = {"prompts": [], "responses": [], "response_mask": []}
    for prompt, response in rows():
        columns["prompts"].append(prompt)
        columns["responses"].append(response)
        columns["response_mask"].append(torch.ones_like(response, dtype=torch.bool))
    batch = {name: ragged_from_rows(values) for name, values in columns.items()}
    share, parts = split(TensorDict(batch, batch_size=[9]), len(ranks), rank, 2, None)
    metrics = engine.train_step(share, SupervisedLoss(), num_micro_batches=parts)
    return whole_state(engine), metrics


class Expected:
    """The gradient of plain transformers, with each row alone, and its auxiliary loss."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **attention_of(config)
        ).eval()
        seen = watch_routers(model)
        tokens = 0
        total = torch.zeros(())
        for prompt, response in rows():
            logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits
            chosen = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, response[:, None])
            total = total - chosen.sum()
            tokens += len(response)
        self.balance = balance_of(seen, by_sigmoid=config.model_type in SIGMOIDS)
        (total / tokens + BALANCE * self.balance).backward()
        self.gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = parameter.grad

    def gaps(self, state: dict[str, Tensor], metrics: dict[str, Any]) -> dict[str, float]:
        """How far the engine's gradient and auxiliary loss are from these."""
        gap = 0.0
        norm = 0.0
        for name, gradient in self.gradients.items():
            gap += float((state[f"{name}.exp_avg"] - gradient).double().square().sum())
            norm += float(gradient.double().square().sum())
        balance = metrics.get("router_balance", 0.0)
        return {
            "gradient": (gap / norm) ** 0.5,
            "balance": abs(balance - float(self.balance)),
            "auxiliary": float(self.balance),
        }


def watch_routers(model: nn.Module) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Collect (logits, chosen experts) of each router, which returns both in some order."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(name: str, output: tuple[Tensor, ...]) -> None:
        chosen = next(x for x in output if not x.is_floating_point())
        wide = [x for x in output if x.is_floating_point() and x.shape[-1] > chosen.shape[-1]]
        seen.setdefault(name, []).append((wide[0], chosen))

    for name, part in model.named_modules():
        if type(part).__name__.lower().endswith("topkrouter"):
            part.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
    return seen


def balance_of(seen: dict[str, list[tuple[Tensor, Tensor]]], *, by_sigmoid: bool) -> Tensor:
    """E * sum_e n_e / T * P_e, mean over the layers; 0 without routers.

    P_e: of a softmax, or of sigmoids divided by their sum.
    """
    losses = []
    for calls in seen.values():
        logits = torch.cat([logits for logits, _ in calls])
        chosen = torch.cat([chosen for _, chosen in calls])
        shares = torch.nn.functional.one_hot(chosen, logits.shape[-1]).sum(1).double().mean(0)
        scores = logits.sigmoid() if by_sigmoid else logits.exp()
        means = (scores / scores.sum(-1, keepdim=True)).double().mean(0)
        losses.append(logits.shape[-1] * (shares * means).sum())
    return torch.stack(losses).mean() if losses else torch.zeros(())


if __name__ == "__main__":
    main()
