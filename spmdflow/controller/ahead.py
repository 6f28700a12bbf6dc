"""Generation ahead of the step, which calls on the generator's ranks interrupt.

Knows calls and ranks; a `WeightLink` (group.py) knows how to end and begin it. Script thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Protocol

from spmdflow.runtime.call import Call
from spmdflow.runtime.executor import COMPUTE


class GenerationAhead(Protocol):
    """A generator that generates rows of later steps, until it is interrupted."""

    @property
    def ranks(self) -> AbstractSet[int]:
        """Of the generator. Their compute lanes are busy."""

    def interrupt(self, *, after: Iterable[int] = ()) -> None:
        """End it once the ranks `after` have run all earlier calls; without any, at once."""

    def go_on(self) -> None:
        """Begin it again."""


class RunningAhead:
    """The generators that generate rows of later steps now."""

    def __init__(self) -> None:
        self.generations: list[GenerationAhead] = []

    @property
    def ranks(self) -> AbstractSet[int]:
        """Ranks whose compute lane is busy with them."""
        ranks: set[int] = set()
        for generation in self.generations:
            ranks |= generation.ranks
        return ranks

    @contextmanager
    def interrupt_for(self, call: Call, makers: AbstractSet[int]) -> Iterator[None]:
        """Interrupt generation on the ranks of a call, which is sent inside; it goes on behind it.

        makers: the ranks that make the call's inputs. Generation ends when they have made them, so
        that its ranks do not wait for them idly.
        """
        interrupted = []
        for generation in list(self.generations):
            if call.lane == COMPUTE and not generation.ranks.isdisjoint(call.commands):
                generation.interrupt(after=sorted(makers - generation.ranks))
                interrupted.append(generation)
        try:
            yield
        finally:
            for generation in interrupted:
                generation.go_on()
