"""A dataclass that notes whenever its code runs."""

from __future__ import annotations

from dataclasses import dataclass, field

CALLS: list[str] = []


@dataclass
class NoisyRecord:
    """With a field that `__post_init__` sets."""

    left: int
    right: tuple[int, ...]
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        CALLS.append("__post_init__")
        self.made = 3

    def __setattr__(self, name: str, value: object) -> None:
        CALLS.append(f"set {name}")
        object.__setattr__(self, name, value)
