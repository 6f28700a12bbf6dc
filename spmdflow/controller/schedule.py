"""Which rows go to which share of a call: mini-batches first, ranks second. Integers only.

Mini-batches are cut from the order of the batch (or a permutation that depends on seed, step
and epoch, never on the layout), so every dp size takes the same optimizer steps. Inside a
mini-batch each share keeps rows that it already holds, up to an even split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.data.micro import num_micro_batches
from spmdflow.data.seed import seed_of
from spmdflow.transfer.protocol import balanced_chunks


@dataclass(frozen=True)
class MicroLimit:
    """What one forward may hold on one rank."""

    max_rows: int
    max_tokens: int | None

    def count(self, shares: Sequence[np.ndarray], lengths: np.ndarray | None) -> int:
        """Forward passes that every share makes: the largest need among them."""
        tokens = [[0] * len(s) if lengths is None else lengths[s].tolist() for s in shares]
        return num_micro_batches(tokens, max_rows=self.max_rows, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class CutSettings:
    """How a batch becomes optimizer steps; the parts of `UpdateConfig` that matter here."""

    mini_batch_size: int
    num_epochs: int
    shuffle: bool
    balance_tokens: bool


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step: positions in the batch for each share."""

    shares: tuple[np.ndarray, ...]
    num_micro_batches: int


def permutation(parents: np.ndarray, *, seed: int, step: int, epoch: int) -> np.ndarray:
    """Positions with whole groups in random order; depends on seed, step and epoch only."""
    groups = _groups(parents)
    generator = np.random.default_rng(seed_of(seed, "mini_batches", step, epoch))
    order = generator.permutation(len(groups))
    return np.concatenate([groups[i] for i in order]) if groups else np.zeros(0, dtype=np.int64)


def cut_mini_batches(parents: np.ndarray, order: np.ndarray, size: int) -> list[np.ndarray]:
    """Positions of each mini-batch: `size` samples, groups of one parent whole."""
    batches: list[list[np.ndarray]] = [[]]
    filled = 0
    for group in _groups(parents[order]):
        if filled and filled + len(group) > size:
            batches.append([])
            filled = 0
        batches[-1].append(order[group])
        filled += len(group)
    return [np.concatenate(batch) for batch in batches if batch]


def _groups(parents: np.ndarray) -> list[np.ndarray]:
    """Positions of equal parents, groups in the order of their first row."""
    by_parent: dict[int, list[int]] = {}
    for position, parent in enumerate(parents.tolist()):
        by_parent.setdefault(parent, []).append(position)
    return [np.array(group, dtype=np.int64) for group in by_parent.values()]


def share_near(positions: np.ndarray, holder: np.ndarray, num_shares: int) -> list[np.ndarray]:
    """Even split of positions over shares that moves as few rows as it can.

    holder[i] is the share that has row i of the batch, or -1.
    """
    own = [positions[holder[positions] == share] for share in range(num_shares)]
    base, extra = divmod(len(positions), num_shares)
    larger = sorted(range(num_shares), key=lambda share: (-len(own[share]), share))[:extra]
    room = [base + (share in larger) for share in range(num_shares)]
    kept = [own[share][: room[share]] for share in range(num_shares)]
    rest = positions[~np.isin(positions, np.concatenate(kept))]
    shares, start = [], 0
    for share in range(num_shares):
        lacking = room[share] - len(kept[share])
        shares.append(np.sort(np.concatenate([kept[share], rest[start : start + lacking]])))
        start += lacking
    return shares


def plan_mini_batches(
    parents: np.ndarray,
    holder: np.ndarray,
    num_shares: int,
    *,
    cut: CutSettings,
    limit: MicroLimit,
    lengths: np.ndarray | None,
    seed: int,
    step: int,
) -> list[MiniBatchPlan]:
    """Every optimizer step of one update call, over all epochs, in order."""
    plans = []
    for epoch in range(cut.num_epochs):
        order = np.arange(len(parents))
        if cut.shuffle:
            order = permutation(parents, seed=seed, step=step, epoch=epoch)
        for positions in cut_mini_batches(parents, order, cut.mini_batch_size):
            if cut.balance_tokens:
                assert lengths is not None
                shares = _share_by_tokens(positions, lengths, num_shares)
            else:
                shares = share_near(positions, holder, num_shares)
            plans.append(MiniBatchPlan(tuple(shares), limit.count(shares, lengths)))
    return plans


def _share_by_tokens(
    positions: np.ndarray, lengths: np.ndarray, num_shares: int
) -> list[np.ndarray]:
    chosen = balanced_chunks(lengths[positions].tolist(), num_shares)
    return [np.sort(positions[np.array(share, dtype=np.int64)]) for share in chosen]


def union_of(plans: Sequence[MiniBatchPlan], share: int) -> np.ndarray:
    """Positions that a share needs over all mini-batches, ascending."""
    none = np.zeros(0, dtype=np.int64)  # a batch without rows has no plans
    return np.unique(np.concatenate([none, *(plan.shares[share] for plan in plans)]))
