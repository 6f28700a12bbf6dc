"""The placements of the HybridFlow paper's section 8.3, and how ours compare with them.

A cell is won when the paper's placement costs at most 1 % more than the best one found. Nothing
here is fitted: the coefficients are spmdflow/mapping/hardware/a100_80gb.yaml as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench._dataflows import NOMINAL, ppo
from bench._given import evaluate
from spmdflow.mapping.dataflow import Dataflow, Engine, Workload
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.partition_search import find_mapping
from spmdflow.mapping.placed import Placed, Ranking
from spmdflow.mapping.search import Options, best_of_partition
from spmdflow.mapping.table import CostTable

WORKLOAD = Workload(1024, 1024, 1024, num_updates=8)
"""Section 8.1: 1024 prompts and responses of 1024 tokens each, 8 updates of 128 rows."""

ALL = ("actor", "critic", "reference", "reward")
SPLIT = (("actor", "reference"), ("critic", "reward"))
ALONE = (("actor",), ("critic",), ("reference",), ("reward",))
ASIDE = (("actor", "reference", "reward"), ("critic",))


TRAINED_WITH = {
    "7B": Engine(layouts=((8, 1),)),
    "13B": Engine(layouts=((8, 1),)),
    "34B": Engine(layouts=((8, 1), (8, 2), (8, 4))),
    "70B": Engine(layouts=((8, 1), (8, 2), (8, 4), (8, 8))),
}
"""Sizes of the paper's figures 14 and 15: t = 8 and p = 1, 1, 4, 8, less where a pool is small."""


@dataclass(frozen=True)
class Cell:
    """One point of section 8.3: models, GPUs, and the placement that the paper's search chose."""

    actor: str
    """Also the reference's size."""
    critic: str
    """Also the reward model's."""
    num_gpus: int
    pools: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]

    @property
    def models(self) -> str:
        """Such as 13B x4 or 13B+70B."""
        return f"{self.actor} x4" if self.actor == self.critic else f"{self.actor}+{self.critic}"

    @property
    def choice(self) -> str:
        """The paper's placement as text."""
        return " | ".join(
            f"{{{', '.join(roles)}}}@{size}" for roles, size in zip(self.pools, self.sizes)
        )

    def dataflow(self, *, log_prob: bool, imposed: bool = False) -> Dataflow:
        """PPO on these models; imposed: trained with the sizes that the paper trains with."""
        actor = NOMINAL[self.actor]
        critic = NOMINAL[self.critic]
        flow = ppo(
            actor, critic, reference=actor, reward=critic, workload=WORKLOAD, log_prob=log_prob
        )
        if not imposed:
            return flow
        models = tuple(
            replace(m, engine=TRAINED_WITH[m.shape.name]) if m.trained else m for m in flow.models
        )
        return replace(flow, models=models)


def _cell(actor: str, critic: str, num_gpus: int, pools: Sequence[tuple[str, ...]]) -> Cell:
    """Pools of equal size."""
    sizes = (num_gpus // len(pools),) * len(pools)
    return Cell(actor, critic, num_gpus, tuple(pools), sizes)


CELLS = (
    _cell("13B", "13B", 16, [ALL]),
    _cell("13B", "13B", 32, [ALL]),
    _cell("13B", "13B", 64, [ALL]),
    _cell("13B", "13B", 96, SPLIT),
    Cell("13B", "13B", 128, ALONE, (64, 32, 16, 16)),
    _cell("34B", "34B", 32, [ALL]),
    _cell("34B", "34B", 64, [ALL]),
    _cell("34B", "34B", 96, SPLIT),
    _cell("34B", "34B", 128, SPLIT),
    _cell("13B", "70B", 32, [ALL]),
    _cell("13B", "70B", 64, [ALL]),
    _cell("13B", "70B", 96, SPLIT),
    _cell("13B", "70B", 128, ASIDE),
)


@dataclass(frozen=True)
class Score:
    """One cell's outcome."""

    cell: Cell
    mapping: Ranking
    paper: Placed
    """The paper's placement, with our strategies."""

    @property
    def ratio(self) -> float:
        """Seconds of the paper's placement over the best's."""
        return self.paper.seconds / self.mapping.best[0].seconds


def score_cell(
    cell: Cell, hardware: Hardware, *, log_prob: bool, imposed: bool = False, keep: int = 10
) -> Score:
    """Search, and evaluate the paper's choice."""
    dataflow = cell.dataflow(log_prob=log_prob, imposed=imposed)
    mapping = find_mapping(dataflow, hardware, cell.num_gpus, keep=keep)
    starts = [sum(cell.sizes[:place]) for place in range(len(cell.sizes))]
    pools = [
        (roles, range(start, start + size))
        for roles, start, size in zip(cell.pools, starts, cell.sizes)
    ]
    return Score(cell, mapping, evaluate(dataflow, hardware, pools))


def family_allocation(cell: Cell, hardware: Hardware, *, log_prob: bool) -> tuple[int, ...]:
    """The best sizes of the paper's pools among powers of two and, for 96 GPUs, 48 = 96 / 2.

    Among all multiples of 8 other sizes can be a little better: 56 + 40 + 16 + 16 is such a one.
    """
    dataflow = cell.dataflow(log_prob=log_prob)
    sizes = [8, 16, 32, 64, cell.num_gpus // 2, cell.num_gpus // len(cell.pools)]
    table = CostTable(dataflow, hardware, sorted({size for size in sizes if size % 8 == 0}))
    names = [model.name for model in dataflow.models]
    options = []
    for roles in cell.pools:
        block = tuple(sorted(names.index(role) for role in roles))
        fronts = [(int(size), table.front(block, int(size)).costs) for size in table.sizes]
        counts = np.concatenate([np.full(len(costs), size) for size, costs in fronts])
        options.append(Options(counts, np.concatenate([costs for _, costs in fronts])))
    best = best_of_partition(options, cell.num_gpus)
    assert best is not None, cell
    return tuple(int(one.sizes[pick]) for one, pick in zip(options, best[1]))


def scaled(hardware: Hardware, name: str, factor: float) -> Hardware:
    """The same machine with one coefficient multiplied."""
    return replace(hardware, **{name: getattr(hardware, name) * factor})
