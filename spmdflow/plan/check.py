"""Checks of a plan: members of groups, and weights box by box. Pure functions.

They read what each rank was sent and what each rank has and needs. They share no code with the
planner of weights. Each returns a few problems at most; an empty list means that nothing is wrong.
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
from spmdflow.hybrid_engine.bucket import Moves
from spmdflow.hybrid_engine.reshard import BoxesByRank, Copies, Shards
from spmdflow.plan.record import Problem, Trace, name_of
from spmdflow.runtime.call import Call

_SHOWN = 5
"""Most problems that a check reports."""
_MOST_CELLS = 1 << 28
"""Most cells times ranks that are counted at once, in two bytes each."""


def check_group_members(trace: Trace) -> list[Problem]:
    """Return at most five problems with groups that would make a rank wait for ever.

    Every rank of a model must run the model's calls. All ranks of the world must create the same
    process groups in the same order. A group that a model needs, or that a map function reduces
    over (with gloo), must be created before it is used.
    """
    problems = []
    for text in islice(_member_errors(trace), _SHOWN):
        problems.append(Problem("members", text))
    return problems


def _member_errors(trace: Trace) -> Iterator[str]:
    """Yield a message for each error of membership, in the order of the calls.

    The errors are: ranks that create different groups, a rank with a missing or surplus command,
    and the use of a group of several ranks that no earlier call created (once for each group).
    """
    created: set[tuple[tuple[int, ...], str]] = set()
    for call in trace.calls:
        if call.operation == "groups":
            yield from _differing_groups(call)
            for ranks, _, backend in call.command["specs"]:
                created.add((tuple(ranks), ""))
                created.add((tuple(ranks), backend))
        yield from _rank_errors(trace, call)
        for method, ranks, backend in _groups_entered(trace, call):
            if len(ranks) > 1 and (ranks, backend) not in created:
                group = f"{backend} group".strip()
                yield (
                    f"{name_of(call)}: uses the {group} of ranks {shorten_numbers(ranks)}, which "
                    f"does not exist yet; add these ranks to what {method} returns"
                )
                created.add((ranks, backend))


def _rank_errors(trace: Trace, call: Call) -> Iterator[str]:
    """Yield at most one message about the ranks that run a call.

    It names the lowest rank that should take part and has no command. If there is none, it names
    the lowest rank that has a command and should not take part. A call that any ranks may run has
    no error.
    """
    members = _members(trace, call)
    if not members:
        return
    missing = sorted(set(members) - set(call.commands))
    surplus = sorted(set(call.commands) - set(members))
    expected = f"expected exactly the ranks {shorten_numbers(members)} of its group"
    if missing:
        yield (
            f"{name_of(call)}: got no command for rank {missing[0]}, {expected}; the other ranks "
            f"would wait for ever"
        )
    elif surplus:
        yield (
            f"{name_of(call)}: got a command for rank {surplus[0]}, {expected}; this rank would "
            f"wait for ever"
        )


def _differing_groups(call: Call) -> Iterator[str]:
    """Yield at most one message: for a rank that creates other groups than the call's lowest rank.

    Another order of the same groups counts, too.
    call: creates process groups.
    """
    first = call.ranks[0]
    specs = call.commands[first]["specs"]
    for rank, command in call.commands.items():
        if command["specs"] != specs:
            yield (
                f"{name_of(call)}: got other groups on rank {rank} than on rank {first}, expected "
                f"the same ones in the same order; a new_group that some ranks skip breaks the "
                f"groups created after it"
            )
            return


def _members(trace: Trace, call: Call) -> tuple[int, ...]:
    """Return the ranks that must take part in a call, ascending; () if any ranks may.

    The creation of groups needs the whole world, a map function the ranks in its command, and a
    call or spawn all ranks of the model. send_weights and receive_weights need the ranks of both
    linked models.
    """
    if call.operation == "groups":
        return trace.world
    if call.operation == "map":
        return tuple(call.command["ranks"])
    if call.operation not in ("call", "spawn"):
        return ()
    models = set()
    methods = set()
    for command in call.commands.values():
        models.add(command.get("group", command.get("name")))
        methods.add(command.get("method"))
    if methods & {"send_weights", "receive_weights"}:
        for pair in trace.links:
            if models <= set(pair):
                models = set(pair)
                break
    ranks: set[int] = set()
    for name in models:
        ranks.update(trace.models[name].layout.ranks)
    return tuple(sorted(ranks))


def _groups_entered(trace: Trace, call: Call) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (worker method that should list it, ranks, backend) for each group that a call uses.

    A spawn uses the groups of needed_groups (backend "": any) and of host_groups (gloo) of its
    model. A map function uses the gloo group of its ranks. Other calls yield nothing.
    """
    if call.operation == "spawn":
        model = trace.models[call.command["name"]]
        for ranks in model.worker_class.needed_groups(model.cfg, model.layout):
            yield "needed_groups", ranks, ""
        for ranks in model.worker_class.host_groups(model.cfg, model.layout):
            yield "host_groups", ranks, "gloo"
    elif call.operation == "map":
        yield "host_groups", tuple(call.command["ranks"]), "gloo"


