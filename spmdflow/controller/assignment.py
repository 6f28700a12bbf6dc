"""Rows of one call by rank: which rows each rank gets, which it has afterwards, and who replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spmdflow.config.schema import UpdateConfig
from spmdflow.data.micro import balance, num_micro_batches
from spmdflow.data.row_id import seed_of
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import Protocol, even_chunks
from spmdflow.weights.architecture import packs_rows, sizes_if_there

T = TypeVar("T")
R = TypeVar("R")
_NONE = np.zeros(0, dtype=np.int64)
_NO_LIMIT = 1 << 30
_UNEVEN = 1.05
"""Shares are rebalanced if the heaviest costs more than this many times the mean."""


class MicroLimit(NamedTuple):
    """Largest forward pass on one rank, and what a row costs in it."""

    max_rows: int
    max_tokens: int | None
    packed: bool = True
    seen_token_cost: float = 0.0
    """What attending to one token costs, in tokens without attention."""
    window: int | None = None
    """The most tokens that a token attends to. None: all before it."""

    def costs_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return what rows of these lengths (B,) cost: their tokens, and attention in tokens.

        A row of T tokens attends T^2 / 2 times to a token, with a window W at most W T - W^2 / 2
        times. (B,) int64.
        """
        if self.window is None:
            seen = lengths**2 / 2
        else:
            window = np.minimum(lengths, self.window)
            seen = window * lengths - window**2 / 2
        return lengths + np.rint(self.seen_token_cost * seen).astype(np.int64)

    def count_of(self, shares: Sequence[np.ndarray], lengths: np.ndarray | None) -> int:
        """Return the number of forward passes of each share: the largest need of one, at least 1.

        shares: positions of their rows. lengths (B,): tokens of each row; None counts each as 0
        tokens.
        """
        tokens = []
        for share in shares:
            tokens.append([0] * len(share) if lengths is None else lengths[share].tolist())
        return num_micro_batches(
            tokens, max_rows=self.max_rows, max_tokens=self.max_tokens, packed=self.packed
        )


@dataclass(frozen=True)
class Target:
    """A worker group, as far as planning a call needs it."""

    name: str
    worker_class: type
    layout: Layout
    settings: Any
    """The settings that the model was spawned with."""

    @cached_property
    def limit(self) -> MicroLimit:
        """Return the largest allowed forward pass, from `engine` in the settings of the model.

        The limit is micro_batch_size_per_rank rows and, if set, max_micro_batch_tokens tokens.
        Without `engine` or `model` in the settings there is no limit. Cached.
        """
        engine, model = (getattr(self.settings, name, None) for name in ("engine", "model"))
        if engine is None or model is None:
            return MicroLimit(_NO_LIMIT, None)
        rows = engine.micro_batch_size_per_rank
        tokens = engine.max_micro_batch_tokens
        packed = packs_rows(engine.kind, engine.options, model.path)
        shape = sizes_if_there(model.path)
        if shape is None:
            return MicroLimit(rows, tokens, packed)
        return MicroLimit(rows, tokens, packed, shape.seen_token_cost, shape.sliding_window)


@dataclass(frozen=True)
class Assignment:
    """Which positions of the batch each rank gets, and has afterwards; which ranks reply."""

    received: Mapping[int, np.ndarray]
    holds: Mapping[int, np.ndarray]
    answering: tuple[int, ...]
    num_micro_batches: int = 1
    mini_batches: Mapping[int, list[tuple[np.ndarray, int]]] | None = None
    """By rank: per optimizer step, positions within `received` and the number of forwards."""


def assign(
    rules: Protocol,
    layout: Layout,
    num_rows: int,
    limit: MicroLimit,
    lengths: np.ndarray | None = None,
    shares: Sequence[np.ndarray] | None = None,
) -> Assignment:
    """Assign the rows of a call to ranks: which each rank gets and keeps, and which ranks reply.

    lengths (B,): tokens of each row; they count the micro-batches and, without shares, rebalance
    the even chunks by cost (`even_costs`). shares: positions of each share, used as they are.
    """
    if shares is None and lengths is not None:
        parts = even_chunks(num_rows, rules.num_shares(layout))
        shares = even_costs([_positions(part) for part in parts], limit.costs_of(lengths))
    lists = None if shares is None else [share.tolist() for share in shares]
    positions = by_share(rules.distribute(layout, num_rows, lists), _positions)
    return Assignment(
        received=positions,
        holds=by_share(rules.holds(layout, num_rows, lists), _positions),
        answering=tuple(rules.collect(layout).ranks),
        num_micro_batches=limit.count_of(list(positions.values()), lengths),
    )


assign_again = lru_cache(maxsize=256)(assign)
"""`assign` with a cache, for calls that do not depend on lengths and repeat in every step.

The arrays are shared: do not write to them."""


