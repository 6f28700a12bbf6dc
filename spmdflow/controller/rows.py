"""Rows of several calls as rows of one frame, and values of a column for the script.

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
from spmdflow.controller.frame import Frame, SourceFrame, input_of
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
    """Columns of the rows `ids`; columns made by the same calls share a frame again."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, parts in columns.items():
        key = (_one_name(parts), *((part.frame.number, part.ids.tobytes()) for part in parts))
        groups.setdefault(key, []).append(name)
    refs: dict[str, ColumnRef] = {}
    for names in groups.values():
        group = {name: columns[name] for name in names}
        parts = columns[names[0]]
        sources = [part.frame for part in parts if isinstance(part.frame, SourceFrame)]
        if _one_name(parts) and all(part.frame is parts[0].frame for part in parts):
            frame: Frame | SourceFrame = parts[0].frame
            rows = np.concatenate([part.ids for part in parts])
        elif _one_name(parts) and len(sources) == len(parts) and _one_file(sources):
            frame, rows = _read(sender, sources, parts, ids), ids
        else:
            frame, rows = _made(sender, transfers, group, ids), ids
            refs |= {name: ColumnRef(frame, rows, name) for name in names}
            continue
        refs |= {name: ColumnRef(frame, rows, columns[name][0].stored) for name in names}
    return refs


def _one_name(parts: Parts) -> bool:
    return len({part.stored for part in parts}) == 1


def _one_file(sources: Sequence[SourceFrame]) -> bool:
    return len({frame.source for frame in sources}) == 1


def _read(sender: Sender, sources: Sequence[SourceFrame], parts: Parts, ids: Ids) -> SourceFrame:
    """The same rows of the same file under new ids."""
    rows = [frame.rows_of(part.ids) for frame, part in zip(sources, parts, strict=True)]
    lengths = [frame.lengths_of(part.ids) for frame, part in zip(sources, parts, strict=True)]
    known = [part for part in lengths if part is not None]
    first = sources[0]
    return SourceFrame(
        sender.next_number(),
        first.source,
        first.columns,
        ids,
        np.concatenate(rows),
        sender.free,
        np.concatenate(known) if len(known) == len(parts) else None,
    )


def _made(sender: Sender, transfers: Transfers, columns: Mapping[str, Parts], ids: Ids) -> Frame:
    """A frame that every rank with rows puts together from the frames of the parts."""
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
            command["inputs"].append(input_of(part.frame, names, part.ids[rows]))
            answer.setdefault(rank, []).append(own_ids[rows])
    held = {rank: np.concatenate(lists) for rank, lists in answer.items()}
    for rank, command in commands.items():
        command["ids"] = held[rank]
    ranks = sorted({rank for part in first for rank in _ranks(part)})
    by_column = dict.fromkeys(columns, held)
    label = "batch.concatenate"
    frame = Frame(number, label, tuple(ranks), tuple(columns), held, by_column, sender.free)
    kept = tuple(first)

    def done(replies: Replies, _kept: Parts = kept) -> None:
        frame.learn(replies)
        transfers.producer_done(frame)

    sender.submit(label, commands, done, number=number)
    return frame


def _home(parts: Parts, name: str) -> Sequence[int]:
    """Ranks that read the rows of a data file which others have made."""
    for part in parts:
        if isinstance(part.frame, Frame):
            return sorted(part.frame.answer)
    labels = dict.fromkeys(getattr(part.frame, "source", "") for part in parts)
    raise ColumnError(
        f"concatenate: the column {name!r} comes from {' and '.join(labels)}, expected at least "
        f"one part that a call has made, or one data file; drop the column first"
    )


def _by_answerer(part: ColumnRef, home: Sequence[int]) -> dict[int, np.ndarray]:
    """Positions in its ids by the first rank that answers for them; of a file, shared out."""
    if isinstance(part.frame, SourceFrame):
        shares = np.array_split(np.arange(len(part.ids)), len(home))
        return {rank: rows for rank, rows in zip(home, shares, strict=True) if len(rows)}
    owner = np.full(len(part.ids), -1, dtype=np.int64)
    for rank, own in part.frame.answer.items():
        owner[(owner < 0) & np.isin(part.ids, own)] = rank
    assert (owner >= 0).all(), (part.frame.label, part.ids[owner < 0])
    return {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}


def _ranks(part: ColumnRef) -> tuple[int, ...]:
    return part.frame.ranks if isinstance(part.frame, Frame) else ()


def fetch_column(sender: Sender, ref: ColumnRef, name: str) -> tuple[Tensor | list[str], int]:
    """Values of a column in row order, and the bytes that came."""
    ids = np.unique(ref.ids)
    column = _fetch_parts(sender, ref, name, ids)
    place = torch.from_numpy(np.searchsorted(ids, ref.ids))
    return column.take(place).to_value(), column.values.nbytes


def _fetch_parts(sender: Sender, ref: ColumnRef, name: str, ids: Ids) -> Column:
    frame = ref.frame
    if isinstance(frame, SourceFrame):
        parts: dict[int, Ids] = {sender.ranks[0]: ids}
    else:
        sender.wait_for(frame)
        parts = _holders(frame, ids)
    commands = {
        rank: {"operation": "fetch", "input": input_of(frame, {name: ref.stored}, own)}
        for rank, own in parts.items()
    }
    replies = sender.submit(f"fetch {name}", commands).result()
    joined = join([read_message(replies[rank]["column"]) for rank in parts])
    order = np.argsort(np.concatenate(list(parts.values())), kind="stable")
    return joined.take(torch.from_numpy(order))


def _holders(frame: Frame, ids: Ids) -> dict[int, Ids]:
    """Which answering rank gives which rows, each row once: answerers may hold the same."""
    if not len(ids):
        return {next(iter(frame.answer)): ids}
    parts: dict[int, Ids] = {}
    for rank, own in frame.answer.items():
        taken = np.isin(ids, own)
        if taken.any():
            parts[rank], ids = ids[taken], ids[~taken]
    return parts
