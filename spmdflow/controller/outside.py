"""Ranks of a host program that are not in a run: the groups they help to make, and the outcome.

`new_group` must be called by every rank of the world. So the run's first rank writes into the
world's store which groups its ranks make, then that there are no more, and at last how the run
ended. The others follow. Waiting for the end costs a look into the store per second, has no limit
(runs are long), and lets signals through.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store

from spmdflow.errors import RunFailed
from spmdflow.parallel.group import GroupSpec, GroupTable

_WAIT = timedelta(seconds=1)
_FIRST_SECONDS, _MOST_SECONDS = 0.02, 1.0
"""Between two looks for the end of the run: at first, and later."""

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
            key = self._key()
            while not self._arrives(key):
                pass
            specs = json.loads(self._store.get(key))

    def outcome(self) -> Mapping[str, Any] | None:
        """How the run ended; None while it goes on."""
        key = f"{self._root}/outcome"
        if not self._store.check([key]):
            return None
        told: dict[str, Any] = json.loads(self._store.get(key))
        return told

    def _key(self) -> str:
        return f"{self._root}/groups/{next(self._numbers)}"

    def _arrives(self, key: str) -> bool:
        with contextlib.suppress(DistError):
            self._store.wait([key], _WAIT)
            return True
        return False


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
        seconds = _FIRST_SECONDS
        while self._status is None:
            if (told := self._look()) is None:
                time.sleep(seconds)
                seconds = min(_MOST_SECONDS, 2 * seconds)
            elif "text" in told:
                raise RunFailed(told["text"], {key: told[key] for key in told if key != "text"})
            else:
                self._status = int(told["status"])
        return self._status

    def _look(self) -> Mapping[str, Any] | None:
        assert self._announcements is not None
        return self._announcements.outcome()
