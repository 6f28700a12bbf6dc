"""Which part of a box counts on each of the ranks that hold it: over all ranks every element once.

`describe` says what one rank holds as an array of integers, so that thousands of ranks can be told
in one exchange; `own_boxes` divides what several hold. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from spmdflow.blocks.box import Box, subtract_all

Description = npt.NDArray[np.int64]
"""(boxes, 2 + 2 * _DIMS): hash of the tensor's name, number of dimensions, starts, stops; unused
dimensions are (0, 1)."""
_DIMS = 5


def describe(held: Iterable[tuple[str, Box]]) -> Description:
    """(name, box) of everything that one rank holds, in an order that it keeps to."""
    rows = []
    for name, box in held:
        num_dims = len(box.bounds)
        assert num_dims <= _DIMS, (name, box)
        starts, stops = zip(*box.bounds, *[(0, 1)] * (_DIMS - num_dims), strict=True)
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        rows.append((key, num_dims, *starts, *stops))
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2 + 2 * _DIMS)


def own_boxes(everyone: Sequence[Description], place: int) -> list[list[Box]]:
    """For each box that everyone[place] describes, the parts of it that this rank owns.

    What several ranks hold as the same box is divided evenly among them; where boxes overlap
    otherwise, the first holder owns the common part.
    """
    rows = np.concatenate(everyone)
    first = sum(len(each) for each in everyone[:place])
    order = np.argsort(rows[:, 0], kind="stable")
    keys = rows[order, 0]
    mine = range(first, first + len(everyone[place]))
    starts = np.searchsorted(keys, rows[mine, 0], "left")
    stops = np.searchsorted(keys, rows[mine, 0], "right")
    return [
        _own(rows, order[start:stop], number)
        for number, start, stop in zip(mine, starts, stops, strict=True)
    ]


def _own(rows: Description, same_name: npt.NDArray[Any], number: int) -> list[Box]:
    """What row `number` owns; same_name: all rows of its tensor, ascending."""
    starts, stops = rows[:, 2 : 2 + _DIMS], rows[:, 2 + _DIMS :]
    mine = _box(rows[number])
    meets = (starts[same_name] < stops[number]) & (starts[number] < stops[same_name])
    holders = same_name[meets.all(1)]
    if not mine.size or len(holders) <= 1:
        return [mine] if mine.size else []
    if (rows[holders] == rows[number]).all():
        turn = int(rows[number, 0]) % len(holders)
        return _part(mine, int(np.searchsorted(holders, number)), len(holders), turn)
    return subtract_all([mine], [_box(rows[each]) for each in holders if each < number])


def _part(box: Box, number: int, count: int, turn: int) -> list[Box]:
    """Part `number` of `count`, along the first dimension that has so many; else one has all."""
    for dim, (start, stop) in enumerate(box.bounds):
        if stop - start >= count:
            low, high = (start + (stop - start) * each // count for each in (number, number + 1))
            return [Box((*box.bounds[:dim], (low, high), *box.bounds[dim + 1 :]))]
    return [box] if number == turn else []


def _box(row: Description) -> Box:
    bounds = row[2:].reshape(2, _DIMS).T.tolist()[: row[1]]
    return Box(tuple((start, stop) for start, stop in bounds))
