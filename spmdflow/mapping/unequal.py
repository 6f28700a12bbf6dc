"""Seconds of calls whose rows differ in length, for one strategy.

A pass waits for its busiest data-parallel rank. `update_parts` gets the mean micro-batch of that
rank, with rows cut into micro-batches as the workers cut them (`data.micro.cut`), and with one copy
of a prompt that rows share where the workers compute one (`data.shared_prompt`). Ranks that gather
weights or reduce gradients in every micro-batch meet in each of them.

A replica decodes the rows with the longest prompts first, otherwise in their order, as many at once
as its KV cache holds at the mean length. A row that ends makes room for the next one; the built-in
generator waits until an eighth of its rows have ended. Between two such events the batch is
constant, and a step takes `decode_parts` of this batch and of its mean context. So the tail, in
which few long rows are left, takes as many steps as its longest row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.data.micro import cut as cut_rows
from spmdflow.data.shared_prompt import prefill_passes
from spmdflow.kind.generator import PREFILL_TOKENS
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
from spmdflow.mapping.shared_prompt import count_packed

_FEW = 0.25
"""Part of a replica's largest batch below which `GenerationEstimate.tail_seconds` counts."""


@dataclass(frozen=True)
class Rows:
    """Tokens of rows: prompts (n,) and responses (n,), int64."""

    prompts: np.ndarray
    responses: np.ndarray
    prompt_ids: np.ndarray | None = None
    """(n,) int64: rows with the same number have the same prompt. None: all prompts differ."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def keys(self) -> np.ndarray:
        """(n,) int64: the number of each row's prompt."""
        if self.prompt_ids is None:
            return np.arange(len(self))
        return self.prompt_ids

    def take(self, index: np.ndarray) -> Rows:
        """The rows at these positions, in this order."""
        return Rows(self.prompts[index], self.responses[index], self.keys[index])

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
    model: Model,
    steps: Sequence[SharedRows],
    cut: Strategy,
    hw: Hardware,
    *,
    trains: bool,
    num_forwards: int = 0,
) -> Parts:
    """Return the seconds of a training or forward call by cause, the sum over its steps.

    num_forwards: over the rows of each optimizer step, before it.
    """
    parts: Parts = {}
    for one in steps:
        micro = busiest_tokens(model, one)
        size = one.num_micro
        more = update_parts(model, micro, size, cut, hw, trains=trains, num_forwards=num_forwards)
        parts = add_parts(parts, more)
    return add_parts(parts, {"host": hw.call_seconds})


def tokens_of_update(model: Model, steps: Sequence[SharedRows]) -> float:
    """Return the tokens that all shares compute in an optimizer step: the mean of these steps."""
    tokens = 0.0
    for one in steps:
        for share in one.shares:
            tokens += float(_micro_costs(model, share, one.num_micro)[:, 0].sum())
    return tokens / len(steps)


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


def starts_of(lengths: np.ndarray, slots: int, joins_at: int = 1) -> np.ndarray:
    """Return (n,): the step in which each row starts, if `slots` rows run and they run in order.

    Row i runs for lengths[i] steps, at least 1. Rows start as soon as earlier ones have ended and
    `joins_at` slots are free, or all of them.
    """
    assert slots >= 1, slots
    starts = np.zeros(len(lengths), dtype=np.int64)
    ends: list[int] = []
    time = 0
    row = 0
    while row < len(lengths):
        while ends and (ends[0] <= time or len(ends) > slots - joins_at):
            time = max(time, heapq.heappop(ends))
        admitted = lengths[row : row + slots - len(ends)]
        starts[row : row + len(admitted)] = time
        for length in admitted.tolist():
            heapq.heappush(ends, time + length)
        row += len(admitted)
    return starts


def _micro_costs(model: Model, share: Rows, num_micro: int) -> np.ndarray:
    """Return (num_micro, 3): tokens, sum of squared row lengths, response tokens.

    A row counts as long as the longest of its micro-batch unless rows are packed. A prompt that
    packed rows share counts once if the engine computes it once.
    """
    by_tokens = model.engine.micro_batch_tokens is not None
    lengths = share.tokens
    costs = np.zeros((num_micro, 3))
    positions = cut_rows(lengths.tolist(), num_micro, by_tokens=by_tokens, packed=model.packs)
    for number, rows in enumerate(positions):
        if not rows:
            continue
        answered = share.responses[rows].sum()
        if model.shares_prompts:
            part = share.take(np.array(rows))
            packed = count_packed(part.keys.tolist(), part.prompts.tolist(), part.tokens.tolist())
            costs[number] = (packed.computed, packed.squares, answered)
            continue
        computed = lengths[rows].astype(np.float64)
        if not model.packs:
            computed[:] = computed.max()
        costs[number] = (computed.sum(), np.square(computed).sum(), answered)
    return costs


