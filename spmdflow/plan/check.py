"""Proofs on the record of a dry run: members and groups, batch algebra, weights. Pure functions.

They know what each rank was told, the batch that the script gave and the settings, and share no
step with the controller's own cutting (`controller.assignment`) or the planner of weights. Each
returns what is wrong, at most a few problems of a kind; nothing: proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import FALSE, MISSING, STRANGE, THERE, TWICE, Boxes, find_cover_error
from spmdflow.data.row_id import Ids
from spmdflow.hybrid_engine.reshard import BoxesByRank, Copies
from spmdflow.plan.record import Problem, Trace, TracedOrder
from spmdflow.plan.rows import shown

_SHOWN = 5
_NONE = np.zeros(0, dtype=np.int64)


def check_members(trace: Trace) -> list[Problem]:
    """Every rank of a model runs its calls; every rank of the world makes every group, alike;
    every group that a model needs, or that a call reduces over, is made before."""
    return [Problem("members", text) for text in islice(_wrong_members(trace), _SHOWN)]


def _wrong_members(trace: Trace) -> Iterator[str]:
    made: set[tuple[int, ...]] = set()
    for order in trace.orders:
        if order.operation == "groups":
            yield from _different_groups(order)
            made |= {tuple(spec[0]) for spec in order.command["specs"]}
        expected = _members(trace, order)
        missing = sorted(set(expected) - set(order.commands))
        strange = sorted(set(order.commands) - set(expected)) if expected else []
        for rank in missing[:1] or strange[:1]:
            yield (
                f"{order.name}: got {'no' if missing else 'a'} command for rank {rank}, expected "
                f"exactly the ranks {shown(expected)} of its group; the others would wait for ever"
            )
        for ranks in _groups_entered(trace, order):
            if len(ranks) > 1 and ranks not in made:
                yield (
                    f"{order.name}: uses the group of ranks {shown(ranks)}, which no order made "
                    f"before, expected it among needed_groups; add it there"
                )
                made.add(ranks)


def _different_groups(order: TracedOrder) -> Iterator[str]:
    first = order.commands[order.ranks[0]]["specs"]
    other = next((r for r, plain in order.commands.items() if plain["specs"] != first), None)
    if other is not None:
        yield (
            f"{order.name}: got other groups on rank {other} than on rank {order.ranks[0]}, "
            f"expected the same ones in the same order; a new_group that some ranks leave out "
            f"poisons the ones after it"
        )


def _members(trace: Trace, order: TracedOrder) -> tuple[int, ...]:
    """Ranks that must take part; empty: whoever is asked."""
    if order.operation == "groups":
        return trace.world
    if order.operation == "map":
        return tuple(order.command["ranks"])
    if order.operation not in ("call", "spawn"):
        return ()
    names = {p.get("group", p.get("name")) for p in order.commands.values()}
    if {p.get("method") for p in order.commands.values()} & {"send_weights", "receive_weights"}:
        names = next((set(pair) for pair in trace.links if names <= set(pair)), names)
    return tuple(sorted({r for name in names for r in trace.models[name].layout.ranks}))


def _groups_entered(trace: Trace, order: TracedOrder) -> list[tuple[int, ...]]:
    if order.operation == "spawn":
        model = trace.models[order.command["name"]]
        return list(model.worker_class.needed_groups(model.cfg, model.layout))
    return [tuple(order.command["ranks"])] if order.operation == "map" else []


def check_batches(trace: Trace) -> list[Problem]:
    """Updates use every row of the batch once in each epoch, in mini-batches of the set size, and
    every rank of a model counts the same forwards.

    A mini-batch may be smaller where an epoch ends, or where the next samples of one prompt, which
    stay together, would not fit; larger only for such samples alone.
    """
    updates = (order for order in trace.orders if order.place in trace.batches)
    found = (
        f"{order.name}: {text}"
        for order in updates
        for text in _wrong_update(trace, order, *trace.batches[order.place])
    )
    return [Problem("batches", text) for text in islice(found, _SHOWN)]


def _wrong_update(trace: Trace, order: TracedOrder, ids: Ids, parents: Ids) -> Iterator[str]:
    model = trace.models[order.model]
    firsts = [rank for rank in model.layout.ranks if model.layout.coordinate(rank)[::2] == (0, 0)]
    shares = [order.commands[rank] for rank in firsts if rank in order.commands]
    counts = {len(plain["mini"]) for plain in shares}
    forwards = {tuple(n for _, n in plain["mini"]) for plain in order.commands.values()}
    if len(counts) > 1 or len(forwards) > 1:
        yield (
            f"got {sorted(counts)} mini-batches with different numbers of forwards by rank, "
            f"expected the same on every rank; a rank would wait in a collective"
        )
        return
    batches = [
        np.concatenate([plain["ids"][plain["mini"][number][0]] for plain in shares])
        for number in range(max(counts, default=0))
    ]
    update = model.cfg.update
    times = _times(ids, batches)
    if (times != update.num_epochs).any():
        yield (
            f"got rows used {np.unique(times).tolist()} times, expected {update.num_epochs} "
            f"(update.num_epochs) each; report this plan"
        )
    group = dict(zip(ids.tolist(), parents.tolist(), strict=True))
    groups = [np.array([group.get(row, -1) for row in rows.tolist()]) for rows in batches]
    for text in _wrong_sizes(batches, groups, len(ids), update.mini_batch_size):
        yield f"{text}; report this plan"


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


def check_weights(copies: Copies, *, way: str) -> list[Problem]:
    """What a rank needs of each tensor is what it has and keeps, and what it receives, once.

    Also: a source has what it sends, and nothing is sent that is there or not needed. way: how
    messages name it, such as "actor to generator".
    """
    found = islice(_wrong_boxes(copies), _SHOWN)
    return [Problem("weights", f"{way}: {text}; derive the plan again") for text in found]


def _wrong_boxes(copies: Copies) -> Iterator[str]:
    have, need = copies.have, copies.need
    arriving: dict[tuple[int, str], list[tuple[int, Box]]] = {}
    for message in (m for bucket in copies.plan.buckets for m in bucket.messages):
        for part in message.parts:
            if _lacks(_boxes_of(have, message.source, part.name), part.box):
                yield (
                    f"edge {message.source} -> {message.destinations[0]}: got {part.box.bounds} of "
                    f"{part.name}, which the source does not have, expected a source that has it"
                )
            for rank in message.destinations:
                arriving.setdefault((rank, part.name), []).append((message.source, part.box))
    kept: dict[tuple[int, str], list[Box]] = {}
    for rank, parts in copies.plan.kept.items():
        for part in parts:
            kept.setdefault((rank, part.name), []).append(part.box)
    named = [(rank, name) for rank in sorted(need) for name in need[rank]]
    for rank, name in [*named, *sorted({*arriving, *kept} - set(named))]:
        comes = arriving.get((rank, name), [])
        error = find_cover_error(
            _boxes_of(need, rank, name),
            _boxes_of(have, rank, name),
            tuple(kept.get((rank, name), ())),
            tuple(box for _, box in comes),
        )
        if error is not None:
            yield _cover_text(*error, rank, name, comes, have)


def _cover_text(
    what: str,
    box: Box,
    rank: int,
    name: str,
    comes: Sequence[tuple[int, Box]],
    have: BoxesByRank,
) -> str:
    """What is wrong with one tensor on one rank; names the edge, or all that could be meant."""
    where = f"{box.bounds} of {name}"
    if what == MISSING:
        others = {r: _boxes_of(have, r, name) for r in sorted(have) if r != rank}
        whole = [other for other, held in others.items() if not _lacks(held, box)]
        some = [other for other, held in others.items() if any(map(box.intersect, held))]
        either = " or ".join(map(str, whole or some)) or "?"
        return f"edge {either} -> {rank}: got no {where}, expected it before the generation"
    if what == FALSE:
        return f"rank {rank}: keeps {where}, expected a box that it has and needs"
    senders = [source for source, other in comes if other.intersect(box)]
    said = {
        TWICE: "twice, expected each element once",
        THERE: "which is there already, expected only what is missing",
        STRANGE: "which is not needed there, expected only what is needed",
    }[what]
    return f"edge {senders[-1]} -> {rank}: got {where} {said}"


def _boxes_of(boxes: BoxesByRank, rank: int, name: str) -> Boxes:
    return tuple(boxes.get(rank, {}).get(name, ()))


@lru_cache(maxsize=4096)
def _lacks(held: Boxes, box: Box) -> bool:
    return bool(subtract_all([box], held))