def check_weight_copies(copies: Copies, *, label: str) -> list[Problem]:
    """Return at most five problems with the boxes that ranks copy to one another.

    What a rank needs of each tensor must be exactly what it has and keeps, plus what it receives
    once. A source must have what it sends, and nothing is sent that is already there or not needed.
    label: how messages name these copies, such as "actor to generator".
    """
    problems = []
    for text in islice(_copy_errors(copies), _SHOWN):
        problems.append(Problem("weights", f"{label}: {text}; derive the plan again"))
    return problems


def _copy_errors(copies: Copies) -> Iterator[str]:
    """Yield a message for each wrong box of every tensor that is needed, sent or retained.

    Tensors with equal boxes on all ranks and the same moves are checked once.
    """
    rounds: dict[str, list[tuple[bool, Moves]]] = {}
    for bucket in copies.plan.buckets:
        for name, moves in bucket.moves:
            rounds.setdefault(name, []).append((bucket.relayed, moves))
    local = dict(copies.plan.local)
    have = _group_tables(copies.have)
    need = _group_tables(copies.need)
    names: dict[str, None] = {}
    for table, _ in need:
        names.update(dict.fromkeys(table))
    names.update(dict.fromkeys(rounds))
    names.update(dict.fromkeys(local))
    checked: set[tuple[object, ...]] = set()
    for name in names:
        sent = rounds.get(name, [])
        retained = local.get(name, {})
        key: list[object] = [id(retained)]
        for side in (have, need):
            key.append(tuple(tuple(table.get(name, ())) for table, _ in side))
        for relayed, moves in sent:
            key.append((relayed, id(moves)))
        if tuple(key) not in checked:
            checked.add(tuple(key))
            yield from _tensor_errors(
                name, _boxes_by_rank(have, name), _boxes_by_rank(need, name), sent, retained
            )


Tables = list[tuple[Mapping[str, Sequence[Box]], list[int]]]
"""(boxes by tensor, ranks with exactly these boxes)"""


def _group_tables(side: BoxesByRank) -> Tables:
    """Return (table, ranks that share it, ascending) for each distinct table, by its lowest rank.

    Two equal tables count as distinct if they are different objects.
    """
    tables: dict[int, tuple[Mapping[str, Sequence[Box]], list[int]]] = {}
    for rank in sorted(side):
        tables.setdefault(id(side[rank]), (side[rank], []))[1].append(rank)
    return list(tables.values())


def _boxes_by_rank(side: Tables, name: str) -> dict[int, Boxes]:
    """Return the boxes of tensor `name` on each rank; () on a rank whose table does not have it."""
    boxes = {}
    for table, ranks in side:
        for rank in ranks:
            boxes[rank] = tuple(table.get(name, ()))
    return boxes


