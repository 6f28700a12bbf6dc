"""What the checks of data-parallel engines share: pools, models, shares of rows, whole states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_state import whole_state
from fsdp_reference import (
    CLIP,
    ENTROPY,
    KL,
    TEMPERATURE,
    VALUE_CLIP,
    Reference,
    make_batch,
    reference_step,
)
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdflow.config.schema import (
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyLossConfig,
    ValueLossConfig,
)
from spmdflow.data.micro import cut, num_micro_batches
from spmdflow.data.ragged import lengths_of, ragged_from_rows, rows_of
from spmdflow.errors import SpmdflowError
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.policy import PolicyLoss, ValueLoss
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.model import load_model

LR = 1e-2
MAX_DP = 4
MAX_ROWS = 9
SOME_ROWS = (1, 9)
VARIANTS = {
    # name: (model, reshard_after_forward, recompute, token budget)
    "tied": ("tied", True, False, None),
    "untied-gathered-recompute-tokens": ("untied", False, True, 24),
    "critic": ("reward", False, False, None),
    "critic-resharded-recompute-tokens": ("reward", True, True, 24),
}


class Collectives(TorchDispatchMode):
    """Elements of the tensors handed to each kind of collective, as this rank's torch sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            size = sum(x.numel() for x in tree_leaves(args) if isinstance(x, Tensor))
            self.elements[name[6:]] = self.elements.get(name[6:], 0) + size
        return func(*args, **(kwargs or {}))


@dataclass
class World:
    """What the checks share."""

    rank: int
    groups: GroupTable
    folder: Path
    results: dict[str, Any]
    references: dict[tuple[str, int], Reference]
    kind: str = "fsdp"
    """Engine kind."""
    every: bool = True
    """All pool sizes, rows and variants, or some."""
    shard: int = 0
    """Ranks of a group of shards, on pools that it divides; 0: all."""

    def engine(
        self, kind: str, dp: int, cfg: EngineConfig, *, dtype: str = "float32", **optimizer: Any
    ) -> TrainEngine:
        """An engine on ranks 0..dp-1; betas[0] = 0 keeps the gradient in exp_avg."""
        shard = 0 if self.shard and dp % self.shard else self.shard
        layout = Layout.data_parallel(tuple(range(dp)), shard_size=shard)
        context = WorkerContext(kind, layout, self.rank, self.groups, torch.device("cpu"), seed=0)
        head = "scalar" if kind == "reward" else "causal_lm"
        model = load_model(ModelConfig(path=str(self.folder / kind), dtype=dtype), head=head)
        settings = {"lr": LR, "betas": [0.0, 0.95], "weight_decay": 0.1, "clip_norm": 1e9}
        chosen = OptimizerConfig(**{**settings, **optimizer})
        engine = resolve(engine_kind(self.kind).implementation)
        cfg = replace(cfg, kind=self.kind)
        return engine(model, cfg, context, optimizer=chosen, total_optimizer_steps=4)

    def gradient_cases(self) -> Iterator[tuple[int, str, list[int]]]:
        """(pool size, variant, numbers of rows)."""
        for dp in range(1, MAX_DP + 1):
            # every variant on the largest pool; a smaller one has one variant
            names = list(VARIANTS) if self.every or dp == MAX_DP else [list(VARIANTS)[dp]]
            for name in names:
                yield dp, name, list(range(1, MAX_ROWS + 1) if self.every else SOME_ROWS)

    def reference(self, kind: str, rows: int) -> Reference:
        """One plain step on rows rows, kept for the other pool sizes."""
        key = (kind, rows)
        if key not in self.references:
            self.references[key] = reference_step(self.folder, kind, make_batch(rows), LR)
        return self.references[key]

    def note(self, name: str, value: Any) -> None:
        """Record a result of rank 0."""
        if self.rank == 0:
            self.results[name] = value


def engine_config(
    *, reshard: bool = True, recompute: bool = False, budget: int | None = None
) -> EngineConfig:
    """Settings of one variant."""
    options = [
        name for name, on in (("recompute", recompute), ("keep_gathered", not reshard)) if on
    ]
    if budget:
        return EngineConfig(options=options, micro_batch_tokens=budget)
    return EngineConfig(options=options, micro_batch_rows=16)


def split(
    batch: TensorDict, dp: int, rank: int, max_rows: int, budget: int | None
) -> tuple[TensorDict, int]:
    """This rank's contiguous share of the rows and the number of micro-batches of every rank."""
    lengths = (lengths_of(batch["prompts"]) + lengths_of(batch["responses"])).tolist()
    shares = cut(lengths, dp, by_tokens=False, packed=True)
    count = num_micro_batches(
        [[lengths[row] for row in share] for share in shares],
        max_rows=max_rows,
        max_tokens=budget,
        packed=True,
    )
    columns = {}
    for name in map(str, batch.keys()):
        rows = rows_of(batch[name])
        chosen = [rows[row] for row in shares[rank]]
        columns[name] = ragged_from_rows(chosen, dtype=batch[name].dtype)
    return TensorDict(columns, batch_size=[len(shares[rank])]), count


def loss_of(kind: str) -> PolicyLoss | ValueLoss:
    """The engine-side loss with the reference's coefficients."""
    if kind == "reward":
        return ValueLoss(ValueLossConfig(clip_range=VALUE_CLIP))
    cfg = PolicyLossConfig(clip_ratio=CLIP, entropy_coef=ENTROPY, kl_coef=KL, kl_estimator="k3")
    return PolicyLoss(cfg, TEMPERATURE)


def copies_differ(engine: TrainEngine) -> list[str]:
    """Names of tensors whose values on some rank are not those of the ranks that saved them."""
    saved: list[Any] = [whole_state(engine)]
    dist.broadcast_object_list(saved, src=0, group=engine.groups.get(engine.layout.ranks))
    wrong = [n for n, x, box in engine.blocks() if not torch.equal(x, saved[0][n][box.slices()])]
    found: list[Any] = [None] * engine.layout.size
    dist.all_gather_object(found, wrong, group=engine.groups.get(engine.layout.ranks))
    return sorted({name for names in found for name in names})


def message(action: Callable[[], object]) -> str:
    """The text of the error that action raises."""
    try:
        action()
    except SpmdflowError as err:
        return str(err)
    return "no error"
