"""Proof of the batch algebra of a dry run: how updates cut rows. Pure functions, integers only.

It knows the batch that the script gave, the settings and what each rank was told, and shares no
step with the controller's own cutting (`controller.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from spmdflow.data.row_id import Ids
from spmdflow.plan.record import Finding, Trace, TracedOrder

_SHOWN = 5
_NONE = np.zeros(0, dtype=np.int64)


def check_batches(trace: Trace) -> list[Finding]:
    """Updates use every row of the batch once in each epoch, in mini-batches of the set size, and
    every rank of a model counts the same forwards.

    A mini-batch may be smaller where an epoch ends, or where the next samples of one prompt, which
    stay together, would not fit; larger only for such samples alone.
    """
    found: list[Finding] = []
    for order in trace.orders:
        if order.place in trace.batches:
            found += _check_update(trace, order, *trace.batches[order.place])
    return found[:_SHOWN]


def _check_update(trace: Trace, order: TracedOrder, ids: Ids, parents: Ids) -> Iterator[Finding]:
    model = trace.models[order.label.partition(".")[0]]
    firsts = [rank for rank in model.layout.ranks if model.layout.coordinate(rank)[::2] == (0, 0)]
    shares = [order.commands[rank] for rank in firsts if rank in order.commands]
    counts = {len(plain["mini"]) for plain in shares}
    forwards = {tuple(n for _, n in plain["mini"]) for plain in order.commands.values()}
    if len(counts) > 1 or len(forwards) > 1:
        yield Finding(
            "batches",
            f"{order.name}: got {sorted(counts)} mini-batches with different numbers of forwards "
            f"by rank, expected the same on every rank; a rank would wait in a collective",
        )
        return
    batches = [
        np.concatenate([plain["ids"][plain["mini"][number][0]] for plain in shares])
        for number in range(max(counts, default=0))
    ]
    update = model.cfg.update
    times = _times(ids, batches)
    if (times != update.num_epochs).any():
        yield Finding(
            "batches",
            f"{order.name}: got rows used {np.unique(times).tolist()} times, expected "
            f"{update.num_epochs} (update.num_epochs) each; report this plan",
        )
    group = dict(zip(ids.tolist(), parents.tolist(), strict=True))
    groups = [np.array([group.get(row, -1) for row in rows.tolist()]) for rows in batches]
    for text in _wrong_sizes(batches, groups, len(ids), update.mini_batch_size):
        yield Finding("batches", f"{order.name}: {text}; report this plan")


def _times(ids: Ids, batches: Sequence[Ids]) -> np.ndarray:
    """How often each row is used; 0 for a row that is none of the batch, too."""
    used = np.concatenate([_NONE, *batches])
    rows, counts = np.unique(np.concatenate([ids, used]), return_counts=True)
    return np.where(np.isin(rows, ids), counts - 1, 0)


def _wrong_sizes(
    batches: Sequence[Ids], groups: Sequence[np.ndarray], num_rows: int, size: int
) -> Iterator[str]:
    """What is wrong with single mini-batches and neighbours; groups: each row's prompt."""
    filled, seen = 0, set[int]()
    for number, rows in enumerate(batches):
        here, counts = np.unique(groups[number], return_counts=True)
        repeated = len(rows) - len(np.unique(rows))
        if repeated or (len(rows) > size and len(here) > 1):
            yield (
                f"got mini-batch {number + 1} of {len(rows)} rows, {repeated} of them twice, "
                f"expected at most {size} (update.mini_batch_size), each once"
            )
        if seen & set(here.tolist()):
            yield (
                f"got samples of one prompt in mini-batch {number + 1} and before in its epoch, "
                f"expected all of them in one"
            )
        before = len(batches[number - 1])
        if filled and before + counts.max(initial=0) <= size:
            yield (
                f"got mini-batch {number} of {before} rows before one of {len(rows)}, expected "
                f"{size} (update.mini_batch_size) in each but the last of an epoch"
            )
        filled += len(rows)
        seen |= set(here.tolist())
        if filled >= num_rows:
            filled, seen = 0, set[int]()
