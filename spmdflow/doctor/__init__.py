"""`spmdflow doctor`: what is installed, what works here, and what a missing package is needed for.

Only reports; changes nothing and works whatever is missing. Exit code 0: a run on the CPU
can work here; 1: it cannot, and the lines marked `bad` say why.

| file | what |
|---|---|
| `__main__` | the command line and what it prints |
| `packages` | Python, versions against the ranges of the installed package, extras |
| `node` | torch's build, GPUs, addresses, RUN_DIR, limits, environment |
"""

from __future__ import annotations

from dataclasses import dataclass

GOOD = "ok"
WARNING = "warn"
ABSENT = "absent"
BAD = "bad"
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

    @classmethod
    def of(
        cls, topic: str, name: str, found: str, good: bool, advice: str, otherwise: str = WARNING
    ) -> Check:
        """A line in state GOOD if `good`, else in state `otherwise` with the advice."""
        return cls(topic, name, *((GOOD, found) if good else (otherwise, found, advice)))
