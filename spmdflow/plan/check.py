"""Proofs on the record of a dry run: members and groups, batch algebra, weights. Pure functions.

They know what each rank was told, the batch that the script gave and the settings, and share no
step with the controller's own assignment of rows (`controller.assignment`) or the planner of
weights. Each returns what is wrong, at most a few problems of a kind; an empty list is a proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import prod

import numpy as np

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import (
    ALREADY_HELD,
    MISSING,
    NOT_NEEDED,
    SENT_TWICE,
    WRONGLY_RETAINED,
    Boxes,
    find_cover_error,
)
from spmdflow.data.row_id import Ids
from spmdflow.hybrid_engine.bucket import Moves
from spmdflow.hybrid_engine.reshard import BoxesByRank, Copies, Shards
from spmdflow.plan.record import Problem, Trace, TracedOrder
from spmdflow.plan.rows import shorten_numbers

_SHOWN = 5
_MOST_CELLS = 1 << 28
"""Cells times ranks that are counted at once, in two bytes each."""
_NONE = np.zeros(0, dtype=np.int64)


def check_members(trace: Trace) -> list[Problem]:
    """Every rank of a model runs its calls; all ranks of the world make the same groups in the
    same order; every group that a model needs or that a map function reduces over (with gloo) is
    made before it is used."""
    members = []
    for text in islice(_wrong_members(trace), _SHOWN):
        members.append(Problem("members", text))
    return members


def _wrong_members(trace: Trace) -> Iterator[str]:
    made: set[tuple[tuple[int, ...], str]] = set()
    for order in trace.orders:
        if order.operation == "groups":
            yield from _different_groups(order)
            made |= {(tuple(s[0]), each) for s in order.command["specs"] for each in ("", s[2])}
        expected = _members(trace, order)
        missing = sorted(set(expected) - set(order.commands))
        strange = sorted(set(order.commands) - set(expected)) if expected else []
        for rank in missing[:1] or strange[:1]:
            yield (
                f"{order.name}: got {'no' if missing else 'a'} command for rank {rank}, expected "
                f"exactly the ranks {shorten_numbers(expected)} of its group; the others would "
                f"wait for ever"
            )
        for name, ranks, backend in _groups_entered(trace, order):
            if len(ranks) > 1 and (ranks, backend) not in made:
                yield (
                    f"{order.name}: uses the {f'{backend} group'.strip()} of ranks "
                    f"{shorten_numbers(ranks)}, which no order made before, expected it among "
                    f"{name}; add it there"
                )
                made.add((ranks, backend))


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
    """Ranks that must take part; empty: any ranks may."""
    if order.operation == "groups":
        return trace.world
    if order.operation == "map":
        return tuple(order.command["ranks"])
    if order.operation not in ("call", "spawn"):
        return ()
    names = set()
    for p in order.commands.values():
        names.add(p.get("group", p.get("name")))
    if {p.get("method") for p in order.commands.values()} & {"send_weights", "receive_weights"}:
        names = next((set(pair) for pair in trace.links if names <= set(pair)), names)
    return tuple(sorted({r for name in names for r in trace.models[name].layout.ranks}))


def _groups_entered(trace: Trace, order: TracedOrder) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(method of the worker that should name it, ranks, backend; "": any) of each group."""
    if order.operation == "spawn":
        model = trace.models[order.command["name"]]
        about = model.cfg, model.layout
        for ranks in model.worker_class.needed_groups(*about):
            yield "needed_groups", ranks, ""
        for ranks in model.worker_class.host_groups(*about):
            yield "host_groups", ranks, "gloo"
    elif order.operation == "map":
        yield "host_groups", tuple(order.command["ranks"]), "gloo"


def check_batches(trace: Trace) -> list[Problem]:
    """Updates use every row of the batch once in each epoch, in mini-batches of the set size, and
    every rank of a model runs the same number of forwards.

    A mini-batch may be smaller where an epoch ends, or where the next samples of one prompt, which
    stay together, would not fit; larger only for such samples alone.
    """
    updates = (order for order in trace.orders if order.place in trace.batches)
    found = (
        f"{order.name}: {text}"
        for order in updates
        for text in _wrong_update(trace, order, *trace.batches[order.place])
    )
    batches = []
    for text in islice(found, _SHOWN):
        batches.append(Problem("batches", text))
    return batches