@dataclass(frozen=True)
class Admissions:
    """When the rows of a replica run, and which copies of prompts it runs for them.

    A copy belongs to the rows with this prompt that a generator which shares prompts admits
    together; otherwise to one row.
    """

    rows: Rows
    """In the order in which they start."""
    starts: np.ndarray
    """(n,): step in which each row starts."""
    copies: np.ndarray
    """(c,): tokens of each copy, in the order in which they are made."""
    copy_starts: np.ndarray
    copy_ends: np.ndarray
    """(c,): steps in which a copy is made, and in which the last of its rows has ended."""

    @property
    def ends(self) -> np.ndarray:
        """(n,): step in which each row has ended."""
        return self.starts + self.rows.responses

    def prefill_tokens(self) -> tuple[int, int]:
        """Return the tokens of all prefill passes of a generator that pads prompts, and their
        squares.

        The prompts of one admission run in passes of at most PREFILL_TOKENS, each prompt padded to
        the longest of its pass.
        """
        tokens = 0
        squares = 0
        for start in np.unique(self.copy_starts):
            sizes = self.copies[self.copy_starts == start].tolist()
            for part in prefill_passes(sizes, PREFILL_TOKENS):
                padded = sizes[part]
                tokens += len(padded) * max(padded)
                squares += len(padded) * max(padded) ** 2
        return tokens, squares


def admit_rows(model: Model, share: Rows, *, slots: int) -> Admissions:
    """Return when each row of a replica starts, and the copies of prompts that it makes.

    slots: rows that it decodes at once.
    """
    rollout = model.rollout
    assert rollout is not None, model.name
    rows = share.take(np.argsort(-share.prompts, kind="stable"))
    joins_at = 1
    if rollout.facts.refill:
        joins_at = -(-(rollout.max_batch_size or slots) // rollout.facts.refill)
    if rollout.facts.shares_prompts and not model.shape.is_dense_with_table:
        joins_at = slots  # transformers' own cache takes no further rows
    starts = starts_of(rows.responses, slots, joins_at)
    keys = rows.keys if rollout.facts.shares_prompts else np.arange(len(rows))
    _, first, copy_of = np.unique(
        np.stack([starts, keys], 1), axis=0, return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    ends = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(ends, copy_of.reshape(-1), starts + rows.responses)
    return Admissions(
        rows=rows,
        starts=starts,
        copies=rows.prompts[first[order]],
        copy_starts=starts[first[order]],
        copy_ends=ends[order],
    )


def _estimate_share(
    model: Model, share: Rows, cut: Strategy, hw: Hardware, *, slots: int
) -> GenerationEstimate:
    """Return the generation of one replica, without call_seconds.

    Between two events (a row starts or ends) the batch is constant. Its context is that in the
    middle between the events.
    """
    admitted = admit_rows(model, share, slots=slots)
    rows = admitted.rows
    events = np.unique(np.concatenate([admitted.starts, admitted.ends]))
    steps = np.diff(events)
    middle = (events[:-1] + events[1:]) / 2
    spans = (admitted.starts, admitted.ends)
    batch = _sums_between(events, *spans, np.ones(len(rows)))
    busy = batch > 0
    # tokens after the prompts of all running rows, of their prompts, of the copies of prompts
    own = batch * middle - _sums_between(events, *spans, admitted.starts)
    prompts = _sums_between(events, *spans, rows.prompts)
    context = (own + prompts)[busy] / batch[busy]
    read = None
    if model.caches_prompts_once:
        copies = _sums_between(events, admitted.copy_starts, admitted.copy_ends, admitted.copies)
        read = (own + copies)[busy] / batch[busy]
    each = decode_parts(model, cut, hw, batch=batch[busy], context=context, read=read)
    seconds = total(each) * steps[busy]
    parts: Parts = {}
    for name, one_step in each.items():
        parts[name] = float(np.sum(one_step * steps[busy]))
    parts["prefill"] = _prefill_of(model, admitted, cut, hw)
    few = batch[busy] < _FEW * batch.max(initial=0)
    return GenerationEstimate(
        parts=parts,
        num_rows=len(share),
        longest=int(share.responses.max()),
        tail_seconds=float(seconds[few].sum()),
    )


def _sums_between(
    events: np.ndarray, starts: np.ndarray, ends: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return (len(events) - 1,): the sum of the values that exist between each two events.

    starts, ends: events between which each value exists.
    """
    changes = np.zeros(len(events))
    np.add.at(changes, np.searchsorted(events, starts), values)
    np.add.at(changes, np.searchsorted(events, ends), -values)
    return changes.cumsum()[:-1]


def _prefill_of(model: Model, admitted: Admissions, cut: Strategy, hw: Hardware) -> float:
    """Return the seconds in which all copies of prompts are computed."""
    assert model.rollout is not None, model.name
    if model.rollout.facts.shares_prompts:
        tokens, squares = admitted.prefill_tokens()
    else:
        tokens = int(admitted.copies.sum())
        squares = int(np.square(admitted.copies).sum())
    return float(prefill_seconds(model, float(tokens), squares / tokens / 2, cut, hw))
