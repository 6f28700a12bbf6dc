"""Rows of several calls as rows of one result, and values of a column for the script.

Joined rows do not travel: each stays with the rank that answers for it, and columns of a data file
need no rank at all, as every rank can read them. `fetch_column` is the one place where rows pass
the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.controller.batch import ColumnRef
from spmdflow.controller.result import RowResult, SourceRows, input_of
from spmdflow.controller.sender import Sender
from spmdflow.controller.transfers import Transfers
from spmdflow.data.column import Column, join, read_message
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError
from spmdflow.runtime.order import Replies

Parts = Sequence[ColumnRef]
"""One column's rows in each of the batches that are joined."""


def join_columns(
    sender: Sender, transfers: Transfers, columns: Mapping[str, Parts], ids: Ids
) -> dict[str, ColumnRef]:
    """Columns of the rows `ids`; columns made by the same calls share a result again."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, parts in columns.items():
        key = (_one_name(parts), *((part.result.number, part.ids.tobytes()) for part in parts))
        groups.setdefault(key, []).append(name)
    refs: dict[str, ColumnRef] = {}
    for names in groups.values():
        group = {name: columns[name] for name in names}
        parts = columns[names[0]]
        sources = [part.result for part in parts if isinstance(part.result, SourceRows)]
        if _one_name(parts) and all(part.result is parts[0].result for part in parts):
            result: RowResult | SourceRows = parts[0].result
            rows = np.concatenate([part.ids for part in parts])
        elif _one_name(parts) and len(sources) == len(parts) and _one_file(sources):
            result, rows = _read(sender, sources, parts, ids), ids
        else:
            result, rows = _made(sender, transfers, group, ids), ids
            refs |= {name: ColumnRef(result, rows, name) for name in names}
            continue
        refs |= {name: ColumnRef(result, rows, columns[name][0].stored) for name in names}
    return refs


def _one_name(parts: Parts) -> bool:
    return len({part.stored for part in parts}) == 1


def _one_file(sources: Sequence[SourceRows]) -> bool:
    return len({result.source for result in sources}) == 1


def _read(sender: Sender, sources: Sequence[SourceRows], parts: Parts, ids: Ids) -> SourceRows:
    """The same rows of the same file under new ids."""
    rows = [result.rows_of(part.ids) for result, part in zip(sources, parts, strict=True)]
    lengths = [result.lengths_of(part.ids) for result, part in zip(sources, parts, strict=True)]
    known = [part for part in lengths if part is not None]
    first = sources[0]
    return SourceRows(
        sender.next_number(),
        first.source,
        first.columns,
        ids,
        np.concatenate(rows),
        sender.free,
        np.concatenate(known) if len(known) == len(parts) else None,
    )


def _made(
    sender: Sender, transfers: Transfers, columns: Mapping[str, Parts], ids: Ids
) -> RowResult:
    """A result that every rank with rows puts together from the results of the parts."""
    number = sender.next_number()
    commands: dict[int, dict[str, Any]] = {}
    answer: dict[int, list[Ids]] = {}
    first = next(iter(columns.values()))
    home = _home(first, next(iter(columns)))
    start = 0
    for place, part in enumerate(first):
        own_ids, start = ids[start : start + len(part.ids)], start + len(part.ids)
        names = {name: parts[place].stored for name, parts in columns.items()}
        for rank, rows in _by_answerer(part, home).items():
            empty = {"operation": "join", "inputs": []}
            command = commands.setdefault(rank, empty)
            command["inputs"].append(input_of(part.result, names, part.ids[rows]))
            answer.setdefault(rank, []).append(own_ids[rows])
    held = {rank: np.concatenate(lists) for rank, lists in answer.items()}
    for rank, command in commands.items():
        command["ids"] = held[rank]
    ranks = sorted({rank for part in first for rank in _ranks(part)})
    by_column = dict.fromkeys(columns, held)
    label = "batch.concatenate"
    result = RowResult(number, label, tuple(ranks), tuple(columns), held, by_column, sender.free)
    kept = tuple(first)

    def done(replies: Replies, _kept: Parts = kept) -> None:
        result.learn(replies)
        transfers.producer_done(result)

    sender.submit(label, commands, done, number=number)
    return result


def _home(parts: Parts, name: str) -> Sequence[int]:
    """Ranks that read the rows of a data file which others have made."""
    for part in parts:
        if isinstance(part.result, RowResult):
            return sorted(part.result.answer)
    labels = dict.fromkeys(getattr(part.result, "source", "") for part in parts)
    raise ColumnError(
        f"concatenate: the column {name!r} comes from {' and '.join(labels)}, expected at least "
        f"one part that a call has made, or one data file; drop the column first"
    )


def _by_answerer(part: ColumnRef, home: Sequence[int]) -> dict[int, np.ndarray]:
    """Positions in its ids by the first rank that answers for them; of a file, shared out."""
    if isinstance(part.result, SourceRows):
        shares = np.array_split(np.arange(len(part.ids)), len(home))
        return {rank: rows for rank, rows in zip(home, shares, strict=True) if len(rows)}
    owner = np.full(len(part.ids), -1, dtype=np.int64)
    for rank, own in part.result.answer.items():
        owner[(owner < 0) & np.isin(part.ids, own)] = rank
    assert (owner >= 0).all(), (part.result.label, part.ids[owner < 0])
    return {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}


def _ranks(part: ColumnRef) -> tuple[int, ...]:
    return part.result.ranks if isinstance(part.result, RowResult) else ()


def fetch_column(sender: Sender, ref: ColumnRef, name: str) -> tuple[Tensor | list[str], int]:
    """Values of a column in row order, and the bytes that came."""
    ids = np.unique(ref.ids)
    column = _fetch_parts(sender, ref, name, ids)
    place = torch.from_numpy(np.searchsorted(ids, ref.ids))
    return column.take(place).to_value(), column.values.nbytes


def _fetch_parts(sender: Sender, ref: ColumnRef, name: str, ids: Ids) -> Column:
    result = ref.result
    if isinstance(result, SourceRows):
        parts: dict[int, Ids] = {sender.ranks[0]: ids}
    else:
        sender.wait_for(result)
        parts = _holders(result, ids)
    commands = {
        rank: {"operation": "fetch", "input": input_of(result, {name: ref.stored}, own)}
        for rank, own in parts.items()
    }
    replies = sender.submit(f"fetch {name}", commands).result()
    joined = join([read_message(replies[rank]["column"]) for rank in parts])
    order = np.argsort(np.concatenate(list(parts.values())), kind="stable")
    return joined.take(torch.from_numpy(order))


def _holders(result: RowResult, ids: Ids) -> dict[int, Ids]:
    """Which answering rank gives which rows, each row once: answerers may hold the same."""
    if not len(ids):
        return {next(iter(result.answer)): ids}
    parts: dict[int, Ids] = {}
    for rank, own in result.answer.items():
        taken = np.isin(ids, own)
        if taken.any():
            parts[rank], ids = ids[taken], ids[~taken]
    return parts