def by_share(rows_of_rank: Mapping[int, T], convert: Callable[[T], R]) -> dict[int, R]:
    """Return convert(rows) for every rank; it is called once for ranks that share one rows object.

    Those ranks then share the converted object.
    """
    converted: dict[int, R] = {}
    result = {}
    for rank, rows in rows_of_rank.items():
        if id(rows) not in converted:
            converted[id(rows)] = convert(rows)
        result[rank] = converted[id(rows)]
    return result


def _positions(rows: Sequence[int]) -> np.ndarray:
    return np.asarray(rows, dtype=np.int64)


def assign_mini_batches(
    rules: Protocol,
    target: Target,
    parents: np.ndarray,
    present: Mapping[int, np.ndarray],
    *,
    lengths: np.ndarray | None,
    seed: int,
    step: int,
    row_shares: np.ndarray | None = None,
) -> Assignment:
    """Assign the rows of an update to ranks, and to the mini-batches of its optimizer steps.

    A rank gets each row of its share once; its mini-batches are positions in these rows.
    parents (B,): the group of each row. present: positions that each rank of the target already
    has, which stay there if the shares remain even. lengths (B,): tokens of each row. seed, step:
    determine the order of the rows. row_shares (B,): how much each row counts in the size of a
    mini-batch; None: 1.
    """
    layout = target.layout
    limit = target.limit
    num_shares = rules.num_shares(target.layout)
    probe = rules.distribute(layout, num_shares, [[share] for share in range(num_shares)])
    share_of = {rank: shares[0] for rank, shares in probe.items() if shares}
    holder = np.full(len(parents), -1, dtype=np.int64)
    for rank, positions in present.items():
        if rank in share_of:
            holder[positions] = share_of[rank]
    minis = plan_mini_batches(
        parents,
        holder,
        num_shares,
        target.settings.update,
        limit,
        lengths,
        seed=seed,
        step=step,
        row_shares=row_shares,
    )
    shares = []
    for share in range(num_shares):
        shares.append(np.unique(np.concatenate([_NONE, *(mini.shares[share] for mini in minis)])))
    within = []
    for share, rows in enumerate(shares):
        within.append(
            [(np.searchsorted(rows, mini.shares[share]), mini.num_micro_batches) for mini in minis]
        )
    assignment = assign(rules, layout, len(parents), limit, lengths, shares)
    return replace(
        assignment, mini_batches={rank: within[share] for rank, share in share_of.items()}
    )


class MiniBatchPlan(NamedTuple):
    """One optimizer step: positions in the batch for each share."""

    shares: list[np.ndarray]
    num_micro_batches: int


def plan_mini_batches(
    parents: np.ndarray,
    holder: np.ndarray,
    num_shares: int,
    cfg: UpdateConfig,
    limit: MicroLimit,
    lengths: np.ndarray | None,
    *,
    seed: int,
    step: int,
    row_shares: np.ndarray | None = None,
) -> list[MiniBatchPlan]:
    """Return every optimizer step of one update call, over all epochs, in order.

    In each epoch, shuffles the groups (cfg.shuffle), cuts them into mini-batches, and splits each
    over the shares: evenly by rows, with few rows moved, or by cost (cfg.balance_tokens, with
    lengths).
    parents (B,): the group of each row. holder (B,): the share that has each row, or -1.
    row_shares: see `cut_mini_batches`.
    """
    minis = []
    for epoch in range(cfg.num_epochs):
        order = np.arange(len(parents))
        if cfg.shuffle:
            order = permutation(parents, seed=seed, step=step, epoch=epoch)
        for positions in cut_mini_batches(parents, order, cfg.mini_batch_size, row_shares):
            shares = share_near(positions, holder, num_shares)
            if cfg.balance_tokens and lengths is not None:
                shares = even_costs(shares, limit.costs_of(lengths))
            minis.append(MiniBatchPlan(shares, limit.count_of(shares, lengths)))
    return minis


def takes_one_step(
    parents: np.ndarray, cfg: UpdateConfig, row_shares: np.ndarray | None = None
) -> bool:
    """Whether an update of rows with these parents is one optimizer step.

    row_shares: see `cut_mini_batches`.
    """
    size = len(parents) if row_shares is None else round(float(row_shares.sum()), 6)
    fits = size <= cfg.mini_batch_size or len(np.unique(parents)) == 1
    return cfg.num_epochs == 1 and fits


def permutation(parents: np.ndarray, *, seed: int, step: int, epoch: int) -> np.ndarray:
    """Return the positions of all rows with the groups in random order, each group's rows together.

    Depends only on parents, seed, step and epoch.
    """
    groups = _groups(parents)
    generator = np.random.default_rng(seed_of(seed, "mini_batches", step, epoch))
    return np.concatenate([_NONE, *(groups[i] for i in generator.permutation(len(groups)))])


