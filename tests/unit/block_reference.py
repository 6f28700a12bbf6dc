"""Redistribution written out element by element: slow, obvious, independent of the planners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from spmdflow.blocks.box import Box
from spmdflow.blocks.rows import RowEdge
from spmdflow.parallel.layout import Layout, divisors
from spmdflow.transfer.protocol import BUILT_IN, protocol

NodeOf = Callable[[int], int]
Sets = Mapping[int, frozenset[int]]
Arrays = dict[int, np.ndarray]
Moves = dict[tuple[int, int], int]
"""(destination, id) -> source."""


def reference_moves(have: Sets, need: Sets, node_of: NodeOf | None = None) -> Moves:
    """The source of every lacking element, by the rules of the planners' docstrings."""
    classes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for destination in sorted(need):
        for item in sorted(need[destination] - have.get(destination, frozenset())):
            holders = [rank for rank in sorted(have) if item in have[rank]]
            near = [
                r for r in holders if node_of is not None and node_of(r) == node_of(destination)
            ]
            classes.setdefault(tuple(near or holders), []).append((destination, item))
    loads = dict.fromkeys(have, 0)
    moves: Moves = {}
    for senders in sorted(classes, key=lambda senders: (len(senders), senders)):
        quota = dict.fromkeys(senders, 0)
        for _ in classes[senders]:
            poorest = min(senders, key=lambda rank: (loads[rank], rank))
            loads[poorest] += 1
            quota[poorest] += 1
        turns = [rank for rank in senders for _ in range(quota[rank])]
        moves.update(zip(classes[senders], turns, strict=True))
    return moves


def moves_of(edges: Sequence[RowEdge]) -> Moves:
    """(destination, id) -> source of a plan; fails on an element that is sent twice."""
    listed = [((e.destination, item), e.source) for e in edges for item in e.ids.tolist()]
    assert len(dict(listed)) == len(listed), "an element is sent twice"
    return dict(listed)


def arrays(sets: Mapping[int, Sequence[int] | frozenset[int]]) -> Arrays:
    """The same as int64 arrays."""
    return {rank: np.array(list(items), dtype=np.int64) for rank, items in sets.items()}


def sets(lists: Mapping[int, Sequence[int]]) -> dict[int, frozenset[int]]:
    """The same as sets."""
    return {rank: frozenset(items) for rank, items in lists.items()}


def elements(boxes: Sequence[Box]) -> frozenset[tuple[int, ...]]:
    """Indices of every element of some boxes."""
    return frozenset(
        index for box in boxes for index in product(*(range(low, high) for low, high in box.bounds))
    )


def layouts(size: int, first: int = 0) -> Iterator[Layout]:
    """Every layout of ranks first .. first + size - 1, with every generation layout."""
    ranks = tuple(range(first, first + size))
    for pp_size in divisors(size):
        for tp_size in divisors(size // pp_size):
            for gen_pp_size, gen_tp_size in product(divisors(pp_size), divisors(tp_size)):
                yield Layout(
                    ranks,
                    pp_size=pp_size,
                    dp_size=size // pp_size // tp_size,
                    tp_size=tp_size,
                    gen_tp_size=gen_tp_size,
                    gen_pp_size=gen_pp_size,
                )


def distinct_rows(which: str, size: int, first: int, num_rows: int) -> list[dict[int, list[int]]]:
    """What `distribute` or `holds` gives: every protocol on every layout, repeats left out."""
    found = {}
    for layout in layouts(size, first):
        for name in (rules.name for rules in BUILT_IN):
            if name == "ALL_TO_ALL" and num_rows != size:
                continue  # a list with one entry for each rank, by definition
            rows = getattr(protocol(name), which)(layout, num_rows)
            found[tuple((rank, tuple(rows[rank])) for rank in rows)] = rows
    return list(found.values())
