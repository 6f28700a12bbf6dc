"""Finds the user's own code: the line that made a call, and its part of a traceback."""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path

from spmdflow.errors import SpmdflowError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_BUNDLED = _PACKAGE + "algos" + os.sep
_LIBRARIES = ("<", _PACKAGE, *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib")))
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_NUM_LINES = 3
"""Lines of a traceback that are shown if none of them is in the user's code."""


def own_traceback(err: BaseException) -> str:
    """Return the lines of err's traceback in the user's code, as text.

    If there are none: the last three frames, or "" for a SpmdflowError, whose message says what to
    do. See `is_own`.
    """
    frames = traceback.extract_tb(err.__traceback__)
    own_frames = []
    for frame in frames:
        if is_own(frame.filename):
            own_frames.append(frame)
    if not own_frames and not isinstance(err, SpmdflowError):
        own_frames = frames[-_NUM_LINES:]
    return "".join(traceback.StackSummary.from_list(own_frames).format())


@cache
def is_own(file: str) -> bool:
    """Return whether a source file is the user's: in no library, and not in spmdflow.

    The bundled scripts (spmdflow/algos) count as the user's. Libraries are the standard library,
    site-packages and dist-packages, and code without a file ("<string>"). Cached.
    """
    if file.startswith(_BUNDLED):
        return True
    is_library = file.startswith(_LIBRARIES) or any(part in file for part in _LIBRARY_FOLDERS)
    return not is_library
