"""`Roster`: which servers the ranks of a generator's pool look after, as files in RUN_DIR.

A rank *owns* the servers that it has started, or its part of the given addresses: it brings them
their weights. Every rank reads the files of the others, and uses their servers while none of its
own is ready. So the rows of a rank whose server died go on at once.

The files hold the servers' keys; only this user can read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 1 << 20
_MOST_URLS = 4096


@dataclass(frozen=True)
class RosterEntry:
    """A server and its owner."""

    url: str
    key: str
    epoch: str
    """Random id of the owner's start; a server notes it with its weights."""
    owner: int
    """Global rank."""


class Roster:
    """The entries of one rank, and those of the others."""

    def __init__(self, folder: Path, *, rank: int, ranks: Sequence[int]) -> None:
        """folder: RUN_DIR/servers. rank: this one. ranks: of the generator's pool."""
        self._folder = folder
        self._rank = rank
        self._others = [each for each in ranks if each != rank]

    def write(self, urls: Sequence[str], *, key: str, epoch: str) -> None:
        """Write this rank's servers, at once as a whole."""
        path = self._path(self._rank)
        draft = path.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        value = {"urls": list(urls), "key": key, "epoch": epoch}
        draft.write_text(json.dumps(value), encoding="utf-8")
        os.replace(draft, path)

    def read_others(self) -> list[RosterEntry]:
        """The servers of the other ranks, as far as they have written theirs."""
        result = []
        for rank in self._others:
            result += _read_entries(self._path(rank), rank)
        return result

    def remove(self) -> None:
        """Remove this rank's file, at the end."""
        self._path(self._rank).unlink(missing_ok=True)

    def _path(self, rank: int) -> Path:
        return self._folder / f"roster-{rank}.json"


def _read_entries(path: Path, rank: int) -> list[RosterEntry]:
    """The servers in the file of a rank; none if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MOST_BYTES))
        urls = value["urls"]
        facts = {"key": value["key"], "epoch": value["epoch"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    if not isinstance(urls, list) or not all(isinstance(each, str) for each in urls):
        return []
    if not all(isinstance(each, str) for each in facts.values()):
        return []
    return [RosterEntry(url=url, owner=rank, **facts) for url in urls[:_MOST_URLS]]
