"""The rows a rank holds, by result (the call that made them), column and row id.

Two lanes use it: the compute lane puts results and takes inputs, the transfer lane takes rows
to send and puts rows received. Rows are kept in host memory,
and a method gets them there; engines bring their micro-batches to the device.

Rows that were returned never change: what is returned is copied once (`column.column_of`), as a
method may return a buffer or a parameter of its own; what is given out is the stored tensor
itself, and writing into it is an error (`Unchanged`). Inputs are not copied, because every method
reads and few would write: with copies a round trip of 64 MB took twice as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmdflow.data.column import Column, join
from spmdflow.errors import ColumnError, RowError


class RowCondition:
    """How the compute lane waits for rows that the transfer lane brings."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._end: BaseException | None = None

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for what another call brings, as long as the session lasts.

        This time does not count against the limit of the call that waits (failure/limit.py).
        """
        self.wait_until(condition, None)

    def wait_until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Block until condition() is true and return True; return False if `seconds` pass first.

        condition() is called at once and after each `wake`. seconds=None: no limit. Raises the
        error that `end` was given.
        """
        with self._changed:
            holds = self._changed.wait_for(lambda: self._end is not None or condition(), seconds)
        if self._end is not None:
            raise self._end
        return holds

    def wake(self) -> None:
        """Let `wait_until` look at its condition again."""
        with self._changed:
            self._changed.notify_all()

    def end(self, error: BaseException) -> None:
        """No more rows come: `wait_until` raises error."""
        self._end = error
        self.wake()


class LocatedRows(NamedTuple):
    """Rows of a column that are here."""

    column: Column
    indices: np.ndarray | None
    """Theirs in the column; None: the whole column."""

    def values(self) -> Column:
        """The rows; the stored column itself, if they are all of it."""
        if self.indices is None:
            return self.column
        return self.column.take(torch.from_numpy(self.indices))