def _wrong_update(trace: Trace, order: TracedOrder, ids: Ids, parents: Ids) -> Iterator[str]:
    model = trace.models[order.model]
    firsts = []
    for rank in model.layout.ranks:
        if model.layout.coordinate(rank)[::2] == (0, 0):
            firsts.append(rank)
    shares = []
    for rank in firsts:
        if rank in order.commands:
            shares.append(order.commands[rank])
    counts = {len(plain["mini"]) for plain in shares}
    forwards = set()
    for plain in order.commands.values():
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


def check_weights(copies: Copies, *, way: str) -> list[Problem]:
    """What a rank needs of each tensor is what it has and keeps, and what it receives, once.

    Also: a source has what it sends, and nothing is sent that is there or not needed. way: how
    messages name it, such as "actor to generator".
    """
    found = islice(_wrong_boxes(copies), _SHOWN)
    weights = []
    for text in found:
        weights.append(Problem("weights", f"{way}: {text}; derive the plan again"))
    return weights


def _wrong_boxes(copies: Copies) -> Iterator[str]:
    """Tensors that ranks have and need alike, and that are sent alike, are proved once."""
    rounds: dict[str, list[tuple[bool, Moves]]] = {}
    for bucket in copies.plan.buckets:
        for name, moves in bucket.moves:
            rounds.setdefault(name, []).append((bucket.relayed, moves))
    kept = dict(copies.plan.local)
    sides = [_tables(copies.have), _tables(copies.need)]
    proved: set[tuple[object, ...]] = set()
    for name in dict.fromkeys([*(n for table, _ in sides[1] for n in table), *rounds, *kept]):
        sent = rounds.get(name, [])
        stays = kept.get(name, {})
        rows = []
        for side in sides:
            rows.append(tuple(tuple(table.get(name, ())) for table, _ in side))
        key = (*rows, *((relayed, id(moves)) for relayed, moves in sent), id(stays))
        if key not in proved:
            proved.add(key)
            yield from _wrong_tensor(
                name, _by_rank(sides[0], name), _by_rank(sides[1], name), sent, stays
            )


Tables = list[tuple[Mapping[str, Sequence[Box]], list[int]]]
"""(boxes by tensor, ranks with exactly these boxes)"""


def _tables(side: BoxesByRank) -> Tables:
    found: dict[int, tuple[Mapping[str, Sequence[Box]], list[int]]] = {}
    for rank in sorted(side):
        found.setdefault(id(side[rank]), (side[rank], []))[1].append(rank)
    return list(found.values())


def _by_rank(side: Tables, name: str) -> dict[int, Boxes]:
    result = {}
    for table, ranks in side:
        for rank in ranks:
            result[rank] = tuple(table.get(name, ()))
    return result


class _Grid:
    """Counts by cell and rank; all boxes are made of whole cells."""

    def __init__(self, boxes: Iterable[Box], ranks: Iterable[int]) -> None:
        self.ranks = sorted(set(ranks))
        self._place = {rank: place for place, rank in enumerate(self.ranks)}
        bounds = zip(*(box.bounds for box in set(boxes)), strict=True)
        cuts = []
        for dim in bounds:
            cuts.append(sorted({end for pair in dim for end in pair}))
        self._at = [{cut: place for place, cut in enumerate(dim)} for dim in cuts]
        self.shape = (*(len(dim) - 1 for dim in cuts), len(self.ranks))

    def zeros(self) -> np.ndarray:
        """(cells of each dimension, ranks)."""
        return np.zeros(self.shape, dtype=np.int16)

    def at(self, box: Box, ranks: Iterable[int]) -> tuple[slice | list[int], ...]:
        """Index of a box on some ranks."""
        cells = (slice(at[start], at[stop]) for at, (start, stop) in zip(self._at, box.bounds))
        return (*cells, [self._place[rank] for rank in ranks])

    def of(self, boxes: Mapping[int, Sequence[Box]]) -> np.ndarray:
        """How often each rank's boxes have each cell."""
        found = self.zeros()
        ranks_of = dict[Box, list[int]]()
        for rank, box in ((rank, box) for rank, some in boxes.items() for box in some):
            if rank in ranks_of.setdefault(box, []):
                found[self.at(box, [rank])] += 1
            else:
                ranks_of[box].append(rank)
        for box, ranks in ranks_of.items():
            found[self.at(box, ranks)] += 1
        return found


