"""The inputs of a call, grouped by the frame that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdflow.controller.batch import Batch
from spmdflow.controller.frame import Frame, SourceFrame
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError, ProtocolError

Group = tuple[Frame | SourceFrame, dict[str, str], Ids]
"""A frame, its columns by their names in the batch, and the ids of the rows there."""


def by_frame(batch: Batch, names: Sequence[str]) -> list[Group]:
    """Columns that share a frame and row ids, which are aligned with the batch."""
    groups: dict[tuple[int, bytes], Group] = {}
    for name in names:
        ref = batch.column(name)
        key = (ref.frame.number, ref.ids.tobytes())
        groups.setdefault(key, (ref.frame, {}, ref.ids))[1][name] = ref.stored
    return list(groups.values())


def ascending(ids: Ids) -> Ids:
    """ids in order, each once."""
    return ids if (ids[1:] > ids[:-1]).all() else np.unique(ids)


def inputs_of(batch: Batch, names: Sequence[str], positions: np.ndarray) -> list[dict[str, Any]]:
    """Message data that tells a rank where its inputs are."""
    return [
        input_of(frame, columns, ids[positions]) for frame, columns, ids in by_frame(batch, names)
    ]


def input_of(frame: Frame | SourceFrame, columns: Mapping[str, str], ids: Ids) -> dict[str, Any]:
    """One frame's part of the inputs; columns: stored names by the names that the call sees."""
    stored = list(dict.fromkeys(columns.values()))
    plain: dict[str, Any] = {"frame": frame.number, "columns": stored, "ids": ids}
    if stored != list(columns):
        plain["seen"] = list(columns.items())
    if isinstance(frame, SourceFrame):
        plain |= {"source": frame.source, "rows": frame.rows_of(ids)}
    return plain


def widest_frame(batch: Batch, names: Sequence[str], ranks: Sequence[int]) -> Frame | None:
    """The frame that gives most of the columns `names` and was made on exactly these ranks."""
    counts = [
        (len(columns), -frame.number, frame)
        for frame, columns, _ in by_frame(batch, names)
        if isinstance(frame, Frame) and set(frame.ranks) == set(ranks)
    ]
    return max(counts, key=lambda count: count[:2])[2] if counts else None


def home_frame(batch: Batch, names: Sequence[str], label: str) -> Frame:
    """The widest frame of the pool that made most of the columns `names`; of a data file's columns,
    that made most of the other columns of the batch."""
    counts: dict[tuple[int, ...], int] = {}
    if not any(isinstance(batch.column(name).frame, Frame) for name in names):
        names = batch.columns
    for frame, columns, _ in by_frame(batch, names):
        if isinstance(frame, Frame):
            counts[frame.ranks] = counts.get(frame.ranks, 0) + len(columns)
    if not counts:
        raise ProtocolError(
            f"{label}: got a batch of {list(names)}, none of which a call has made, expected at "
            f"least one column made by a worker; call a worker method on the batch first"
        )
    pool = max(counts, key=lambda ranks: (counts[ranks], [-rank for rank in ranks]))
    widest = widest_frame(batch, names, pool)
    assert widest is not None
    return widest


def positions_held(batch: Batch, frame: Frame) -> dict[int, np.ndarray]:
    """Positions of the batch by rank: each row at the rank that answers for it in `frame`."""
    ids = next(ref.ids for name in batch.columns if (ref := batch.column(name)).frame is frame)
    holder = {int(i): rank for rank, own in frame.answer.items() for i in own}
    owner = np.array([holder[int(i)] for i in ids], dtype=np.int64)
    return {rank: np.flatnonzero(owner == rank) for rank in frame.ranks}


def source_lengths(frame: SourceFrame, ids: Ids, name: str) -> np.ndarray:
    """Prompt tokens of each row; a file's responses are empty, its other columns not measured."""
    if name == "responses":
        return np.zeros(len(ids), dtype=np.int64)
    lengths = frame.lengths_of(ids) if name == "prompts" else None
    if lengths is None:
        raise ColumnError(
            f"column {name!r} of {frame.source}: its lengths are not known on the controller, "
            f"expected prompts; fetch the column instead"
        )
    return lengths