class _Grid:
    """A tensor cut into cells so fine that every box is a union of whole cells."""

    def __init__(self, boxes: Iterable[Box], ranks: Iterable[int]) -> None:
        self.ranks = sorted(set(ranks))
        self._index_of_rank = {rank: index for index, rank in enumerate(self.ranks)}
        self._index_of_cut: list[dict[int, int]] = []
        """By dimension: the index of the cell that begins at a cut."""
        shape = []
        for bounds in zip(*(box.bounds for box in set(boxes)), strict=True):
            cuts = sorted({end for pair in bounds for end in pair})
            self._index_of_cut.append({cut: index for index, cut in enumerate(cuts)})
            shape.append(len(cuts) - 1)
        self.shape = (*shape, len(self.ranks))

    def zeros(self) -> np.ndarray:
        """(cells of each dimension, ranks)."""
        return np.zeros(self.shape, dtype=np.int16)

    def index(self, box: Box, ranks: Iterable[int]) -> tuple[slice | list[int], ...]:
        """Return the index of a box on some ranks, for an array as `zeros` returns it.

        It has a slice of whole cells for each dimension, and a list of positions on the rank axis.
        """
        cells = []
        for index_of_cut, (start, stop) in zip(self._index_of_cut, box.bounds, strict=True):
            cells.append(slice(index_of_cut[start], index_of_cut[stop]))
        return (*cells, [self._index_of_rank[rank] for rank in ranks])

    def count(self, boxes: Mapping[int, Sequence[Box]]) -> np.ndarray:
        """Return (cells of each dimension, ranks): how often each rank's boxes cover each cell.

        A box that a rank lists twice counts twice.
        """
        counts = self.zeros()
        ranks_of = dict[Box, list[int]]()
        for rank, own in boxes.items():
            for box in own:
                if rank in ranks_of.setdefault(box, []):
                    counts[self.index(box, [rank])] += 1
                else:
                    ranks_of[box].append(rank)
        for box, ranks in ranks_of.items():
            counts[self.index(box, ranks)] += 1
        return counts


def _tensor_errors(
    name: str,
    have: Mapping[int, Boxes],
    need: Mapping[int, Boxes],
    rounds: Sequence[tuple[bool, Moves]],
    retained: Mapping[int, Boxes],
) -> Iterator[str]:
    """Yield a message for each wrong box of one tensor.

    A source must have what it sends. A rank must receive, exactly once, what it needs and does not
    have, and must retain exactly what it needs and has. A tensor with more than 2^28 cells times
    ranks gets one message and is not checked.
    rounds: (whether relayed, moves) of each bucket. A relayed round sends on what arrived in the
    rounds before it.
    """
    boxes: list[Box] = []
    ranks = {*have, *need, *retained}
    for side in (have, need, retained):
        for own in side.values():
            boxes.extend(own)
    for _, moves in rounds:
        for move in moves:
            boxes.append(move.box)
            ranks.update((move.source, *move.destinations))
    grid = _Grid(boxes, ranks)
    if prod(grid.shape) > _MOST_CELLS:
        yield f"{name}: got {grid.shape} cells and ranks, too many to check; it was not checked"
        return
    present = grid.count(have) > 0
    needed = grid.count(need) > 0
    received = grid.zeros()
    relayed_on = grid.zeros()
    for relayed, moves in rounds:
        available = present
        counts = received
        if relayed:
            available = received > 0
            counts = relayed_on
        for move in moves:
            if not available[grid.index(move.box, [move.source])].all():
                yield (
                    f"edge {move.source} -> {move.destinations[0]}: got {move.box.bounds} of "
                    f"{name}, which the source does not have, expected a source that has it"
                )
            counts[grid.index(move.box, move.destinations)] += 1
    wrong = (received + relayed_on != (needed & ~present)) | (
        grid.count(retained) != (needed & present)
    )
    for index in np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1)))).tolist():
        rank = grid.ranks[index]
        arriving = _arriving(rank, rounds)
        error = find_cover_error(
            need.get(rank, ()),
            have.get(rank, ()),
            retained.get(rank, ()),
            tuple(box for _, box in arriving),
        )
        if error is not None:
            what, box = error
            yield _cover_text(what, box, rank, name, arriving, have)


def _arriving(rank: int, rounds: Sequence[tuple[bool, Moves]]) -> list[tuple[int, Box]]:
    """Return (source, box) of each move to a rank, in the order of the rounds."""
    arriving = []
    for _, moves in rounds:
        for move in moves:
            if rank in move.destinations:
                arriving.append((move.source, move.box))
    return arriving


