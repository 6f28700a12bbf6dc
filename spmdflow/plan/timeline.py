"""When tasks run that wait for one another and share the processors of their machines.

Every rank of a running task asks for a core, for the part of the time that it works. Where the
ranks of a machine ask for more cores than it has, they share them evenly: the tasks go on at
cores / asked of their speed, a task on several machines at that of the slowest. A device of its own
for every rank is `cores=inf`. Knows no model.
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
    busy: float = 1.0
    """Part of its time that a rank works; in the rest, such as a pipeline's bubble, it waits."""


@dataclass
class _Running:
    asked: dict[int, float]
    """Machine -> cores that the task's ranks on it ask for."""
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
            asked = {machine: count * task.busy for machine, count in machines.items()}
            running[place] = _Running(asked, task.seconds, now, now + task.seconds)
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
    asked: dict[int, float] = {}
    for task in running.values():
        for machine, number in task.asked.items():
            asked[machine] = asked.get(machine, 0.0) + number
    for task in running.values():
        shares = (cores / asked[machine] for machine in task.asked if asked[machine] > cores)
        task.go_at(min(shares, default=1.0), now)


def _events(running: dict[int, _Running], begins: list[float]) -> Iterator[float]:
    yield from (task.end for task in running.values())
    yield from (time for time in begins if time < math.inf)
