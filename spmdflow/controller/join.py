"""Rows that different calls made as rows of one frame: each rank joins what it has.

Nothing travels: a row stays with the rank that answers for it. Columns of a data file need no
rank at all, as every rank can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdflow.controller.batch import ColumnRef
from spmdflow.controller.frame import Frame, SourceFrame, facts_of, places_of
from spmdflow.controller.inputs import input_of
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError

if TYPE_CHECKING:
    from spmdflow.controller.caller import Caller

Parts = Sequence[ColumnRef]
"""One column's rows in each of the batches that are joined."""


def joined(caller: Caller, columns: Mapping[str, Parts], ids: Ids) -> dict[str, ColumnRef]:
    """Columns of the rows `ids`; columns made by the same calls share a frame again."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, parts in columns.items():
        key = tuple((part.frame.number, part.ids.tobytes()) for part in parts)
        groups.setdefault(key, []).append(name)
    refs: dict[str, ColumnRef] = {}
    for names in groups.values():
        parts = columns[names[0]]
        if all(part.frame is parts[0].frame for part in parts):
            ref = ColumnRef(parts[0].frame, np.concatenate([part.ids for part in parts]))
        else:
            ref = ColumnRef(_frame_of(caller, names, parts, ids), ids)
        refs |= dict.fromkeys(names, ref)
    return refs


def _frame_of(caller: Caller, names: Sequence[str], parts: Parts, ids: Ids) -> Frame | SourceFrame:
    sources = [part.frame for part in parts if isinstance(part.frame, SourceFrame)]
    if not sources:
        return _made(caller, names, parts, ids)
    if len(sources) < len(parts) or len({frame.source for frame in sources}) > 1:
        labels = [getattr(p.frame, "label", getattr(p.frame, "source", "")) for p in parts]
        raise ColumnError(
            f"column {names[0]!r}: its parts come from {' and '.join(dict.fromkeys(labels))}, "
            f"expected calls, or one data file; drop it before concatenate"
        )
    return _read(caller, sources, parts, ids)


def _read(caller: Caller, sources: Sequence[SourceFrame], parts: Parts, ids: Ids) -> SourceFrame:
    """The same rows of the same file under new ids."""
    rows = [frame.rows_of(part.ids) for frame, part in zip(sources, parts, strict=True)]
    lengths = [frame.lengths_of(part.ids) for frame, part in zip(sources, parts, strict=True)]
    known = [part for part in lengths if part is not None]
    first = sources[0]
    return SourceFrame(
        caller.next_number(),
        first.source,
        first.columns,
        ids,
        np.concatenate(rows),
        caller.free,
        np.concatenate(known) if len(known) == len(parts) else None,
    )


def _made(caller: Caller, names: Sequence[str], parts: Parts, ids: Ids) -> Frame:
    """A frame that every rank with rows puts together from the frames of the parts."""
    number = caller.next_number()
    commands: dict[int, dict[str, Any]] = {}
    answer: dict[int, list[Ids]] = {}
    start = 0
    for part in parts:
        assert isinstance(part.frame, Frame)
        own_ids, start = ids[start : start + len(part.ids)], start + len(part.ids)
        for rank, rows in _by_answerer(part.frame, part.ids).items():
            empty = {"operation": "join", "inputs": []}
            command = commands.setdefault(rank, empty)
            command["inputs"].append(input_of(part.frame, names, part.ids[rows]))
            answer.setdefault(rank, []).append(own_ids[rows])
    held = {rank: np.concatenate(lists) for rank, lists in answer.items()}
    for rank, command in commands.items():
        command["ids"] = held[rank]
    ranks = sorted({rank for part in parts for rank in _ranks(part)})
    by_column = dict.fromkeys(names, held)
    label = "batch.concatenate"
    frame = Frame(number, label, tuple(ranks), tuple(names), held, by_column, caller.free, held)

    def done(replies: dict[int, dict[str, Any]], _kept: Parts = tuple(parts)) -> None:
        frame.facts, frame.places = facts_of(replies, frame.answer), places_of(replies)
        caller.transfers.producer_done(frame)

    caller.submit(label, commands, done, number=number)
    return frame


def _by_answerer(frame: Frame, ids: Ids) -> dict[int, np.ndarray]:
    """Positions in ids by the first rank that answers for them."""
    owner = np.full(len(ids), -1, dtype=np.int64)
    for rank, own in frame.answer.items():
        owner[(owner < 0) & np.isin(ids, own)] = rank
    assert (owner >= 0).all(), (frame.label, ids[owner < 0])
    return {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}


def _ranks(part: ColumnRef) -> tuple[int, ...]:
    return part.frame.ranks if isinstance(part.frame, Frame) else ()