def _cover_text(
    what: str,
    box: Box,
    rank: int,
    name: str,
    arriving: Sequence[tuple[int, Box]],
    have: Mapping[int, Boxes],
) -> str:
    """Return the message for a wrong box of one tensor on one rank.

    what: the error of `find_cover_error`. A missing box is reported with every rank that could send
    it ("?" if there is none), a box that should not have been sent with the last edge that sends
    it.
    """
    where = f"{box.bounds} of {name}"
    if what == MISSING:
        sources = " or ".join(map(str, _possible_sources(box, rank, have))) or "?"
        return f"edge {sources} -> {rank}: got no {where}, expected it before the generation"
    if what == WRONGLY_RETAINED:
        return f"rank {rank}: keeps {where}, expected a box that it has and needs"
    senders = []
    for source, other in arriving:
        if other.intersect(box):
            senders.append(source)
    text = {
        SENT_TWICE: "twice, expected each element once",
        ALREADY_HELD: "which is there already, expected only what is missing",
        NOT_NEEDED: "which is not needed there, expected only what is needed",
    }[what]
    return f"edge {senders[-1]} -> {rank}: got {where} {text}"


def _possible_sources(box: Box, rank: int, have: Mapping[int, Boxes]) -> list[int]:
    """Return the other ranks that have all of a box, ascending.

    If there are none, those that have a part of it; there may be none of these either.
    """
    with_all = []
    with_part = []
    for peer in sorted(have):
        if peer == rank:
            continue
        if not subtract_all([box], have[peer]):
            with_all.append(peer)
        if any(map(box.intersect, have[peer])):
            with_part.append(peer)
    return with_all or with_part


def check_weight_shards(shards: Shards, *, label: str) -> list[Problem]:
    """Return at most five problems with the training weights that a group's members exchange.

    This is the sync in modes blocks and flat. Every rank must be in exactly one group. The boxes of
    all members of a group together must be exactly what each member needs.
    label: how messages name this exchange.
    """
    problems = []
    for text in islice(_shard_errors(shards), _SHOWN):
        problems.append(Problem("weights", f"{label}: {text}; report this plan"))
    return problems


def _shard_errors(shards: Shards) -> Iterator[str]:
    """Yield a message for each box that a rank does not get, or gets without needing it.

    If the groups do not contain every rank exactly once, this is the only message. Groups with the
    same tables are checked once.
    """
    members = sorted(rank for group in shards.groups for rank in group)
    if members != sorted(shards.need):
        yield f"got groups of ranks {members}, expected {sorted(shards.need)}, each once"
        return
    checked: set[tuple[int, ...]] = set()
    for group in shards.groups:
        have = [shards.have[rank] for rank in group]
        need = [shards.need[rank] for rank in group]
        key = tuple(id(table) for table in (*have, *need))
        if key in checked:
            continue
        checked.add(key)
        for name in dict.fromkeys(name for table in (*have, *need) for name in table):
            gathered = tuple(box for table in have for box in table.get(name, ()))
            for rank, table in zip(group, need, strict=True):
                needed = tuple(table.get(name, ()))
                for what, box in _box_differences(needed, gathered):
                    yield f"rank {rank}: got {what} {box.bounds} of {name} from ranks {group}"


@lru_cache(maxsize=4096)
def _box_differences(needed: Boxes, gathered: Boxes) -> list[tuple[str, Box]]:
    """Return (words for the message, box) of the first missing and the first surplus part.

    The result is empty if `needed` and `gathered` cover the same elements.
    """
    differences = []
    for box in subtract_all(needed, gathered)[:1]:
        differences.append(("no", box))
    for box in subtract_all(gathered, needed)[:1]:
        differences.append(("what it does not need,", box))
    return differences


def shorten_numbers(numbers: Iterable[int]) -> str:
    """Format numbers as "[0, 1, 2]"; more than eight as "[0, 1, 2, 3, ... 15; 16]".

    The last number in the short form is how many there are.
    """
    values = [int(number) for number in numbers]
    if len(values) <= 8:
        return str(values)
    return f"[{', '.join(map(str, values[:4]))}, ... {values[-1]}; {len(values)}]"
