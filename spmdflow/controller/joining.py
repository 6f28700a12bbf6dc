"""Plans how rows that several calls made become rows of one result: each rank joins what it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdflow.controller.planning import CallContext, Input
from spmdflow.controller.result import ColumnRef, RowResult
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError
from spmdflow.runtime.call import Call


def plan_join(
    columns: Mapping[str, Sequence[ColumnRef]], ids: Ids, context: CallContext
) -> tuple[Call, list[RowResult]]:
    """Return the call that joins parts of columns into one result, and the results of the parts.

    columns: the parts of each column, in order; every column has the same parts. ids: the row ids
    of all their rows in the new result.
    Each rank joins the rows that it answers for. Parts of a data file are split evenly over the
    ranks that answer for the first part that a call has made. The returned results are those of
    calls. ColumnError if all parts come from data files.
    """
    commands: dict[int, dict[str, Any]] = {}
    ids_by_rank: dict[int, list[Ids]] = {}
    name, first = next(iter(columns.items()))
    sources = _results_of_calls(name, first)
    readers = sorted(sources[0].answer)
    start = 0
    for index, part in enumerate(first):
        new_ids = ids[start : start + len(part.ids)]
        start += len(part.ids)
        names = {name: parts[index].stored for name, parts in columns.items()}
        owner = _owners(part, readers)
        for rank in np.unique(owner).tolist():
            rows = np.flatnonzero(owner == rank)
            command = commands.setdefault(rank, {"operation": "join", "inputs": []})
            command["inputs"].append(Input.of(part.result, names, part.ids[rows]).part())
            ids_by_rank.setdefault(rank, []).append(new_ids[rows])
    rows_after = {}
    for rank, lists in ids_by_rank.items():
        rows_after[rank] = np.concatenate(lists)
        commands[rank]["ids"] = rows_after[rank]
    call = context.call(
        "batch.concatenate",
        commands,
        reply_ranks=tuple(rows_after),
        rows_after=rows_after,
        writes=tuple(columns),
        lineage=frozenset().union(*(each.lineage for each in sources)),
    )
    return call, sources


def _owners(part: ColumnRef, readers: Sequence[int]) -> np.ndarray:
    """Return (B,) int64: the rank that joins each row of a part.

    It is the rank that answers for the row. Rows of a data file are split evenly over `readers`.
    """
    if isinstance(part.result, RowResult):
        return part.result.owners(part.ids)
    shares = np.array_split(part.ids, len(readers))
    return np.repeat(readers, [len(share) for share in shares])


def _results_of_calls(name: str, parts: Sequence[ColumnRef]) -> list[RowResult]:
    """Return the results of those parts of a column that calls have made, in order.

    ColumnError if all parts come from data files.
    """
    results = []
    for part in parts:
        if isinstance(part.result, RowResult):
            results.append(part.result)
    if not results:
        labels = dict.fromkeys(part.result.label for part in parts)
        raise ColumnError(
            f"concatenate: the column {name!r} comes from {' and '.join(labels)}, expected at "
            f"least one part that a call has made, or one data file; drop the column first"
        )
    return results
