"""Rows that a rank of a generator generates ahead of the steps that learn from them.

One call begins rows and a later one finishes them. Every call that generates continues all rows
that have begun, oldest first. Before the weights change, unfinished rows are suspended; they
continue with the new weights (rollout/resumable.py). The controller's side is controller/queue.py.
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
from spmdflow.episodes.judging import EpisodeGroups
from spmdflow.episodes.result import Episode
from spmdflow.episodes.run import EpisodeRunner
from spmdflow.parallel.group import all_gather_plain
from spmdflow.rollout.generator import Replica, Request
from spmdflow.rollout.resumable import ResumableRequests, VersionedResponse
from spmdflow.rollout.sampling import Sampling


class RowsAhead:
    """Unfinished and finished rows, by row id. All ranks of a replica make the same calls."""

    def __init__(
        self, requests: ResumableRequests, replica: Replica, runner: EpisodeRunner | None
    ) -> None:
        """runner: runs episodes with the same requests. None: rows are single responses."""
        self._requests = requests
        self._replica = replica
        self._runner = runner
        self._numbers: dict[int, int] = {}
        """Number of the request or episode of each row that is not yet finished."""
        self._ended: dict[int, VersionedResponse] = {}
        """Responses that have ended, by request."""
        self._saved: dict[int, dict[str, Tensor]] = {}
        """Tokens that were drawn of rows before the run was resumed."""
        self._halted = 0

    def begin_sequences(self, ids: Sequence[int], requests: Sequence[Request]) -> None:
        """Add rows to generate later, those with the longest prompts first. Nothing is sampled yet.

        ids: the row id of each request. A row whose tokens `load` has read continues after these
        tokens.
        """
        for index in sorted(range(len(ids)), key=lambda row: -len(requests[row].prompt)):
            row = ids[index]
            self._numbers[row] = self._requests.add(requests[index], self._saved.pop(row, None))

    def finish_sequences(self, ids: Sequence[int]) -> list[VersionedResponse]:
        """Generate until these rows have ended, remove them, and return their responses in order.

        Other unfinished rows continue meanwhile.
        """
        numbers = [self._numbers.pop(row) for row in ids]
        while not all(number in self._ended for number in numbers):
            self._step_requests()
        return [self._ended.pop(number) for number in numbers]

    def begin_episodes(
        self,
        ids: Sequence[int],
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
    ) -> None:
        """Add an episode for each row, with ids as their row ids. See `EpisodeRunner.begin`."""
        assert self._runner is not None, "its settings have an environment"
        self._numbers |= zip(ids, self._runner.begin(rows, sampling, seed_of_turn), strict=True)

    def finish_episodes(
        self, ids: Sequence[int], groups: EpisodeGroups | None = None
    ) -> list[Episode]:
        """Continues until the episodes of these rows have ended, and removes them.

        groups: see `EpisodeRunner.finish`.
        """
        assert self._runner is not None, "its settings have an environment"
        return self._runner.finish([self._numbers.pop(row) for row in ids], groups=groups)

    def generate_until(self, halt_id: int) -> None:
        """Generate for all unfinished rows until `halt(halt_id)`, or until every row has ended.

        All ranks of the replica call it together; the halt of the replica's first rank decides.
        """
        runner = self._runner
        if runner is not None:
            runner.run_until(lambda: self._halted >= halt_id or not runner.num_under_way)
            return
        while len(self._requests) and not self._is_halted(halt_id):
            self._step_requests()

    def halt(self, halt_id: int) -> None:
        """End `generate_until` of this and all lower halt ids, or prevent it from starting.

        May be called from any thread.
        """
        self._halted = max(self._halted, halt_id)
        if self._runner is not None:
            self._runner.wake()

    def suspend_all(self, version: int | None = None) -> None:
        """Take all unfinished rows out of the generator. They continue at the next generation.

        version: the version of the weights that they continue with; None: it does not change.
        """
        self._requests.suspend_all()
        if version is not None:
            self._requests.version = version

    def save(self, path: Path) -> Callable[[], None] | None:
        """Suspend all rows, and return a function that writes them with their tokens so far.

        The file at `path` gets the columns rows (row ids), tokens, log_probs and versions. Rows
        that have ended but were not taken are included. None if there are no rows, or if the rows
        are episodes, which are not saved, because their environments cannot be.
        """
        self.suspend_all()
        if self._runner is not None or not self._numbers:
            return None
        columns_of_row = {}
        for row, number in self._numbers.items():
            columns_of_row[row] = (
                vars(self._ended[number]) if number in self._ended else self._requests.state(number)
            )
        columns = {}
        for name in ("tokens", "log_probs", "versions"):
            columns[name] = column_of(
                name,
                ragged_from_rows([of[name] for of in columns_of_row.values()]),
                len(columns_of_row),
            )
        columns["rows"] = column_of("rows", torch.tensor(list(columns_of_row)), len(columns_of_row))
        return partial(write_rows, path, columns, {})

    def load(self, paths: Iterable[Path]) -> None:
        """Read the tokens of rows that `save` wrote, from any layout.

        A row continues after its saved tokens when it begins again.
        """
        for path in paths:
            columns, _ = read_columns(path)
            rows = columns.pop("rows").values.tolist()
            sizes = columns["tokens"].lengths
            assert sizes is not None, path
            parts = {}
            for name, x in columns.items():
                parts[name] = x.values.split(sizes.tolist())
            for index, row in enumerate(rows):
                self._saved[row] = {name: values[index].clone() for name, values in parts.items()}

    def _step_requests(self) -> None:
        self._ended |= {ended.id: ended for ended in self._requests.step()}

    def _is_halted(self, halt_id: int) -> bool:
        """Return whether the replica's first rank is halted.

        All ranks of the replica call it together.
        """
        is_halted = self._halted >= halt_id
        if self._replica.size == 1:
            return is_halted
        group = self._replica.group(self._replica.ranks, "gloo")
        return bool(all_gather_plain(is_halted, group)[0])
