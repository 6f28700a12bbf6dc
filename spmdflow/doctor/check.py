"""`Check`: one thing that was looked at, whether it is good, and what to do if it is not."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, WARNING, ABSENT, BAD = "ok", "warn", "absent", "bad"
"""ABSENT: an extra that is not installed. BAD: no run can work."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    topic: str
    name: str
    state: str
    found: str
    advice: str = ""
    """What to do, or what is missing without it; empty where there is nothing to say."""