class _Rows:
    """The rows of one column of one result; parts are joined when more than one is needed."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, Column]] = []
        self._order: np.ndarray | None = None

    def add(self, ids: np.ndarray, column: Column) -> None:
        self._parts.append((ids, column))
        self._order = None

    def _join_parts(self) -> tuple[np.ndarray, Column, np.ndarray]:
        """Join all added parts into one; return its ids, its column, and the order that sorts ids.

        The ids are in the order in which they were added. The result is cached until the next
        `add`.
        """
        if len(self._parts) > 1:
            ids = np.concatenate([ids for ids, _ in self._parts])
            self._parts = [(ids, join([column for _, column in self._parts]))]
        ids, column = self._parts[0]
        if self._order is None:
            self._order = np.argsort(ids, kind="stable")
        return ids, column, self._order

    def missing(self, ids: np.ndarray) -> np.ndarray:
        """Return those of `ids` whose rows were not added, in order."""
        if not self._parts:
            return ids
        known_ids, _, _ = self._join_parts()
        return ids[~np.isin(ids, known_ids)]

    def locate(self, ids: np.ndarray) -> LocatedRows | None:
        """Return where the rows `ids` are, in that order; None if any of them was not added.

        If `ids` are all stored ids in their stored order, the location is the whole column.
        """
        if not self._parts:
            return None
        known_ids, column, order = self._join_parts()
        if np.array_equal(known_ids, ids):
            return LocatedRows(column, None)
        if not len(known_ids):
            return None
        indices = order[
            np.minimum(np.searchsorted(known_ids, ids, sorter=order), len(known_ids) - 1)
        ]
        if not np.array_equal(known_ids[indices], ids):
            return None
        return LocatedRows(column, indices)


class RowStore:
    """Rows of this rank. Shared by the two lanes."""

    def __init__(self, arrival: RowCondition | None = None) -> None:
        """arrival: how `wait` and `take` wait."""
        self._results: dict[int, dict[str, _Rows]] = {}
        self._lock = threading.RLock()
        self._arrival = arrival or RowCondition()

    def put(self, result: int, ids: np.ndarray, columns: Mapping[str, Column]) -> None:
        """Add rows to the columns of a result, and wake threads that wait in `take` or `wait`.

        ids (B,): the ids of the rows of every column. Earlier rows of the result stay. The columns
        are stored without a copy.
        """
        with self._lock:
            kept = self._results.setdefault(result, {})
            for name, column in columns.items():
                assert len(column) == len(ids), (name, len(column), len(ids))
                kept.setdefault(name, _Rows()).add(ids, column)
        self._arrival.wake()

    def has(self, result: int) -> bool:
        """Whether any row of the result was put here."""
        with self._lock:
            return result in self._results

    def missing(self, result: int, name: str, ids: np.ndarray) -> np.ndarray:
        """The ids among `ids` that are not here."""
        with self._lock:
            rows = self._results.get(result, {}).get(name, _Rows())
            return rows.missing(ids)

    def take(
        self, result: int, names: Sequence[str], ids: np.ndarray, *, waits: bool = False
    ) -> dict[str, Column]:
        """Return the rows `ids`, in that order, of the columns `names`, by name.

        RowError if any row of any column is not in the store. waits: block until all are in it
        instead, or until the session ends; the limit of the call that makes them bounds the wait. A
        column whose rows are all taken in their stored order is returned itself, not a copy.
        """
        located: dict[str, LocatedRows] = {}

        def are_here() -> bool:
            nonlocal located
            located = self._locate(result, names, ids)
            return len(located) == len(set(names))

        if waits:
            self._arrival.wait(are_here)
        elif not are_here():
            name = next(name for name in names if name not in located)
            missing = self.missing(result, name, ids)
            raise RowError(
                f"column {name!r} of call {result}: {len(missing)} of {len(ids)} rows are not "
                f"here (first id {missing[:1].tolist()}); was the batch freed or never produced?"
            )
        return {name: located[name].values() for name in names}

    def wait(self, result: int, names: Sequence[str], ids: np.ndarray) -> None:
        """Block until the rows are here. The limit of the call that makes them bounds the wait."""
        self._arrival.wait(lambda: len(self._locate(result, names, ids)) == len(set(names)))

    def _locate(self, result: int, names: Sequence[str], ids: np.ndarray) -> dict[str, LocatedRows]:
        """Return where the rows `ids` are, for each of the columns `names` that has all of them."""
        located = {}
        with self._lock:
            columns = self._results.get(result, {})
            for name in names:
                rows = columns[name].locate(ids) if name in columns else None
                if rows is not None:
                    located[name] = rows
        return located

    def free(self, results: Iterable[int]) -> None:
        """Forget results; unknown numbers are fine (a rank need not hold every result)."""
        with self._lock:
            for result in results:
                self._results.pop(result, None)

    def num_results(self) -> int:
        """Results held, for leak checks."""
        with self._lock:
            return len(self._results)


class Unchanged:
    """Checks that a method did not write into the columns that it was given.

    Torch counts writes, also those through views. Writes that it does not see (NumPy, `.data`)
    are noticed by the sum of the 8-byte words, unless they only reorder words.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, tuple[int, int]]] = []

    def remember(self, columns: Mapping[str, Column]) -> None:
        """Columns as they are given out; text is given out as a copy and needs no check."""
        for name, column in columns.items():
            if column.kind != "text":
                self._seen.append((name, column.values, _state(column.values)))

    def check(self, label: str) -> None:
        """Raise ColumnError if a remembered column was written to. label: the call that got it."""
        for name, values, state in self._seen:
            if _state(values) != state:
                raise ColumnError(
                    f"{label}: wrote into column {name!r} in place, expected it unchanged, as "
                    f"other methods read the same rows; work on batch[{name!r}].clone()"
                )


def _state(values: Tensor) -> tuple[int, int]:
    """Return torch's count of writes to a tensor, and a checksum of its bytes.

    Checksum: the sum of the 8-byte words plus the sum of the remaining bytes, modulo 2**64.
    """
    raw = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    end = len(raw) // 8 * 8  # NumPy sums words that are not aligned, as those of a slice of rows
    return values._version, int(raw[:end].view(np.int64).sum() + raw[end:].sum(dtype=np.int64))
