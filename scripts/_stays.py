"""How a trace goes through files, for call_trace.py and settings_trace.py."""

from __future__ import annotations

from collections.abc import Iterable


def stays_of(files: Iterable[str]) -> list[str]:
    """The files of a trace in order, with consecutive entries of one file as one stay."""
    stays: list[str] = []
    for file in files:
        if not stays or stays[-1] != file:
            stays.append(file)
    return stays
