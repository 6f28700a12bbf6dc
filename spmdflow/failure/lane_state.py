"""What a lane of a rank is doing, and which rank a call waits for. Knows no messages.

`lane_state_of` reads the stack of a thread. `find_blocking_ranks` takes the states of all ranks of
a call and returns those that the others wait for.
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
from types import CodeType

from spmdflow.failure.user_code import is_own

CODE = "running"
PEERS = "in a collective"
ROWS = "waiting for rows"
DONE = "done"
QUEUED = "queued"
STOPPED = "stopped"
SILENT = "silent"
"""What a rank is doing in a call."""

_STORE = os.path.join("data", "store.py")
_COLLECTIVES = os.path.join("torch", "distributed", "")


@dataclass(frozen=True)
class LaneState:
    """What a rank is doing in a call."""

    kind: str
    text: str = ""
    """The line that it runs. If it runs no code: the state of its process, in words."""
    line: str = ""
    """The line that it was last seen at: "file:line in function: text"."""


def lane_state_of(
    thread: int, until: CodeType | None, *, with_line: bool = True
) -> LaneState | None:
    """Return what a thread is doing inside the function with code `until`; None if it is not in it.

    until None: inside any function. The kind is "in a collective" if the innermost frame is in
    torch.distributed or its line has ".wait(", "waiting for rows" if a frame is in a wait of the
    row store, otherwise "running". The line, "file:line in function: text", is the innermost one of
    the user's code, otherwise the innermost outside torch.distributed. with_line=False: return only
    the kind, which is faster.
    """
    inside = _locations(thread, until)
    if not inside:
        return None
    innermost = inside[0]
    kind = CODE
    if _COLLECTIVES in innermost.file or ".wait(" in innermost.text():
        kind = PEERS
    elif any(each.function == "wait" and each.file.endswith(_STORE) for each in inside):
        kind = ROWS
    if not with_line:
        return LaneState(kind)
    own_code = []
    other_code = []
    for each in inside:
        if is_own(each.file):
            own_code.append(each)
        if _COLLECTIVES not in each.file:
            other_code.append(each)
    shown = (own_code or other_code or inside)[0]
    line = f"{shown.file}:{shown.number} in {shown.function}: {shown.text()}"
    return LaneState(kind, line, line)


@dataclass(frozen=True)
class _Location:
    """Where a function of a thread's stack is."""

    file: str
    function: str
    number: int | None
    """The line, from 1; None between two lines."""

    def text(self) -> str:
        return _line(self.file, self.number or 0)


def _locations(thread: int, until: CodeType | None) -> list[_Location]:
    """Return the stack of a thread, innermost function first, up to the function with code `until`.

    [] if the thread is not in that function. No frame is kept: a frame keeps the tensors of its
    function, such as activations, also after the function has returned. Whoever reads files
    meanwhile would keep them for as long as the thread's Python code runs.
    """
    locations = []
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        locations.append(_Location(code.co_filename, code.co_name, frame.f_lineno))
        frame = frame.f_back
    if frame is None and until is not None:
        return []
    return locations


@lru_cache(maxsize=512)
def _line(file: str, number: int) -> str:
    """Return one line of a source file (numbers from 1), stripped; "" if it cannot be read.

    Does not put the file into linecache, which would keep each file that a sample ever hit,
    megabytes in all. Cached for 512 lines.
    """
    if file in linecache.cache:  # this includes code without a file
        return linecache.getline(file, number).strip()
    with (
        contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError),
        tokenize.open(file) as lines,
    ):
        return next(islice(lines, max(0, number - 1), None), "").strip()
    return ""


def find_blocking_ranks(states: Mapping[int, LaneState]) -> tuple[list[int], str]:
    """Return the ranks that a call waits for, and the reason in words; ([], "") if it is queued.

    states: of all ranks of the call. The first rule that applies decides: stopped ranks; silent
    ranks; none, if a rank waits for rows or is queued; of the ranks that run code, the smallest
    group at one line; if some have finished and others are in a collective, the smaller set (on a
    tie the finished ones); of the ranks in collectives, the smallest group at one line, or all if
    two groups tie.
    """
    kinds: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        kinds.setdefault(state.kind, []).append(rank)
    for kind in (STOPPED, SILENT):
        if kind in kinds:
            return kinds[kind], f"its {states[kinds[kind][0]].text}"
    waiting = kinds.get(PEERS, [])
    done = kinds.get(DONE, [])
    busy = kinds.get(CODE, [])
    if ROWS in kinds or QUEUED in kinds or not (waiting or busy):
        return [], ""
    if waiting:
        where = f"{name_ranks(waiting)} in a collective at {states[waiting[0]].text}"
    else:
        where = ""
    if busy:
        busy = _minority(busy, states)
        others = f"; {name_ranks(waiting)} in a collective, waiting" if waiting else ""
        return busy, f"it is at {states[busy[0]].text}{others}"
    if done and len(done) <= len(waiting):
        return done, f"it has finished this call but skipped a collective: {where}"
    if done:
        return waiting, f"it is in a collective that {name_ranks(done)} skipped: {where}"
    minority = _minority(waiting, states)
    if minority == waiting:
        return waiting, f"all its ranks are in collectives (network or device): {where}"
    majority = []
    for rank in waiting:
        if rank not in minority:
            majority.append(rank)
    elsewhere = f"{name_ranks(majority)} in one at {states[majority[0]].text}"
    return minority, f"it is in a collective at {states[minority[0]].text}, {elsewhere}"


def _minority(ranks: list[int], states: Mapping[int, LaneState]) -> list[int]:
    """Return the smallest group of ranks whose states have the same text (line).

    If the two smallest groups are of equal size, return all `ranks`.
    """
    lines: dict[str, list[int]] = {}
    for rank in ranks:
        lines.setdefault(states[rank].text, []).append(rank)
    fewest, *more = sorted(lines.values(), key=len)
    if more and len(more[0]) == len(fewest):
        return ranks
    return fewest


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text: "rank 3", "ranks 0-2, 5"; "rank " if there are none."""
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
