"""Finds the user's own code: the line that made a call, and its part of a traceback."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

from spmdflow.errors import SpmdflowError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_BUNDLED = _PACKAGE + "algos" + os.sep
_FOREIGN = ("<", _PACKAGE, *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib")))
_INSIDE = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_SHOWN = 3


def script_line() -> str:
    """The innermost running line of the user's code, as "file:line: text"; empty if there is none.

    Only of this thread.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    number = frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def own_traceback(err: BaseException) -> str:
    """The lines of err's traceback in the user's code.

    Without such lines: the last three, but nothing of a SpmdflowError (it says what to do).
    """
    frames = traceback.extract_tb(err.__traceback__)
    own = []
    for frame in frames:
        if is_own(frame.filename):
            own.append(frame)
    if not own and not isinstance(err, SpmdflowError):
        own = frames[-_SHOWN:]
    return "".join(traceback.StackSummary.from_list(own).format())


@cache
def is_own(file: str) -> bool:
    """Whether a source file is the user's: of no library, and not spmdflow's (scripts are)."""
    if file.startswith(_BUNDLED):
        return True
    return not file.startswith(_FOREIGN) and not any(part in file for part in _INSIDE)
