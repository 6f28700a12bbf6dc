"""`Finding`: one thing that a plan proves or that is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A fault: what is wrong, and which knob to turn."""

    check: str
    """Which proof failed: rows, members, order, waits, batches, weights, memory,
    settings, bytes."""
    text: str
    """Got, expected, do; names the edge, the call or the setting."""
