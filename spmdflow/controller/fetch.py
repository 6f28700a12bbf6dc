"""Brings values of a column to the script: the one place where rows pass the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.controller.batch import ColumnRef
from spmdflow.controller.frame import Frame, SourceFrame
from spmdflow.controller.inputs import input_of
from spmdflow.data.column import Column, ColumnSpec, join
from spmdflow.data.row_id import Ids

if TYPE_CHECKING:
    from spmdflow.controller.caller import Caller


def fetch_column(caller: Caller, ref: ColumnRef, name: str) -> tuple[Tensor | list[str], int]:
    """Values of a column in row order, and the bytes that came."""
    ids = np.unique(ref.ids)
    column = _fetch_parts(caller, ref, name, ids)
    place = torch.from_numpy(np.searchsorted(ids, ref.ids))
    return column.take(place).to_value(), column.values.nbytes


def _fetch_parts(caller: Caller, ref: ColumnRef, name: str, ids: Ids) -> Column:
    frame = ref.frame
    if isinstance(frame, SourceFrame):
        parts: dict[int, Ids] = {caller.ranks[0]: ids}
    else:
        caller.wait_for(frame)
        parts = _holders(frame, ids)
    commands = {
        rank: {"operation": "fetch", "input": input_of(frame, {name: ref.stored}, own)}
        for rank, own in parts.items()
    }
    replies = caller.submit(f"fetch {name}", commands).result()
    joined = join([read_column(replies[rank]["column"]) for rank in parts])
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


def to_message(column: Column) -> dict[str, Any]:
    """A column with its values, as message data."""
    raw = column.values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    lengths = None if column.lengths is None else column.lengths.numpy()
    return {"spec": column.spec.to_plain(), "rows": len(column), "lengths": lengths, "bytes": raw}


def read_column(plain: Mapping[str, Any]) -> Column:
    """The inverse of `to_message`."""
    spec = ColumnSpec.from_plain(plain["spec"])
    raw = bytearray(plain["bytes"])
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8)
    values = flat.view(getattr(torch, spec.dtype))
    if spec.kind == "dense":
        return Column("dense", values.view(plain["rows"], *spec.row_shape))
    lengths = torch.from_numpy(np.array(plain["lengths"], dtype=np.int64))
    return Column(spec.kind, values.view(int(lengths.sum()), *spec.row_shape), lengths)