def cut_mini_batches(
    parents: np.ndarray, order: np.ndarray, size: int, row_shares: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut the positions `order` into mini-batches of at most `size` rows; never split a group.

    row_shares (B,): how much each row counts; None: 1. The n segments of an episode count 1 / n.

    Takes groups (equal parents) in the order of their first rows, and starts a new mini-batch where
    the next group would exceed size. A group larger than size is a mini-batch on its own.
    """
    batches: list[list[np.ndarray]] = [[]]
    filled = 0.0
    for group in _groups(parents[order]):
        positions = order[group]
        length = float(len(group) if row_shares is None else row_shares[positions].sum())
        if filled and round(filled + length, 6) > size:
            batches.append([])
            filled = 0.0
        batches[-1].append(positions)
        filled += length
    mini_batches = []
    for batch in batches:
        if batch:
            mini_batches.append(np.concatenate(batch))
    return mini_batches


def _groups(parents: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each group of equal parents, in the order of the first rows."""
    by_parent: dict[int, list[int]] = {}
    for position, parent in enumerate(parents.tolist()):
        by_parent.setdefault(parent, []).append(position)
    return [_positions(group) for group in by_parent.values()]


def share_near(positions: np.ndarray, holder: np.ndarray, num_shares: int) -> list[np.ndarray]:
    """Split positions evenly over shares, moving as few rows as possible; return ascending arrays.

    holder (B,): the share that has each row of the batch, or -1. Sizes differ by at most one. The
    shares that have the most of these rows are the larger ones; on a tie the earlier share is.
    """
    own = []
    for share in range(num_shares):
        own.append(positions[holder[positions] == share])
    base, extra = divmod(len(positions), num_shares)
    larger = sorted(range(num_shares), key=lambda share: (-len(own[share]), share))[:extra]
    room = []
    for share in range(num_shares):
        room.append(base + (share in larger))
    staying = []
    for share in range(num_shares):
        staying.append(own[share][: room[share]])
    moving = positions[~np.isin(positions, np.concatenate(staying))]
    shares = []
    start = 0
    for share in range(num_shares):
        lacking = room[share] - len(staying[share])
        shares.append(np.sort(np.concatenate([staying[share], moving[start : start + lacking]])))
        start += lacking
    return shares


def even_costs(shares: list[np.ndarray], costs: np.ndarray) -> list[np.ndarray]:
    """Return shares of nearly equal cost; the same shares if they are nearly balanced already.

    They are if the heaviest has at most 1.05 times the mean cost. Otherwise all rows are
    distributed from scratch (`balance`), with ascending positions. costs (B,): of each row
    (`MicroLimit.costs_of`).
    """
    totals = [int(costs[share].sum()) for share in shares]
    if max(totals) * len(shares) <= _UNEVEN * sum(totals):
        return shares
    positions = np.sort(np.concatenate(shares))
    balanced = balance(costs[positions].tolist(), len(shares))
    return [positions[_positions(share)] for share in balanced]


def generation_shares(
    prompts: np.ndarray,
    parents: np.ndarray,
    num_shares: int,
    limit: MicroLimit,
    new_tokens: int,
) -> list[np.ndarray] | None:
    """Return which rows each replica generates, or None: even chunks are as good.

    Lengths of responses are not known, so each counts as new_tokens tokens. Its tokens attend to
    the prompt, too. A replica computes a prompt once for all of its rows with this prompt. Whole
    groups and single rows are tried; the shares whose heaviest costs least are taken if even chunks
    cost over 5 % more.
    prompts (B,): tokens of each prompt. parents (B,): the group of each row. Returns ascending
    positions of each share.
    """
    prompt_costs = limit.costs_of(prompts)
    row_costs = limit.costs_of(prompts + new_tokens) - prompt_costs
    groups = _groups(parents)
    group_of = np.unique(parents, return_inverse=True)[1]

    def heaviest(shares: Sequence[np.ndarray]) -> int:
        """Return the cost of the share that costs most."""
        costs = []
        for share in shares:
            first_rows = share[np.unique(group_of[share], return_index=True)[1]]
            costs.append(int(row_costs[share].sum() + prompt_costs[first_rows].sum()))
        return max(costs)

    group_costs = []
    for group in groups:
        group_costs.append(int(row_costs[group].sum() + prompt_costs[group[0]]))
    by_group = []
    for numbers in balance(group_costs, num_shares):
        by_group.append(np.sort(np.concatenate([_NONE, *(groups[i] for i in numbers)])))
    by_row = []
    for rows in balance((row_costs + prompt_costs).tolist(), num_shares):
        by_row.append(_positions(rows))
    best = min(by_group, by_row, key=heaviest)
    even = [_positions(part) for part in even_chunks(len(prompts), num_shares)]
    if heaviest(even) <= _UNEVEN * heaviest(best):
        return None
    return best
