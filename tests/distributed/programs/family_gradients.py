"""One optimizer step of families of transformers on pools of 1, 2 and 4 ranks; gradients measured.

Usage: torchrun --nproc-per-node 4 family_gradients.py FOLDER KIND,... FAMILY ...
KIND: an engine's, on pools of 1, 2 and 4 ranks, or megatron-LAYOUT, such as megatron-t2e2, on as
many ranks as that layout needs; megatron-LAYOUT-OPTION has an option of engine.options.

Rank 0 writes FOLDER/results.json: a list of cases, each with the gap between its gradient and that
of plain transformers on the rows one by one, over the norm of the latter. Mixtures of experts have
the auxiliary loss in both, and log-probs of random routes are compared too: router replay.
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
from spmdflow.config.parallel import sizes_of
from spmdflow.config.schema import ModelConfig, OptimizerConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.supervised import SupervisedLoss
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.router import ROUTES, Routers, from_column
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import attention_of
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.context_group import GATHER, RING
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.model import load_model, open_model

CPU = torch.device("cpu")
POOLS = (1, 2, 4)
AXES = ("tp", "cp", "pp", "dp", "replica", "ep", "expert_dp", "tp_ep", "copy", "embedding")
AXES += ("weights", "model")
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
    layouts = {kind: layouts_of(kind) for kind in sys.argv[2].split(",")}
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in pools + alone + pairs])
    for layout in (layout for some in layouts.values() for layout in some):
        for axis in AXES:
            for ranks in layout.axis_groups(axis):
                groups.make([GroupSpec(ranks, "compute", "gloo")])
    found = []
    for family in sys.argv[3:]:
        if rank == 0:
            save_tiny_model(family, folder / family)
        dist.barrier()
        expected = Expected(folder / family) if rank == 0 else None
        for kind, some in layouts.items():
            for layout in some:
                if rank in layout.ranks:
                    engine = build(folder / family, kind, layout, rank, groups)
                    routed = routed_log_probs(engine, rank)
                    state, metrics = one_step(engine, rank)
                    if expected is not None:
                        case = {"family": family, "kind": kind, "dp": layout.dp_size}
                        case["replay"] = expected.replay_gap(routed)
                        found.append(case | expected.gaps(state, metrics))
                dist.barrier()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def layouts_of(kind: str) -> list[Layout]:
    """The layouts on which an engine is measured."""
    _, _, text = kind.partition("-")
    if not text:
        return [Layout.data_parallel(tuple(range(size))) for size in POOLS]
    sizes = sizes_of("kind", text.partition("-")[0])
    dp_size = max(sizes.dp, sizes.ep // sizes.cp, 1)
    return [
        Layout(
            tuple(range(sizes.replica * dp_size)),
            pp_size=sizes.pp,
            dp_size=dp_size,
            tp_size=sizes.tp,
            cp_size=sizes.cp,
            expert_size=sizes.ep,
            virtual_size=sizes.virtual,
        )
    ]


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
    result[5] = torch.tensor([2, 7]), torch.tensor([2, 5])  # the padding token is text here
    return [*result, result[0]]


def build(
    folder: Path,
    kind: str,
    layout: Layout,
    rank: int,
    groups: GroupTable,
    *,
    device: torch.device = CPU,
    dtype: str = "float32",
) -> TrainEngine:
    """Return an engine with the folder's weights, whose first step leaves its gradient."""
    name, _, text = kind.partition("-")
    facts = engine_kind(name)
    open_folder = open_model if facts.reads_folder else load_model
    cfg = replace(engine_config(recompute=layout.size == 2), kind=name)
    if text:
        options = text.split("-")[1:]
        for attention in (GATHER, RING):
            if attention in options:
                options.remove(attention)
                cfg = replace(cfg, context_attention=attention)
        cfg = replace(cfg, options=options)
    context = WorkerContext("actor", layout, rank, groups, device, seed=0)
    optimizer = OptimizerConfig(lr=1e-3, betas=[0.0, 0.95], weight_decay=0.0, clip_norm=1e9)
    engine = resolve(facts.implementation)(
        open_folder(ModelConfig(path=str(folder), dtype=dtype), head="causal_lm"),
        cfg,
        context,
        optimizer=optimizer,
        total_optimizer_steps=1,
    )
    if Architecture.sizes_from_folder(folder).num_experts:
        engine.router_balance_coef = BALANCE
    return engine


