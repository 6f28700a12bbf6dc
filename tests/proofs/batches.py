"""Proof that the controller cuts updates into mini-batches correctly, on the record of a dry run.

It knows what each rank was sent, the batch that the script passed and the settings. It shares no
code with the controller's assignment of rows (`controller.assignment`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from spmdflow.data.row_id import Ids
from spmdflow.plan.record import Problem, Trace, name_of
from spmdflow.runtime.call import Call
from spmdflow.worker_api.register import method_spec

_SHOWN = 5
_NONE = np.zeros(0, dtype=np.int64)


def check_batches(trace: Trace) -> list[Problem]:
    """Problems with updates; an empty list proves that there are none.

    Updates use every row of the batch once in each epoch, in mini-batches of the set size, and
    every rank of a model runs the same number of forwards.

    A mini-batch may be smaller where an epoch ends, or where the next samples of one prompt, which
    stay together, would not fit; larger only for such samples alone.
    """
    texts = (
        f"{name_of(call)}: {text}"
        for call in trace.calls
        if len(call.row_ids) and _is_update(trace, call)
        for text in _wrong_update(trace, call, call.row_ids, call.parents)
    )
    return [Problem("batches", text) for text in islice(texts, _SHOWN)]


def _is_update(trace: Trace, call: Call) -> bool:
    """Whether a call is of a method that takes mini-batches."""
    if call.operation != "call" or call.model not in trace.models:
        return False
    return method_spec(trace.models[call.model].worker_class, call.method).minibatches


def _wrong_update(trace: Trace, call: Call, ids: Ids, parents: Ids) -> Iterator[str]:
    model = trace.models[call.model]
    firsts = []
    for rank in model.layout.ranks:
        coordinate = model.layout.coordinate(rank)
        if (coordinate.pp, coordinate.cp, coordinate.tp) == (0, 0, 0):
            firsts.append(rank)
    shares = []
    for rank in firsts:
        if rank in call.commands:
            shares.append(call.commands[rank])
    counts = {len(plain["mini"]) for plain in shares}
    forwards = set()
    for plain in call.commands.values():
        forwards.add(tuple(n for _, n in plain["mini"]))
    if len(counts) > 1 or len(forwards) > 1:
        yield (
            f"got {sorted(counts)} mini-batches with different numbers of forwards by rank, "
            f"expected the same on every rank; a rank would wait in a collective"
        )
        return
    batches = []
    for number in range(max(counts, default=0)):
        batches.append(np.concatenate([plain["ids"][plain["mini"][number][0]] for plain in shares]))
    update = model.cfg.update
    times = _times(ids, batches)
    if (times != update.num_epochs).any():
        yield (
            f"got rows used {np.unique(times).tolist()} times, expected {update.num_epochs} "
            f"(update.num_epochs) each; report this plan"
        )
    group = dict(zip(ids.tolist(), parents.tolist(), strict=True))
    groups = []
    for rows in batches:
        groups.append(np.array([group.get(row, -1) for row in rows.tolist()]))
    for text in _wrong_sizes(batches, groups, len(ids), update.mini_batch_size):
        yield f"{text}; report this plan"


def _times(ids: Ids, batches: Sequence[Ids]) -> np.ndarray:
    """How often each row is used; 0 also for a row that is used but not in the batch."""
    used = np.concatenate([_NONE, *batches])
    rows, counts = np.unique(np.concatenate([ids, used]), return_counts=True)
    return np.where(np.isin(rows, ids), counts - 1, 0)


def _wrong_sizes(
    batches: Sequence[Ids], groups: Sequence[np.ndarray], num_rows: int, size: int
) -> Iterator[str]:
    """What is wrong with single mini-batches and neighbours; groups: each row's prompt."""
    filled = 0
    seen = set[int]()
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
            filled = 0
            seen = set[int]()
