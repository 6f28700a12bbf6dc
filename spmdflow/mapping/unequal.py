"""Seconds of calls whose rows differ in length, for one strategy.

A pass waits for its busiest data-parallel rank. `update_parts` gets the mean micro-batch of that
rank, with rows cut into micro-batches as the workers cut them (`data.micro.cut`). Ranks that gather
weights or reduce gradients in every micro-batch meet in each of them.

A replica decodes its rows in their order, as many at once as its KV cache holds at the mean length.
A row that ends makes room for the next one. Between two such events the batch is constant, and a
step takes `decode_parts` of this batch and of its mean context. So the tail, in which few long rows
are left, takes as many steps as its longest row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.data.micro import cut as cut_rows
from spmdflow.mapping.dataflow import Model, Strategy
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.seconds import (
    Parts,
    PassTokens,
    add_parts,
    decode_parts,
    prefill_seconds,
    total,
    update_parts,
)

_FEW = 0.25
"""Part of a replica's largest batch below which `GenerationEstimate.tail_seconds` counts."""


@dataclass(frozen=True)
class Rows:
    """Tokens of rows: prompts (n,) and responses (n,), int64."""

    prompts: np.ndarray
    responses: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> np.ndarray:
        """(n,): prompt and response tokens of each row."""
        return self.prompts + self.responses


@dataclass(frozen=True)
class SharedRows:
    """Rows of one optimizer step, of a forward call or of a generation, and who has which."""

    shares: tuple[Rows, ...]
    """Rows of each data-parallel rank, or of each replica."""
    num_micro: int = 1
    """Micro-batches of every share."""


@dataclass(frozen=True)
class GenerationEstimate:
    """Seconds and rows of the slowest replica of a generation."""

    parts: Parts
    num_rows: int
    longest: int
    """Response tokens of its longest row."""
    tail_seconds: float
    """Seconds in which it decodes less than a quarter of its largest batch."""


def pass_parts_by_row(
    model: Model, steps: Sequence[SharedRows], cut: Strategy, hw: Hardware, *, trains: bool
) -> Parts:
    """Return the seconds of a training or forward call by cause, the sum over its steps."""
    parts: Parts = {}
    for one in steps:
        micro = busiest_tokens(model, one)
        more = update_parts(model, micro, one.num_micro, cut, hw, trains=trains)
        parts = add_parts(parts, more)
    return add_parts(parts, {"host": hw.call_seconds})


def busiest_tokens(model: Model, one: SharedRows) -> PassTokens:
    """Return the mean micro-batch of the rank that all others wait for.

    It is the rank with most tokens, padding included. If ranks meet in every micro-batch, it is
    composed of the heaviest micro-batch of each number.
    """
    sharding = model.engine.sharding
    meets = sharding.micro_batch_gathers > 0 or sharding.micro_batch_reductions > 0
    costs = np.stack([_micro_costs(model, share, one.num_micro) for share in one.shares])
    tokens = costs[:, :, 0]  # (shares, micro-batches)
    if meets:
        heaviest = tokens.argmax(0)
        chosen = costs[heaviest, np.arange(one.num_micro)]
    else:
        chosen = costs[tokens.sum(1).argmax()]
    computed, squares, answered = chosen.sum(0)
    return PassTokens(
        tokens=computed / one.num_micro,
        context=squares / computed / 2,
        answered=answered / one.num_micro,
    )


def estimate_generation(
    model: Model, one: SharedRows, cut: Strategy, hw: Hardware, *, slots: int
) -> GenerationEstimate:
    """Return the slowest replica of a generation. slots: rows that a replica decodes at once."""
    replicas = [_estimate_share(model, share, cut, hw, slots=slots) for share in one.shares]
    slowest = max(replicas, key=lambda replica: float(total(replica.parts)))
    return GenerationEstimate(
        parts=add_parts(slowest.parts, {"host": hw.call_seconds}),
        num_rows=slowest.num_rows,
        longest=slowest.longest,
        tail_seconds=slowest.tail_seconds,
    )


def starts_of(lengths: np.ndarray, slots: int) -> np.ndarray:
    """Return (n,): the step in which each row starts, if `slots` rows run and they run in order.

    Row i runs for lengths[i] steps. A row starts as soon as an earlier one has ended.
    """
    starts = np.zeros(len(lengths), dtype=np.int64)
    ends: list[int] = []
    for row, length in enumerate(lengths.tolist()):
        if len(ends) < slots:
            heapq.heappush(ends, length)
        else:
            starts[row] = ends[0]
            heapq.heapreplace(ends, ends[0] + length)
    return starts


def _micro_costs(model: Model, share: Rows, num_micro: int) -> np.ndarray:
    """Return (num_micro, 3): tokens, sum of squared row lengths, response tokens.

    A row counts as long as the longest of its micro-batch unless rows are packed.
    """
    engine = model.engine
    packed = engine.facts.packs_with(engine.options) and model.shape.packs
    by_tokens = engine.micro_batch_tokens is not None
    lengths = share.tokens
    costs = np.zeros((num_micro, 3))
    positions = cut_rows(lengths.tolist(), num_micro, by_tokens=by_tokens, packed=packed)
    for number, rows in enumerate(positions):
        if not rows:
            continue
        computed = lengths[rows].astype(np.float64)
        if not packed:
            computed[:] = computed.max()
        answered = share.responses[rows].sum()
        costs[number] = (computed.sum(), np.square(computed).sum(), answered)
    return costs


def _estimate_share(
    model: Model, share: Rows, cut: Strategy, hw: Hardware, *, slots: int
) -> GenerationEstimate:
    """Return the generation of one replica, without call_seconds.

    Between two events (a row starts or ends) the batch is constant. Its context is that in the
    middle between the events.
    """
    starts = starts_of(share.responses, slots)
    ends = starts + share.responses
    events = np.unique(np.concatenate([starts, ends]))
    steps = np.diff(events)
    middle = (events[:-1] + events[1:]) / 2
    started = np.zeros(len(events))  # rows that start less those that end
    read = np.zeros(len(events))  # prompt tokens less the start, of the rows that run
    for times, sign in ((starts, 1), (ends, -1)):
        positions = np.searchsorted(events, times)
        np.add.at(started, positions, sign)
        np.add.at(read, positions, sign * (share.prompts - starts))
    batch = started.cumsum()[:-1]
    context = read.cumsum()[:-1] / np.maximum(batch, 1) + middle
    busy = batch > 0
    each = decode_parts(model, cut, hw, batch=batch[busy], context=context[busy])
    seconds = total(each) * steps[busy]
    parts: Parts = {}
    for name, one_step in each.items():
        parts[name] = float(np.sum(one_step * steps[busy]))
    prompts = float(share.prompts.sum())
    middle_of_prompts = float(np.square(share.prompts.astype(np.float64)).sum()) / prompts / 2
    parts["prefill"] = float(prefill_seconds(model, prompts, middle_of_prompts, cut, hw))
    few = batch[busy] < _FEW * batch.max(initial=0)
    return GenerationEstimate(
        parts=parts,
        num_rows=len(share),
        longest=int(share.responses.max()),
        tail_seconds=float(seconds[few].sum()),
    )