def _wrong_tensor(
    name: str,
    have: Mapping[int, Boxes],
    need: Mapping[int, Boxes],
    rounds: Sequence[tuple[bool, Moves]],
    kept: Mapping[int, Boxes],
) -> Iterator[str]:
    sent = []
    for _, moves in rounds:
        for move in moves:
            sent.append(move)
    boxes = []
    for side in (have, need, kept):
        for some in side.values():
            for box in some:
                boxes.append(box)
    ranks = {rank for move in sent for rank in (move.source, *move.destinations)}
    grid = _Grid([*boxes, *(move.box for move in sent)], {*have, *need, *kept, *ranks})
    if prod(grid.shape) > _MOST_CELLS:
        yield f"{name}: got {grid.shape} cells and ranks, expected fewer to prove; not proved"
        return
    held = grid.of(have) > 0
    needed = grid.of(need) > 0
    arrived = grid.zeros()
    passed = grid.zeros()
    for relayed, moves in rounds:
        there, comes = (arrived > 0, passed) if relayed else (held, arrived)
        for move in moves:
            if not there[grid.at(move.box, [move.source])].all():
                yield (
                    f"edge {move.source} -> {move.destinations[0]}: got {move.box.bounds} of "
                    f"{name}, which the source does not have, expected a source that has it"
                )
            comes[grid.at(move.box, move.destinations)] += 1
    wrong = (arrived + passed != (needed & ~held)) | (grid.of(kept) != (needed & held))
    for place in np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1)))).tolist():
        rank = grid.ranks[place]
        comes_here = []
        for move in sent:
            if rank in move.destinations:
                comes_here.append((move.source, move.box))
        arriving = tuple(box for _, box in comes_here)
        mine = (side.get(rank, ()) for side in (need, have, kept))
        error = find_cover_error(*mine, arriving)
        if error is not None:
            yield _cover_text(*error, rank, name, comes_here, have)


def _cover_text(
    what: str,
    box: Box,
    rank: int,
    name: str,
    comes: Sequence[tuple[int, Box]],
    have: Mapping[int, Boxes],
) -> str:
    """What is wrong with one tensor on one rank; names the edge, or all candidates."""
    where = f"{box.bounds} of {name}"
    if what == MISSING:
        others = {}
        for r in sorted(have):
            if r != rank:
                others[r] = have[r]
        whole = []
        for peer, held in others.items():
            if not subtract_all([box], held):
                whole.append(peer)
        some = []
        for peer, held in others.items():
            if any(map(box.intersect, held)):
                some.append(peer)
        either = " or ".join(map(str, whole or some)) or "?"
        return f"edge {either} -> {rank}: got no {where}, expected it before the generation"
    if what == WRONGLY_RETAINED:
        return f"rank {rank}: keeps {where}, expected a box that it has and needs"
    senders = []
    for source, other in comes:
        if other.intersect(box):
            senders.append(source)
    said = {
        SENT_TWICE: "twice, expected each element once",
        ALREADY_HELD: "which is there already, expected only what is missing",
        NOT_NEEDED: "which is not needed there, expected only what is needed",
    }[what]
    return f"edge {senders[-1]} -> {rank}: got {where} {said}"


def check_shards(shards: Shards, *, way: str) -> list[Problem]:
    """Rows of training weights that the members of a group send one another (blocks, flat).

    Every rank is in one group; the rows of a group hold what each of its ranks needs, and nothing
    else.
    """
    found = islice(_wrong_rows(shards), _SHOWN)
    result = []
    for text in found:
        result.append(Problem("weights", f"{way}: {text}; report this plan"))
    return result


def _wrong_rows(shards: Shards) -> Iterator[str]:
    members = sorted(rank for group in shards.groups for rank in group)
    if members != sorted(shards.need):
        yield f"got groups of ranks {members}, expected {sorted(shards.need)}, each once"
        return
    proved: set[tuple[int, ...]] = set()
    for group in shards.groups:
        sides = []
        for side in (shards.have, shards.need):
            sides.append([side[rank] for rank in group])
        key = tuple(id(table) for side in sides for table in side)
        if key in proved:
            continue
        proved.add(key)
        rows, needs = sides
        for name in dict.fromkeys(name for table in [*rows, *needs] for name in table):
            everything = tuple(box for table in rows for box in table.get(name, ()))
            for rank, table in zip(group, needs, strict=True):
                wanted = tuple(table.get(name, ()))
                for what, box in _differences(wanted, everything):
                    yield f"rank {rank}: got {what} {box.bounds} of {name} from ranks {group}"


@lru_cache(maxsize=4096)
def _differences(wanted: Boxes, everything: Boxes) -> list[tuple[str, Box]]:
    missing = subtract_all(wanted, everything)
    strange = subtract_all(everything, wanted)
    found = [("no", box) for box in missing[:1]]
    return found + [("what it does not need,", box) for box in strange[:1]]
