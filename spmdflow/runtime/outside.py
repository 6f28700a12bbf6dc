"""Ranks of a host program that are not in a run: the groups they help to make, and the outcome.

`new_group` must be called by every rank of the world. So the run's first rank writes into the
world's store which groups its ranks make, then that there are no more, and at last how the run
ended. The others follow. Waiting for the end costs a look into the store per second, has no limit
(runs are long), and lets signals through.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import Store

from spmdflow.errors import RunFailed
from spmdflow.parallel.group import GroupSpec, GroupTable

_FIRST_SECONDS, _GROUP_SECONDS, _END_SECONDS = 0.01, 0.1, 1.0
"""Between two looks: at first, and later for more groups or the end of the run."""

Specs = Sequence[tuple[Sequence[int], str, str]]
"""Ranks, lane, backend of process groups."""


class Announcements:
    """What is said of one launch. Every rank of the world calls `launch` equally often."""

    def __init__(self, store: Store, rank: int) -> None:
        launches = store.add(f"spmdflow/launches/{rank}", 1)
        self._store, self._root = store, f"spmdflow/launch-{launches}"
        self._numbers = itertools.count()
        self._has_ended = False

    def announce(self, specs: Specs | None) -> None:
        """Say which groups the ranks of the run make now; None: there are no more (first rank)."""
        if not self._has_ended:
            self._store.set(self._key(), json.dumps(specs))
        self._has_ended = specs is None

    def tell(self, status: int, failure: RunFailed | None = None) -> None:
        """Say how the run ended (first rank)."""
        told = {"status": status} if failure is None else {"text": str(failure)} | failure.record
        self._store.set(f"{self._root}/outcome", json.dumps(told))

    def make_groups(self, groups: GroupTable) -> None:
        """Make the groups that are announced, until there are no more (outside)."""
        specs: Specs | None = []
        while specs is not None:
            groups.make([GroupSpec(tuple(ranks), lane, backend) for ranks, lane, backend in specs])
            specs = json.loads(self._next())

    def outcome(self) -> Mapping[str, Any] | None:
        """How the run ended; None while it goes on."""
        key = f"{self._root}/outcome"
        if not self._store.check([key]):
            return None
        told: dict[str, Any] = json.loads(self._store.get(key))
        return told

    def _next(self) -> bytes:
        """The next announcement, when it is there."""
        key = self._key()
        _look_until(lambda: self._store.check([key]), at_most=_GROUP_SECONDS)
        return bytes(self._store.get(key))

    def _key(self) -> str:
        return f"{self._root}/groups/{next(self._numbers)}"


class Outcome:
    """How a run ends, on a rank that is in it or outside of it."""

    def __init__(self, status: int | None, announcements: Announcements | None = None) -> None:
        """status: None if it must be heard from announcements."""
        self._status, self._announcements = status, announcements

    @property
    def is_known(self) -> bool:
        """Whether the run has ended: `wait` returns (or raises) at once."""
        return self._status is not None or self._look() is not None

    def wait(self) -> int:
        """Wait for the end: 0 finished, 3 stopped; RunFailed if the run failed."""
        if self._status is None:
            _look_until(lambda: self.is_known, at_most=_END_SECONDS)
            told = dict(self._look() or {})
            if "text" in told:
                error = RunFailed(told.pop("text"), told)
                error.add_note(f"on rank {told.get('rank')}:\n{told.get('traceback', '')}")
                raise error
            self._status = int(told["status"])
        return self._status

    def _look(self) -> Mapping[str, Any] | None:
        assert self._announcements is not None
        return self._announcements.outcome()


def _look_until(condition: Callable[[], bool], *, at_most: float) -> None:
    """Wait for condition, with up to at_most seconds between two looks.

    `Store.wait` would hold the store for this rank's other threads, and warn at each timeout.
    """
    seconds = _FIRST_SECONDS
    while not condition():
        time.sleep(seconds)
        seconds = min(at_most, 2 * seconds)
