"""Rows of one call by rank: what each rank is given, holds afterwards, and who answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from spmdflow.controller.schedule import (
    CutSettings,
    MicroLimit,
    MiniBatchPlan,
    plan_mini_batches,
    union_of,
)
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
