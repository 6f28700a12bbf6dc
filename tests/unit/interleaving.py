"""Runs real threads one at a time, in every possible order of their steps.

A step of a thread ends where it calls `Scheduler.pause`: at a place where another thread could come
in between, or where it waits for something. `EveryOrder` runs a program again and again, each time
with another choice of who goes next, until every choice was made in every state.

The pieces below let the code pause where it would be interrupted or would wait: a lock, the
condition on which lanes of a rank wait for rows, the queue of a lane, the threads of early methods,
and the network between two ranks.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor

from spmdflow.data.store import RowCondition

LIMIT_SECONDS = 60.0
"""Only for a step that never ends."""


@dataclass
class Actor:
    """A thread that takes part."""

    name: str
    may_go: Callable[[], bool] = lambda: True
    """Whether what it waits for is there."""
    is_over: bool = False
    num_steps: int = 0
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    error: BaseException | None = None


class Deadlock(AssertionError):
    """Threads are left, and none of them may go on."""


class Scheduler:
    """Lets one actor go at a time, in an order that is given."""

    def __init__(
        self, choices: Sequence[int], *, seen: Container[Hashable], urgent: Container[str]
    ) -> None:
        """choices: the place of the actor that goes on, among those that could, for each moment
        at which more than one could; 0 where the list has ended. seen: states from which every
        order was tried before: no choice is left there. urgent: names of actors that go whenever
        they can, as what they do touches nothing that another actor looks at meanwhile.
        """
        self.moments: list[tuple[Hashable, int, int]] = []
        """State, place of the actor that went, number of those that could: of each moment."""
        self.end: Hashable = None
        """The first state that was seen before, or of the end."""
        self.trace: list[str] = []
        """Who went, in order."""
        self.shared: Callable[[], Hashable] = lambda: None
        """What actors share, as a value: two moments with the same shared state and with all
        actors at the same places have the same orders before them. Set by the program."""
        self._given = choices
        self._seen = seen
        self._urgent = urgent
        self._actors: list[Actor] = []
        self._of_thread = threading.local()
        self._is_quiet = threading.Semaphore(0)

    def add(self, name: str, work: Callable[[], object]) -> None:
        """An actor that does work in a thread of its own, from its first turn on."""
        actor = Actor(name)
        self._actors.append(actor)

        def run() -> None:
            self._of_thread.actor = actor
            actor.turn.acquire()
            try:
                work()
            except BaseException as err:
                actor.error = err
            actor.is_over = True
            self._is_quiet.release()

        _PlainThread(target=run, name=name, daemon=True).start()

    def pause(self, may_go: Callable[[], bool] = lambda: True) -> None:
        """End the step of the actor that calls; returns at its next turn, once may_go() holds.

        In a thread that is not an actor's: returns at once.
        """
        actor: Actor | None = getattr(self._of_thread, "actor", None)
        if actor is None:
            return
        actor.may_go = may_go
        self._is_quiet.release()
        actor.turn.acquire()

    def run(self) -> None:
        """Let the actors go until all have ended. Raises what one of them raised."""
        while waiting := [actor for actor in self._actors if not actor.is_over]:
            ready = [actor for actor in waiting if actor.may_go()]
            if not ready:
                names = [actor.name for actor in waiting]
                raise Deadlock(f"deadlock: {names} are all waiting, after the steps {self.trace}")
            actor = self._choose(ready)
            self.trace.append(actor.name)
            actor.num_steps += 1
            actor.may_go = lambda: True
            actor.turn.release()
            assert self._is_quiet.acquire(timeout=LIMIT_SECONDS), f"{actor.name}: {self.trace}"
            if actor.error is not None:
                raise AssertionError(f"{actor.name} failed after {self.trace}") from actor.error
        if self.end is None:
            self.end = self._state()

    def _choose(self, ready: list[Actor]) -> Actor:
        for actor in ready:
            if actor.name in self._urgent:
                return actor
        if len(ready) == 1 or self.end is not None:
            return ready[0]
        state = self._state()
        number = len(self.moments)
        if number >= len(self._given) and state in self._seen:
            self.end = state
            return ready[0]
        place = self._given[number] if number < len(self._given) else 0
        self.moments.append((state, place, len(ready)))
        return ready[place]

    def _state(self) -> Hashable:
        places = tuple(sorted((actor.name, actor.num_steps) for actor in self._actors))
        return places, self.shared()


_PlainThread = threading.Thread


class EveryOrder:
    """Runs a program once for each state and each actor that may go on there: every order of the
    steps is a path through these."""

    def __init__(
        self, program: Callable[[Scheduler], None], *, urgent: Container[str] = ()
    ) -> None:
        """program: starts the actors and calls `run`. urgent: see `Scheduler`."""
        self._program = program
        self._urgent = urgent
        self._next: dict[Hashable, dict[int, Hashable]] = {}
        """State -> place of the actor that went -> state at the next choice, or the end."""

    def __iter__(self) -> Iterator[Scheduler]:
        """Each run, after it has ended."""
        choices: list[int] | None = []
        while choices is not None:
            scheduler = Scheduler(choices, seen=self._next, urgent=self._urgent)
            self._program(scheduler)
            self._learn(scheduler)
            yield scheduler
            choices = _next_choices([moment[1:] for moment in scheduler.moments])

    @property
    def num_states(self) -> int:
        """States with a choice."""
        return len(self._next)

    def num_orders(self) -> int:
        """Orders of the steps: paths from the first state to an end."""
        known: dict[Hashable, int] = {}
        for state in self._next:
            waiting = [state]
            while waiting:
                after = self._next.get(waiting[-1], {}).values()
                unknown = [each for each in after if each not in known]
                if unknown:
                    waiting.append(unknown[0])
                else:
                    known[waiting.pop()] = sum(known[each] for each in after) or 1
        return known[next(iter(self._next))]

    def _learn(self, scheduler: Scheduler) -> None:
        states = [state for state, _, _ in scheduler.moments] + [scheduler.end]
        for (state, place, _), after in zip(scheduler.moments, states[1:], strict=True):
            self._next.setdefault(state, {})[place] = after


def _next_choices(made: Sequence[tuple[int, int]]) -> list[int] | None:
    """The next ones after those that were made, last moment first; None: all were made."""
    for moment in reversed(range(len(made))):
        place, count = made[moment]
        if place + 1 < count:
            return [place for place, _ in made[:moment]] + [place + 1]
    return None


class ScheduledLock:
    """A lock: taking it is a step of its own, which waits while another actor has it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_taken = False

    def __enter__(self) -> None:
        self._scheduler.pause(lambda: not self._is_taken)
        self._is_taken = True

    def __exit__(self, *error: object) -> None:
        self._is_taken = False