def share_of(engine: TrainEngine, rank: int, **more: list[Tensor]) -> tuple[TensorDict, int]:
    """This rank's rows, with more columns of all rows, and the number of micro-batches."""
    columns = {"prompts": [], "responses": [], "response_mask": [], **more}
    for prompt, response in rows():
        columns["prompts"].append(prompt)
        columns["responses"].append(response)
        columns["response_mask"].append(torch.ones_like(response, dtype=torch.bool))
    batch = {name: ragged_from_rows(values) for name, values in columns.items()}
    layout = engine.layout
    whole = TensorDict(batch, batch_size=[9])
    return split(whole, layout.dp_size, layout.coordinate(rank).dp, 2, None)


def one_step(engine: TrainEngine, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the complete state after one step, whose exp_avg is the gradient, and the metrics."""
    share, parts = share_of(engine, rank)
    metrics = engine.train_step(share, SupervisedLoss(), num_micro_batches=parts)
    return whole_state(engine), metrics


def random_routes() -> list[Tensor]:
    """Two of eight experts for each token and each of two layers, of every row."""
    draw = torch.Generator().manual_seed(7)
    result = []
    for prompt, response in rows():
        length = len(prompt) + len(response)
        scores = torch.rand(length, 2, 8, generator=draw)
        result.append(scores.topk(2, dim=-1).indices.to(torch.uint8))
    return result


def routed_log_probs(engine: TrainEngine, rank: int) -> list[Tensor]:
    """Return the log-probs of all responses on the first rank, with random routes for each token.

    [] on other ranks.
    """
    share, parts = share_of(engine, rank, **{ROUTES: random_routes()})
    found = engine.forward(
        share,
        lambda output, micro: {"log_probs": micro.spread(output.log_probs())},
        num_micro_batches=parts,
    )
    mine = {}
    if found is not None:
        mine[engine.layout.coordinate(rank).dp] = rows_of(found["log_probs"])
    first = engine.layout.ranks[0]
    every: list[Any] | None = [None] * engine.layout.size if rank == first else None
    dist.gather_object(mine, every, dst=first, group=engine.groups.get(engine.layout.ranks))
    shares = {}
    for part in every or ():
        shares |= part
    return [row for dp in sorted(shares) for row in shares[dp]]


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
        self.model = model
        self.routers = Routers.of(model)
        self.balance = balance_of(seen, by_sigmoid=config.model_type in SIGMOIDS)
        (total / tokens + BALANCE * self.balance).backward()
        self.gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = parameter.grad

    def replay_gap(self, found: list[Tensor]) -> float:
        """The largest gap of log-probs with random routes; 0 without experts."""
        if self.routers is None:
            return 0.0
        gap = 0.0
        for (prompt, response), routes, row in zip(rows(), random_routes(), found, strict=True):
            self.routers.begin(from_column(routes))
            with torch.no_grad():
                ids = torch.cat([prompt, response])[None]
                logits = self.model(input_ids=ids, use_cache=False).logits
            chosen = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, response[:, None])
            gap = max(gap, float((chosen[:, 0] - row).abs().max()))
        return gap

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
            "norm": abs(metrics["grad_norm"] / norm**0.5 - 1),
            "balance": abs(balance - float(self.balance)),
            "auxiliary": float(self.balance),
            "expert_bytes": metrics.get("expert_bytes", 0.0),
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
