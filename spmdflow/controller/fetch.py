"""Brings values of a column to the script: the one place where rows pass the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spmdflow.controller.batch import ColumnRef
from spmdflow.controller.frame import Frame, SourceFrame
from spmdflow.controller.inputs import input_of
from spmdflow.data.column import Column, join, read_message
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
