"""When tasks run that wait for one another and share the processors of their machines.

Every rank of a running task is busy. Where more ranks of a machine are busy than it has cores, they
share these evenly: the tasks go on at cores / busy of their speed, a task on several machines at
that of the slowest. A device of its own for every rank is `cores=inf`. Knows no model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Work of some ranks."""

    seconds: float
    """If every rank has a core."""
    ranks: tuple[int, ...]
    after: tuple[tuple[int, float], ...] = ()
    """(earlier task, seconds from its end until this one may begin)."""
    earliest: float = 0.0


@dataclass
class _Running:
    machines: Counter[int]
    """Machine -> ranks of the task on it."""
    left: float
    """Seconds of work when the speed was last set."""
    since: float
    end: float
    speed: float = 1.0

    def go_at(self, speed: float, now: float) -> None:
        """From now on; an unchanged speed changes nothing, not even by rounding."""
        if speed != self.speed:
            self.left -= (now - self.since) * self.speed
            self.since, self.speed = now, speed
            self.end = now + self.left / speed


def timeline(
    tasks: Sequence[Task], *, node_size: float = math.inf, cores: float = math.inf
) -> list[tuple[float, float]]:
    """Start and end of every task, in their order, each as early as it may.

    node_size: ranks of a machine, in the order of their numbers; cores: of a machine.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    running: dict[int, _Running] = {}
    waiting = list(range(len(tasks)))
    now = 0.0
    while waiting or running:
        begin = {place: _ready(tasks[place], ends) for place in waiting}
        for place in (place for place, time in begin.items() if time <= now):
            task, starts[place] = tasks[place], begin[place]
            machines = Counter(int(rank // node_size) for rank in task.ranks)
            running[place] = _Running(machines, task.seconds, now, now + task.seconds)
        waiting = [place for place in waiting if place not in starts]
        _share(running, now, cores)
        now = min(_events(running, [begin[place] for place in waiting]))
        for place in [place for place, task in running.items() if task.end <= now]:
            ends[place] = running.pop(place).end
    return [(starts[place], ends[place]) for place in range(len(tasks))]


def _ready(task: Task, ends: dict[int, float]) -> float:
    """inf: an earlier task has not ended."""
    return max([task.earliest, *(ends.get(place, math.inf) + wait for place, wait in task.after)])


def _share(running: dict[int, _Running], now: float, cores: float) -> None:
    busy: Counter[int] = Counter()
    for task in running.values():
        busy.update(task.machines)
    for task in running.values():
        task.go_at(min([1.0, *(cores / busy[machine] for machine in task.machines)]), now)


def _events(running: dict[int, _Running], begins: list[float]) -> Iterator[float]:
    yield from (task.end for task in running.values())
    yield from (time for time in begins if time < math.inf)