class ScheduledCondition(RowCondition):
    """How lanes and early methods wait for rows: a waiting one goes on only after a `wake`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._num_wakes = 0

    def wait_until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """As `RowCondition`; the limit never passes."""
        if self._end is None and not condition():
            seen = self._num_wakes

            def may_go() -> bool:
                return self._num_wakes > seen and (self._end is not None or condition())

            self._scheduler.pause(may_go)
        if self._end is not None:
            raise self._end
        return True

    def wake(self) -> None:
        """As `RowCondition`."""
        self._num_wakes += 1


class ScheduledQueue(queue.SimpleQueue[Any]):
    """The queue of a lane."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As `SimpleQueue`; each command is a step of its own."""
        self._scheduler.pause(lambda: not self.empty())
        return super().get()


def thread_class(scheduler: Scheduler) -> type[threading.Thread]:
    """A class of threads that are actors."""

    class ScheduledThread(_PlainThread):
        def start(self) -> None:
            scheduler.add(self.name, self.run)

        def is_alive(self) -> bool:
            return any(a.name == self.name and not a.is_over for a in scheduler._actors)

        def join(self, timeout: float | None = None) -> None:
            """Actors have ended when the order has."""

    return ScheduledThread


class Network:
    """Messages between ranks of one process: what `torch.distributed` does for the lanes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._messages: dict[tuple[int, int, int], deque[Tensor]] = {}
        self._of_thread = threading.local()

    def be(self, rank: int) -> None:
        """The thread that calls is of this rank from now on."""
        self._of_thread.rank = rank

    def isend(self, tensor: Tensor, dst: int, *, group: object, tag: int) -> Work:
        """Start to send: the message is on its way at once."""
        key = (self._of_thread.rank, dst, tag)
        self._messages.setdefault(key, deque()).append(tensor.clone())
        return Work(lambda: None)

    def irecv(self, tensor: Tensor, src: int, *, group: object, tag: int) -> Work:
        """Start to receive."""
        messages = self._messages.setdefault((src, self._of_thread.rank, tag), deque())

        def finish() -> None:
            if not messages:
                self._scheduler.pause(lambda: bool(messages))
            tensor.copy_(messages.popleft())

        return Work(finish)


@dataclass(frozen=True)
class Work:
    """A send or receive that was started."""

    finish: Callable[[], None]

    def wait(self, timeout: timedelta) -> None:
        """Return once it is done."""
        self.finish()
