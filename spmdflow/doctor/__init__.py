"""`spmdflow doctor`: reports what is installed, what works here, and what missing packages are for.

It changes nothing, and works whatever is missing. Exit code 0: a run on the CPU can work here.
Exit code 1: it cannot, and the lines marked `bad` say why.

| file | what |
|---|---|
| `__main__` | the command line and its output |
| `packages` | Python, versions against the ranges of the installed package, extras |
| `node` | torch's build, GPUs, addresses, RUN_DIR, limits, environment |
| `gpu` | NVIDIA's driver, compilers, NCCL's network |
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
    """One line of the report, with the advice below it."""

    topic: str
    name: str
    state: str
    result: str
    """What the doctor saw: a version, a size, a path or an error. Called `found` in the JSON."""
    advice: str = ""
    """What to do, or what the absence costs; empty if nothing needs to be done."""

    @classmethod
    def of(
        cls, topic: str, name: str, result: str, good: bool, advice: str, otherwise: str = WARNING
    ) -> Check:
        """A line in state GOOD if `good`; otherwise in state `otherwise`, with the advice."""
        return cls(topic, name, *((GOOD, result) if good else (otherwise, result, advice)))
