"""Who sends what several ranks hold: the same node first, then the least loaded. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NodeOf = Callable[[int], int]
"""Node of a rank."""


def candidates(holders: Sequence[int], destination: int, node_of: NodeOf | None) -> tuple[int, ...]:
    """Holders on the destination's node if there are any, else all; ascending."""
    if node_of is not None:
        node = node_of(destination)
        holders = [rank for rank in holders if node_of(rank) == node] or holders
    return tuple(sorted(holders))


def share_out(loads: Sequence[int], total: int) -> list[int]:
    """Parts of total, one for each load, that make loads + parts as level as can be.

    The least loaded are filled first, like water; what does not divide goes to the first of
    them. Receivers end within 1 of one another, and no lower load than theirs is passed over.
    """
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    filled, num_receivers = 0, 0
    for place in order:
        # what lifts the receivers so far to this load
        if num_receivers * loads[place] - filled > total:
            break
        filled += loads[place]
        num_receivers += 1
    base, extra = divmod(total + filled, num_receivers)
    parts = [0] * len(loads)
    for number, place in enumerate(sorted(order[:num_receivers])):
        parts[place] = base - loads[place] + (number < extra)
    return parts
