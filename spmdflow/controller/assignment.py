"""Rows of one call by rank: what each rank is given, holds afterwards, and who answers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from spmdflow.data.micro import num_micro_batches
from spmdflow.data.row_id import seed_of
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import Protocol

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Assignment:
    """Positions in the batch, by rank."""

    given: Mapping[int, np.ndarray]
    holds: Mapping[int, np.ndarray]
    answering: tuple[int, ...]
    num_micro_batches: int = 1
    mini_batches: Mapping[int, list[tuple[np.ndarray, int]]] | None = None
    """By rank: per optimizer step, positions within `given` and the number of forwards."""


def assign(
    protocol: Protocol,
    layout: Layout,
    num_rows: int,
    *,
    limit: MicroLimit,
    lengths: np.ndarray | None = None,
    shares: Sequence[np.ndarray] | None = None,
) -> Assignment:
    """Rows of a call without mini-batches. The arrays may be shared: do not write them."""
    if lengths is None and shares is None:
        return _assign_evenly(protocol, layout, num_rows, limit)
    return _assign(protocol, layout, num_rows, limit, lengths, shares)


@lru_cache(maxsize=256)
def _assign_evenly(
    protocol: Protocol, layout: Layout, num_rows: int, limit: MicroLimit
) -> Assignment:
    """As every step makes the same calls, this is worked out once."""
    return _assign(protocol, layout, num_rows, limit, None, None)


def _assign(
    protocol: Protocol,
    layout: Layout,
    num_rows: int,
    limit: MicroLimit,
    lengths: np.ndarray | None,
    shares: Sequence[np.ndarray] | None,
) -> Assignment:
    lists = None if shares is None else [share.tolist() for share in shares]
    given = _arrays(protocol.distribute(layout, num_rows, lists))
    return Assignment(
        given=given,
        holds=_arrays(protocol.holds(layout, num_rows, lists)),
        answering=tuple(protocol.collect(layout).ranks),
        num_micro_batches=limit.count(list(given.values()), lengths),
    )


def assign_mini_batches(
    protocol: Protocol,
    layout: Layout,
    parents: np.ndarray,
    held: Mapping[int, np.ndarray],
    *,
    cut: CutSettings,
    limit: MicroLimit,
    lengths: np.ndarray | None,
    seed: int,
    step: int,
) -> Assignment:
    """Rows of an update call. held: positions by rank of this layout that are there already."""
    num_shares = protocol.num_shares(layout)
    share_of = shares_by_rank(protocol, layout)
    holder = np.full(len(parents), -1, dtype=np.int64)
    for rank, positions in held.items():
        if rank in share_of:
            holder[positions] = share_of[rank]
    plans = plan_mini_batches(
        parents,
        holder,
        num_shares,
        cut=cut,
        limit=limit,
        lengths=lengths,
        seed=seed,
        step=step,
    )
    shares = [union_of(plans, share) for share in range(num_shares)]
    whole = assign(protocol, layout, len(parents), limit=limit, lengths=lengths, shares=shares)
    within = [_within(plans, share, rows) for share, rows in enumerate(shares)]
    mini_batches = {rank: within[share] for rank, share in share_of.items()}
    return Assignment(
        whole.given, whole.holds, whole.answering, whole.num_micro_batches, mini_batches
    )


def shares_by_rank(protocol: Protocol, layout: Layout) -> dict[int, int]:
    """Which share each rank is given."""
    num_shares = protocol.num_shares(layout)
    probe = protocol.distribute(layout, num_shares, [[share] for share in range(num_shares)])
    return {rank: positions[0] for rank, positions in probe.items() if len(positions)}


def _within(
    plans: Sequence[MiniBatchPlan], share: int, given: np.ndarray
) -> list[tuple[np.ndarray, int]]:
    return [(np.searchsorted(given, plan.shares[share]), plan.num_micro_batches) for plan in plans]


def by_share(given: Mapping[int, T], make: Callable[[T], R]) -> dict[int, R]:
    """make(rows) for every rank; once for ranks that share one object, which share the answer."""
    made: dict[int, R] = {}
    for rows in given.values():
        if id(rows) not in made:
            made[id(rows)] = make(rows)
    return {rank: made[id(rows)] for rank, rows in given.items()}


def _arrays(positions: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
    return by_share(positions, lambda rows: np.asarray(rows, dtype=np.int64))


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
    chosen = balanced_shares(lengths[positions].tolist(), num_shares)
    return [np.sort(positions[np.array(share, dtype=np.int64)]) for share in chosen]


def balanced_shares(weights: Sequence[int], num_shares: int) -> list[list[int]]:
    """Rows in shares of nearly equal total weight (longest processing time first).

    Heaviest row first to the lightest share so far; ties go to the share with fewer rows, then
    to the earlier one. No share exceeds the mean by more than the heaviest row (Graham 1969).
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    lightest = [(0, 0, share) for share in range(num_shares)]
    for row in sorted(range(len(weights)), key=lambda row: (-weights[row], row)):
        total, num_rows, share = lightest[0]
        shares[share].append(row)
        heapq.heapreplace(lightest, (total + weights[row], num_rows + 1, share))
    return [sorted(share) for share in shares]


def union_of(plans: Sequence[MiniBatchPlan], share: int) -> np.ndarray:
    """Positions that a share needs over all mini-batches, ascending."""
    none = np.zeros(0, dtype=np.int64)  # a batch without rows has no plans
    return np.unique(np.concatenate([none, *(plan.shares[share] for plan in plans)]))
