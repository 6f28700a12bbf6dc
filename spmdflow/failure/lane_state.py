"""Where a lane of a rank is, and which rank a call waits for. Knows no messages.

`place_of` reads the stack of a thread. `blame` is given what every rank of a call does and says
which of them the others wait for.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType

from spmdflow.failure.user_code import is_own

CODE = "running"
PEERS = "in a collective"
ROWS = "waiting for rows"
DONE = "done"
QUEUED = "not begun"
STOPPED = "stopped"
SILENT = "silent"
"""What a rank does in a call."""

_STORE = os.path.join("data", "store.py")
_COLLECTIVES = os.path.join("torch", "distributed", "")


@dataclass(frozen=True)
class LaneState:
    """What a rank does in a call."""

    kind: str
    text: str = ""
    """Where its Python is; of a rank that runs no code, how it is."""
    line: str = ""
    """Where it was last seen: "file:line in function: text"."""


def place_of(thread: int, until: CodeType | None, *, with_line: bool = True) -> LaneState | None:
    """What a thread does in its frames inside `until` (None: in all); None if it has none.

    The line is the innermost one of the user's code, else of any that is not torch.distributed's.
    """
    innermost = sys._current_frames().get(thread)
    inside: list[FrameType] = []  # innermost first
    frame = innermost
    while frame is not None and frame.f_code is not until:
        inside.append(frame)
        frame = frame.f_back
    if not inside or (frame is None and until is not None):
        return None
    kind = CODE
    if _COLLECTIVES in _file(inside[0]) or ".wait(" in _text(inside[0]):
        kind = PEERS
    elif any(each.f_code.co_name == "wait" and _file(each).endswith(_STORE) for each in inside):
        kind = ROWS
    if not with_line:
        return LaneState(kind)
    own = []
    for each in inside:
        if is_own(_file(each)):
            own.append(each)
    other = []
    for each in inside:
        if _COLLECTIVES not in _file(each):
            other.append(each)
    shown = (own or other or inside)[0]
    name = shown.f_code.co_name
    line = f"{_file(shown)}:{shown.f_lineno} in {name}: {_text(shown)}"
    return LaneState(kind, line, line)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _text(frame: FrameType) -> str:
    number: int | None = frame.f_lineno  # None between two lines, against what typeshed says
    return _line(_file(frame), number or 0)


@lru_cache(maxsize=512)
def _line(file: str, number: int) -> str:
    """One line of a source file. linecache would keep every file that a sample ever hit: MBs."""
    if file in linecache.cache:  # also code without a file
        return linecache.getline(file, number).strip()
    with (
        contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError),
        tokenize.open(file) as lines,
    ):
        return next(islice(lines, max(0, number - 1), None), "").strip()
    return ""


def blame(doing: Mapping[int, LaneState]) -> tuple[list[int], str]:
    """The ranks that a call waits for, and why; none while it waits for rows or for its turn.

    doing: what every rank of the call does.
    """
    kinds: dict[str, list[int]] = {}
    for rank, place in sorted(doing.items()):
        kinds.setdefault(place.kind, []).append(rank)
    for kind in (STOPPED, SILENT):
        if kind in kinds:
            return kinds[kind], f"its {doing[kinds[kind][0]].text}"
    waiting = kinds.get(PEERS, [])
    done = kinds.get(DONE, [])
    busy = kinds.get(CODE, [])
    if ROWS in kinds or QUEUED in kinds or not (waiting or busy):
        return [], ""
    if waiting:
        where = f"{name_ranks(waiting)} in a collective at {doing[waiting[0]].text}"
    else:
        where = ""
    if busy:
        busy = _odd_ones(busy, doing)
        others = f"; {name_ranks(waiting)} in a collective, waiting" if waiting else ""
        return busy, f"it is at {doing[busy[0]].text}{others}"
    if done and len(done) <= len(waiting):
        return done, f"it has finished this call and left out a collective: {where}"
    if done:
        return waiting, f"it is in a collective that {name_ranks(done)} left out: {where}"
    odd = _odd_ones(waiting, doing)
    if odd == waiting:
        return odd, f"its ranks are all in collectives (network or device): {where}"
    rest = []
    for rank in waiting:
        if rank not in odd:
            rest.append(rank)
    there = f"{name_ranks(rest)} in one at {doing[rest[0]].text}"
    return odd, f"it is in a collective at {doing[odd[0]].text}, {there}"


def _odd_ones(ranks: list[int], doing: Mapping[int, LaneState]) -> list[int]:
    """The fewest ranks that are at one line; all ranks if as many are at another."""
    lines: dict[str, list[int]] = {}
    for rank in ranks:
        lines.setdefault(doing[rank].text, []).append(rank)
    fewest, *more = sorted(lines.values(), key=len)
    if more and len(more[0]) == len(fewest):
        return ranks
    return fewest


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"; ranks ascend."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = []
    for first, last in spans:
        texts.append(f"{first}-{last}" if last > first else f"{first}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
