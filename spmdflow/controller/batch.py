"""`Batch`: what the script holds. Row ids, column names and where each column lives; no values.

A batch is lazy: it exists as soon as the call that makes it has been sent. Two batches join by
row id (`a | b`). Looking at values (`fetch`, `lengths`) waits for the producer.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from spmdflow.controller.result import Ref, RowResult
from spmdflow.data.ragged import VALID, is_ragged
from spmdflow.data.row_id import Ids, RowIds, named_group_ids, segment_ids
from spmdflow.errors import ColumnError, ProtocolError, RowError
from spmdflow.objectives import segments
from spmdflow.router import ROUTES

_TAKEN: Mapping[str, Callable[..., Any]] = {
    segments.LENGTHS: segments.take_segments,
    segments.VERSIONS: segments.take_segment_versions,
    segments.SEGMENT_ROUTES: segments.take_segment_routes,
}
"""Column of episodes -> the map function that makes rows of segments of it."""
_OF_EPISODES = {
    *segments.SEGMENTS,
    *segments.OF_A_SEGMENT,
    *(segments.NAMES, segments.VERSIONS, segments.SEGMENT_ROUTES, "token_versions", ROUTES),
}


class BatchCaller(Protocol):
    """What a batch asks of the caller that made it (caller.py)."""

    row_ids: RowIds

    def map(self, batch: Batch, function: Callable[..., Any], settings: Mapping[str, Any]) -> Batch:
        """Run a map function where the rows live."""

    def fetch(
        self, batch: Batch, names: Sequence[str], *, purpose: str
    ) -> dict[str, Tensor | list[str]]:
        """Values of columns."""

    def lengths(self, ref: Ref) -> np.ndarray:
        """(B,) items of each row."""

    def is_text(self, ref: Ref) -> bool:
        """Whether a column is text that a call has made."""

    def metrics_of(self, results: Iterable[RowResult]) -> Mapping[str, float]:
        """What the calls that made the results reported."""

    def why_missing(self, column: str) -> str:
        """Why no call has written a column that one may be expected to write; empty: unknown."""

    def join(self, columns: Mapping[str, Sequence[Ref]], ids: Ids) -> dict[str, Ref]:
        """Columns of rows that several calls made."""


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Rows and columns by reference. Immutable; `|`, slices and `repeat` make new ones."""

    caller: BatchCaller
    """Of the run."""
    ids: Ids
    """(B,): row ids."""
    parents: Ids
    """(B,): rows with the same parent are samples of one prompt."""
    refs: Mapping[str, Ref]
    """Where each column lives."""
    shares: np.ndarray | None = None
    """(B,) float64: how much each row counts in the size of a mini-batch; None: 1. The segments of
    an episode count as one row together."""

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(sorted(self.refs))})"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.refs)

    def column(self, name: str) -> Ref:
        """Return the reference of a column. ColumnError, with existing names, if it is missing."""
        if name not in self.refs:
            near = difflib.get_close_matches(name, self.refs, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ColumnError(
                f"no column {name!r}{hint}; the batch has {sorted(self.refs)}; "
                f"{self.how_to_get(name)}"
            )
        return self.refs[name]

    def how_to_get(self, name: str) -> str:
        """What a script can do about a missing column, for the end of an error."""
        return self.caller.why_missing(name) or f"call the method that writes {name!r} first"

    def __or__(self, other: Batch) -> Batch:
        """Columns of both; rows are matched by id and keep the order of self."""
        if not isinstance(other, Batch):
            raise ProtocolError(
                f"batch | {type(other).__name__}: expected a Batch on both sides; "
                f"give metrics of a call to step.log"
            )
        index = _indices_of(self.ids, other.ids)
        columns = dict(self.refs)
        for name, ref in other.refs.items():
            moved = ref.at(index)
            mine = columns.get(name, moved)
            if not mine.equals(moved):
                raise ColumnError(
                    f"column {name!r}: in both batches (from {mine.result.label} and "
                    f"{moved.result.label}), expected in one; drop it from one of them"
                )
            columns[name] = moved
        return self._with(columns)

    def _with(self, columns: Mapping[str, Ref]) -> Batch:
        """The same rows with other columns."""
        return Batch(self.caller, self.ids, self.parents, columns, self.shares)

    def _at(self, indices: np.ndarray, ids: Ids, parents: Ids) -> Batch:
        """Return the rows at `indices` (n,), with `ids` and `parents` (n,) in place of theirs."""
        columns = {}
        for name, ref in self.refs.items():
            columns[name] = ref.at(indices)
        shares = None if self.shares is None else self.shares[indices]
        return Batch(self.caller, ids, parents, columns, shares)

    def __getitem__(self, rows: slice) -> Batch:
        """A slice of the rows; ids stay."""
        if not isinstance(rows, slice):
            raise RowError(
                f"batch[{rows!r}]: expected a slice, as a batch holds no values; "
                f"write batch[3:4], batch.select([3]) or batch.fetch(...)"
            )
        return self.select(np.arange(len(self))[rows])

    def select(self, positions: Sequence[int] | np.ndarray) -> Batch:
        """The rows at `positions` (each at most once), in that order; ids stay."""
        indices = _check_positions(positions, len(self))
        return self._at(indices, self.ids[indices], self.parents[indices])

    def where(self, rows: str | Sequence[bool] | np.ndarray | Tensor) -> Batch:
        """Return the rows that a column or a mask selects; ids stay.

        rows: one bool for each row, or the name of a column. A column with one number per row
        selects the rows where it is not 0 (nan counts as not 0). A column of text selects the rows
        where it is not empty. Waits for the values, which count as fetched bytes; of text only the
        lengths are needed, and nothing is fetched. `without` gives the other rows. RowError for a
        mask of another dtype or shape, ColumnError for a column of another kind.
        """
        if isinstance(rows, str) and self.caller.is_text(self.column(rows)):
            return self.select(np.flatnonzero(self.lengths(rows)))
        mask = np.asarray(self._numbers("where", rows) if isinstance(rows, str) else rows)
        if not isinstance(rows, str) and (mask.dtype != bool or mask.shape != (len(self),)):
            got = f"{mask.dtype} of shape {mask.shape}"
            expected = f"the name of a column or {len(self)} bools, one a row"
            raise RowError.of("where", got, expected, "use select for positions")
        return self.select(np.flatnonzero(mask))

    def without(self, part: Batch) -> Batch:
        """Return the rows whose ids are not in `part`, in order.

        RowError if `part` has a row that is not in this batch.
        """
        others = np.setdiff1d(part.ids, self.ids)
        if len(others):
            got = f"{len(others)} of {len(part)} rows that are not in this batch"
            do = "take the part with where, select or a slice"
            raise RowError.of("without", got, "a part of it", do)
        return self.select(np.flatnonzero(~np.isin(self.ids, part.ids)))

    def replace(self, part: Batch) -> Batch:
        """Return these rows in this order, with the values of `part` for the rows in `part`.

        RowError if part has other rows, ColumnError if it has other columns.
        """
        return concatenate([self.without(part), part]).ordered_like(self)

    def ordered_like(self, other: Batch) -> Batch:
        """The same rows in the order of a batch with the same row ids, such as before `where`."""
        return self.select(_indices_of(other.ids, self.ids))

    def filter(self, name: str, keep: Callable[[Any], bool]) -> Batch:
        """Rows whose value passes; waits for the values. Ragged rows come as tensors."""
        return self.select([i for i, value in enumerate(self._items(name)) if keep(value)])

    def filter_groups(self, name: str, keep: Callable[[list[Any]], bool]) -> Batch:
        """Return all rows of the groups (samples of one prompt) that `keep` accepts; ids stay.

        keep: called with the values of a column in one group, in order. Waits for the values.
        """
        groups: dict[int, list[Any]] = {}
        numbers = self.group_numbers().tolist()
        for number, value in zip(numbers, self._items(name), strict=True):
            groups.setdefault(number, []).append(value)
        kept = set()
        for number, values in groups.items():
            if keep(values):
                kept.add(number)
        return self.select([i for i, number in enumerate(numbers) if number in kept])

    def best(self, name: str) -> Batch:
        """Return, of each group (samples of a prompt), the row with the largest number in a column.

        Groups are in ascending order of their parent's id. On a tie the last row of the group is
        taken. nan, the score of a row that failed, is below every number. Waits for the values
        (counted as fetched bytes). ColumnError unless the column has one number for each row.
        """
        numbers = np.nan_to_num(np.asarray(self._numbers("best", name)), nan=-np.inf)
        groups = self.group_numbers()
        order = np.lexsort((numbers, groups))  # by group, then number, then place
        ends = np.flatnonzero(np.diff(groups[order], append=-1))
        return self.select(order[ends])

    def repeat(self, n: int) -> Batch:
        """Return each row n times in succession, with new row ids.

        The parent of each new row is the id of the row that it repeats. RowError if n is below 1.
        """
        if n < 1:
            raise RowError(f"repeat: got {n}, expected at least 1; use select to leave rows out")
        indices = np.repeat(np.arange(len(self)), n)
        return self._at(indices, self.caller.row_ids.take(len(indices)), np.repeat(self.ids, n))

    def aligned_with(self, other: Batch) -> Batch:
        """Return these rows under the ids and parents of `other`, in order, to join the two.

        RowError unless both have the same number of rows.
        """
        if len(self) != len(other):
            where = "aligned_with"
            got = f"{len(self)} rows for a batch of {len(other)}"
            raise RowError.of(where, got, "as many", "draw as many rows, or select")
        return Batch(self.caller, other.ids, other.parents, self.refs, other.shares)

    def first_samples(self) -> Batch:
        """The first row of each group (samples of one prompt), in order; ids stay."""
        _, first = np.unique(self.parents, return_index=True)
        return self.select(np.sort(first))

    def shared_by(self, samples: Batch) -> Batch:
        """Repeat this batch's one row of each prompt for all rows of the prompt in `samples`.

        The result has the ids, parents and order of `samples`, so that the two can join. Rows with
        the same parent are of one prompt. RowError unless this batch has exactly one row of each
        prompt in `samples`, and no others.
        """
        order = np.argsort(self.parents, kind="stable")
        groups = self.parents[order]
        if not np.array_equal(groups, np.unique(samples.parents)):
            got = f"{len(self)} rows of {len(np.unique(groups))} prompts for samples "
            got += f"of {len(np.unique(samples.parents))} prompts"
            do = "make them from samples.first_samples()"
            raise RowError.of("shared_by", got, "one row of each of their prompts", do)
        index = order[np.searchsorted(groups, samples.parents)]
        return self._at(index, samples.ids, samples.parents)

    def only(self, *names: str, prefix: str = "") -> Batch:
        """With the columns `names` alone; prefix: put before each name."""
        return self._with({prefix + name: self.column(name) for name in names})

    def drop(self, *names: str) -> Batch:
        """Without the columns `names`."""
        for name in names:
            self.column(name)
        return self._with({name: ref for name, ref in self.refs.items() if name not in names})

    def rename(self, **names: str) -> Batch:
        """Return the batch with renamed columns: rename(judge_scores="scores"), new name first.

        All columns stay. Moves no data, sends no command. ColumnError if an old name is missing, or
        if a new name is that of another column.
        """
        kept = []
        for name in self.refs:
            if name not in names.values():
                kept.append(name)
        refs = {}
        for new, old in names.items():
            refs[new] = self.column(old)
        taken = sorted(set(kept) & set(refs))
        if taken:
            got = f"the new name {taken[0]!r}, which the batch has already"
            do = f"drop({taken[0]!r}) first, or choose another name"
            raise ColumnError.of("rename", got, "another", do)
        return self._with({name: self.refs[name] for name in kept} | refs)

    def map(self, function: Callable[..., Any], **settings: Any) -> Batch:
        """Run a map function where the rows live; the result has the columns that it writes."""
        return self.caller.map(self, function, settings)

    def fetch(self, *names: str) -> dict[str, Tensor | list[str]]:
        """Values of columns on the controller, in row order; counted as tensor bytes."""
        return self.fetch_for("script", *(names or self.columns))

    def fetch_for(self, purpose: str, *names: str) -> dict[str, Tensor | list[str]]:
        """As `fetch`, with the bytes counted under another purpose (samples, filter)."""
        return self.caller.fetch(self, names, purpose=purpose)

    def mean(self, name: str) -> float:
        """Return the mean of a column with one number per row, over the rows that did not fail.

        A row failed if its column `valid` or `cost_valid` is False. The mean is 0.0 if all failed.
        Waits for the values. ColumnError for a column of another kind.
        """
        marks = []
        for mark in VALID:
            if mark in self.refs and mark != name:
                marks.append(self._items(mark))
        rows = zip(self._numbers("mean", name), *marks, strict=True)
        values = []
        for value, *valid in rows:
            if all(valid):
                values.append(value)
        return sum(values) / max(len(values), 1)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return what the calls that made these columns reported: batch.metrics["actor/entropy"].

        Merged over ranks and calls, each call once. Waits for the calls. Reading a metric that no
        call has reported raises UnknownMetric, a KeyError.
        """
        results = {}
        for ref in self.refs.values():
            if isinstance(ref.result, RowResult):
                results[ref.result.number] = ref.result
        return self.caller.metrics_of(results.values())

    def _numbers(self, what: str, name: str) -> list[float]:
        """Fetch a column to the controller and return one number for each row.

        Waits for the values. ColumnError for text, ragged columns and rows with more than one
        number. what: the method that asks, for the error.
        """
        values = self.fetch_for("filter", name)[name]
        if isinstance(values, Tensor) and not is_ragged(values) and values.dim() == 1:
            return values.tolist()
        kind = "text"
        if isinstance(values, Tensor):
            if is_ragged(values):
                kind = "rows of several lengths"
            else:
                kind = f"{values.dim()} axes"
        where = f"{what}({name!r})"
        do = "write a map function that makes a number of each row, or use filter"
        raise ColumnError.of(where, f"a column of {kind}", "one number a row", do)

    def _items(self, name: str) -> list[Any]:
        """Fetch a column to the controller and return one value for each row; waits for it.

        A value is a tensor (ragged), a number or nested list (dense) or a str (text).
        """
        values = self.fetch_for("filter", name)[name]
        if isinstance(values, Tensor):
            if is_ragged(values):
                return list(values.unbind())
            return values.tolist()
        return values

    def group_numbers(self) -> np.ndarray:
        """(B,) int64: rows with the same parent have the same number, counted from 0."""
        return np.unique(self.parents, return_inverse=True)[1].astype(np.int64)

    def row_shares(self) -> np.ndarray:
        """(B,) float64: how much each row counts in the size of a mini-batch."""
        return np.ones(len(self)) if self.shares is None else self.shares

    def segments(self) -> Batch:
        """Return a row for each segment of each episode (`run_episodes`), with new row ids.

        Waits for the episodes. A segment is a conversation that only grows; an episode with n of
        them becomes n rows. Rows of one episode are in the group of the
        episode; with rollout.episode.credit=segment, segments of different names are in groups of
        their own. All segments of an episode count as one row in mini-batches. The columns of
        `run_episodes` are those of the segment, row_weights says how much it counts, and columns of
        data files are those of its episode. The batch itself with rollout.episode.segments=one.
        ColumnError for a batch that has no episodes.
        """
        self.column("num_turns")
        if segments.LENGTHS not in self.refs:
            return self
        counts = self.lengths(segments.LENGTHS)
        episodes = np.repeat(np.arange(len(self)), counts)
        numbers = np.arange(len(episodes)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = segment_ids(self.ids[episodes], numbers)
        rows = self._at(episodes, ids, self.ids[episodes])
        columns = {}
        for name, ref in rows.refs.items():
            if name not in _OF_EPISODES:
                columns[name] = ref
        for source, function in _TAKEN.items():
            if source in self.refs:
                columns |= rows.map(function).refs
        parents = self.parents[episodes]
        if segments.NAMES in self.refs:
            parents = self._parents_by_name(parents)
        return Batch(self.caller, ids, parents, columns, (1 / counts)[episodes])

    def _parents_by_name(self, parents: Ids) -> Ids:
        """Return new parents (n,) for the n segments of these episodes: one for each pair of a
        group and a segment's name.

        parents (n,): the group of each segment's episode. Fetches the numbers of the names.
        """
        names = self.fetch_for("segments", segments.NAMES)[segments.NAMES]
        assert isinstance(names, Tensor)
        return named_group_ids(parents, names.values().numpy())

    def lengths(self, name: str) -> np.ndarray:
        """(B,) int64: items of each row of a ragged column; waits for the producer."""
        return self.caller.lengths(self.column(name))


def concatenate(batches: Iterable[Batch]) -> Batch:
    """Return the rows of several batches with the same columns, one after the other.

    Ids and parents stay. Rows that different calls made are joined by the ranks that have them, and
    do not move. RowError if there is no batch, or if a row is in two of them; ColumnError if the
    columns differ.
    """
    whole = tuple(batches)
    if not whole or not all(isinstance(batch, Batch) for batch in whole):
        raise RowError(
            f"concatenate: got {[type(batch).__name__ for batch in whole]}, expected a list of at "
            f"least one Batch; write concatenate([one, other])"
        )
    first = whole[0]
    for number, batch in enumerate(whole):
        differing = sorted(set(first.columns) ^ set(batch.columns))
        if differing:
            raise ColumnError(
                f"concatenate: got {differing} in only one of batch 0 and batch {number}, expected "
                f"the same columns in every batch; drop them, or call what writes them on the other"
            )
    ids = np.concatenate([batch.ids for batch in whole])
    if len(np.unique(ids)) < len(ids):
        where = "concatenate"
        got = f"{len(ids)} rows with {len(np.unique(ids))} row ids"
        raise RowError.of(where, got, "each row once", "join parts that do not overlap")
    parents = np.concatenate([batch.parents for batch in whole])
    filled = [batch for batch in whole if len(batch)] or [first]
    parts = {}
    for name in first.columns:
        parts[name] = [batch.column(name) for batch in filled]
    shares = None
    if any(batch.shares is not None for batch in whole):
        shares = np.concatenate([batch.row_shares() for batch in whole])
    return Batch(first.caller, ids, parents, first.caller.join(parts, ids), shares)


def _indices_of(ids: Ids, others: Ids) -> np.ndarray:
    """Return (B,) int64: the index in `others` of each of the ids.

    RowError unless both have the same ids, in any order.
    """
    order = np.argsort(others, kind="stable")
    if len(ids) != len(others) or not np.array_equal(np.sort(ids), others[order]):
        common = len(np.intersect1d(ids, others))
        raise RowError(
            f"batches of {len(ids)} and {len(others)} rows share {common} row ids, expected the "
            f"same ids; join batches that come from one batch of prompts"
        )
    return order[np.searchsorted(others, ids, sorter=order)]


def _check_positions(positions: Sequence[int] | np.ndarray, num_rows: int) -> np.ndarray:
    """Return the positions of some rows of a batch as (n,) int64; negative ones stay.

    Negative positions count from the end. RowError for a mask, for more than one axis, for
    positions outside the batch, and for a row that occurs twice.
    """
    indices = np.asarray(positions)
    if indices.dtype == bool or indices.ndim != 1:
        got = f"{indices.dtype} of shape {indices.shape}"
        raise RowError.of("select", got, "a list of positions", "use where for a mask")
    indices = indices.astype(np.int64)
    if len(indices) and not -num_rows <= indices.min() <= indices.max() < num_rows:
        where = "select"
        got = f"positions from {indices.min()} to {indices.max()}"
        raise RowError.of(where, got, f"0 to {num_rows - 1}", "correct the positions")
    if len(np.unique(indices % max(num_rows, 1))) < len(indices):
        got = f"{len(indices)} positions with repeats"
        do = "use repeat, which makes new row ids"
        raise RowError.of("select", got, "each row at most once", do)
    return indices
