"""Who waits for whom in a dry run, and whether a circle is among it. Pure, integers only.

Per rank and lane, orders run one after the other. An order that several ranks run ends when all
of them have run it (a collective, or the two ends of an edge). A transfer is released when its
producer has replied; a call waits for the transfers that bring its rows. If orders can be put in
one row in which each comes after all that it waits for, nothing can wait in a circle.

The trace of a real script has its orders in one row already, as the controller numbers and sends
them one by one: for it, `check_order` holds by that construction and cannot fail, and
`check_waits` could only for a transfer that is released before its producer. They are there for
another source of sequences (what ranks have run, a controller that would reorder, a test).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmdflow.plan.record import COMPUTE, TRANSFER, Finding, Trace, consumer_of

Sequences = Mapping[tuple[int, str], Sequence[int]]
"""Places of orders by rank and lane, in the order in which the rank runs them."""


def sequences_of(trace: Trace) -> dict[tuple[int, str], list[int]]:
    """What each rank is told, in the order in which it is told."""
    found: dict[tuple[int, str], list[int]] = {}
    for order in trace.orders:
        for rank in order.commands:
            found.setdefault((rank, order.lane), []).append(order.place)
    return found


def check_order(trace: Trace, sequences: Sequences | None = None) -> list[Finding]:
    """Orders that ranks share run in the same order on all of them, each as often as it is given.

    sequences: what the ranks run; without it, what they are told, which is in one order by the
    controller's construction (one stream of orders): then this proves nothing new.
    """
    found = []
    for (rank, lane), places in (sequences or sequences_of(trace)).items():
        for before, after in zip(places, places[1:], strict=False):
            if before >= after:
                found.append(
                    Finding(
                        "order",
                        f"rank {rank}, {lane} lane: runs {trace.orders[before].name} before "
                        f"{trace.orders[after].name}, expected the order of their numbers, as on "
                        f"the other ranks; send commands in call order",
                    )
                )
    return found[:5]


def check_waits(trace: Trace, sequences: Sequences | None = None) -> list[Finding]:
    """No order waits, over others, for itself. Names the circle if there is one.

    sequences: as for `check_order`. Of what ranks are told, only a transfer of rows that a later
    call makes can close a circle.
    """
    waits = waits_of(trace, sequences or sequences_of(trace))
    circle = _circle(waits)
    if circle is None:
        return []
    steps = [
        f"{trace.orders[before].name} waits for {trace.orders[after].name} ({waits[before][after]})"
        for before, after in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    return [
        Finding(
            "waits",
            f"a circle: {'; '.join(steps)}; expected one order on every rank; send commands in "
            f"call order and release transfers after their producers",
        )
    ]


def waits_of(trace: Trace, sequences: Sequences) -> dict[int, dict[int, str]]:
    """Order -> the orders that it waits for, and why."""
    waits: dict[int, dict[int, str]] = {order.place: {} for order in trace.orders}
    for (rank, lane), places in sequences.items():
        for before, after in zip(places, places[1:], strict=False):
            waits[after].setdefault(before, f"{lane} lane of rank {rank}")
    numbers = {order.number: order.place for order in trace.orders if order.lane == COMPUTE}
    for order in trace.orders:
        if order.lane != TRANSFER:
            continue
        frame = next(iter(order.commands.values()))["frame"]
        if frame in numbers:
            waits[order.place].setdefault(numbers[frame], "its producer")
        consumer = consumer_of(trace, order)
        if consumer is not None:
            waits[consumer.place].setdefault(order.place, "rows that it reads")
    return waits


def _circle(waits: Mapping[int, Mapping[int, str]]) -> list[int] | None:
    """Orders of which each waits for the next, and the last for the first; None: there is none."""
    state: dict[int, int] = {}
    for start in waits:
        if start in state:
            continue
        path, stack = [], [(start, iter(waits[start]))]
        state[start] = 1
        path.append(start)
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                state[node] = 2
                stack.pop()
                path.pop()
            elif state.get(following) == 1:
                return path[path.index(following) :]
            elif following not in state:
                state[following] = 1
                path.append(following)
                stack.append((following, iter(waits[following])))
    return None
