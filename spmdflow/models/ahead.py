"""Rows that a rank of a generator makes ahead of the steps that learn from them.

A call begins rows, a later one finishes them, and every call that draws goes on with all rows that
were begun, oldest first. Before the weights change, what was drawn is set aside; it goes on with
the new ones (rollout/resumable.py). The controller's side is controller/queue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdflow.checkpoint.rows import read_columns, write_rows
from spmdflow.data.column import column_of
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.episodes.run import Episode, EpisodeRunner
from spmdflow.parallel.group import all_gather_plain
from spmdflow.rollout.generator import Replica, Request
from spmdflow.rollout.resumable import ResumableRequests, VersionedResponse
from spmdflow.rollout.sampling import Sampling


class RowsAhead:
    """Rows under way and finished ones, by row id; all ranks of a replica make the same calls."""

    def __init__(
        self, requests: ResumableRequests, replica: Replica, runner: EpisodeRunner | None
    ) -> None:
        """runner: of episodes, with the same requests; None: rows are single responses."""
        self._requests = requests
        self._replica = replica
        self._runner = runner
        self._numbers: dict[int, int] = {}
        """Request or episode of each row that was begun and not yet taken."""
        self._ended: dict[int, VersionedResponse] = {}
        """Responses that have ended, by request."""
        self._saved: dict[int, dict[str, Tensor]] = {}
        """What was drawn of rows before the run was resumed."""
        self._halted = 0

    def begin_sequences(self, ids: Sequence[int], requests: Sequence[Request]) -> None:
        """Take rows on, the longest prompts first; nothing is drawn yet, but what was saved."""
        for place in sorted(range(len(ids)), key=lambda row: -len(requests[row].prompt)):
            row = ids[place]
            self._numbers[row] = self._requests.add(requests[place], self._saved.pop(row, None))

    def finish_sequences(self, ids: Sequence[int]) -> list[VersionedResponse]:
        """Draw until these rows have ended; forgets them."""
        numbers = [self._numbers.pop(row) for row in ids]
        while not all(number in self._ended for number in numbers):
            self._draw()
        return [self._ended.pop(number) for number in numbers]

    def begin_episodes(
        self,
        ids: Sequence[int],
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
    ) -> None:
        """As `EpisodeRunner.begin`."""
        assert self._runner is not None, "its settings have an environment"
        self._numbers |= zip(ids, self._runner.begin(rows, sampling, seed_of_turn), strict=True)

    def finish_episodes(self, ids: Sequence[int]) -> list[Episode]:
        """Go on until the episodes of these rows have ended; forgets them."""
        assert self._runner is not None, "its settings have an environment"
        return self._runner.finish([self._numbers.pop(row) for row in ids])

    def go_on(self, turn: int) -> None:
        """Draw until `halt` says so, or until every row has ended."""
        runner = self._runner
        if runner is not None:
            runner.run_until(lambda: self._halted >= turn or not runner.num_under_way)
            return
        while len(self._requests) and not self._is_halted(turn):
            self._draw()

    def halt(self, turn: int) -> None:
        """End `go_on` of this turn, or keep it from beginning (another thread)."""
        self._halted = max(self._halted, turn)
        if self._runner is not None:
            self._runner.wake()

    def suspend_all(self, version: int | None = None) -> None:
        """Take rows under way out of the generator; version: of the weights that come."""
        self._requests.suspend_all()
        if version is not None:
            self._requests.version = version

    def save(self, path: Path) -> Callable[[], None] | None:
        """What writes the responses under way and those that have ended; None: there are none.

        Episodes are not saved: their environments cannot be.
        """
        self.suspend_all()
        if self._runner is not None or not self._numbers:
            return None
        found = {}
        for row, number in self._numbers.items():
            found[row] = (
                vars(self._ended[number]) if number in self._ended else self._requests.state(number)
            )
        columns = {}
        for name in ("tokens", "log_probs", "versions"):
            columns[name] = column_of(
                name, ragged_from_rows([of[name] for of in found.values()]), len(found)
            )
        columns["rows"] = column_of("rows", torch.tensor(list(found)), len(found))
        return partial(write_rows, path, columns, {})

    def load(self, paths: Iterable[Path]) -> None:
        """Keep what was saved on any layout until its rows are begun again."""
        for path in paths:
            columns, _ = read_columns(path)
            rows = columns.pop("rows").values.tolist()
            sizes = columns["tokens"].lengths
            assert sizes is not None, path
            parts = {}
            for name, x in columns.items():
                parts[name] = x.values.split(sizes.tolist())
            for place, row in enumerate(rows):
                self._saved[row] = {name: values[place].clone() for name, values in parts.items()}

    def _draw(self) -> None:
        self._ended |= {ended.id: ended for ended in self._requests.step()}

    def _is_halted(self, turn: int) -> bool:
        """What the replica's first rank has heard."""
        mine = self._halted >= turn
        if self._replica.size == 1:
            return mine
        group = self._replica.group(self._replica.ranks, "gloo")
        return bool(all_gather_plain(mine, group)[0])
