"""Examples of what only a run knows: values that a script reads, tokens of a response.

They come from `--assume NAME=VALUE`, from the section `assume` of the configuration, from
`flow.assume(...)` in the script, or from a short table of the columns that the built-in algorithms
read; the first of them that names a thing counts. Every example that was used is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdflow.data.rows import VALID
from spmdflow.plan.column import KNOWN, UNKNOWN, ColumnForm, form_of
from spmdflow.plan.refusal import Refusal

_BUILT_IN: dict[str, Any] = {"scores": (0.0, 1.0), "costs": 0.0, "reference_kl": 0.01}
"""Scores differ inside of every group of samples, so that dynamic sampling keeps all prompts."""


class Examples:
    """Declared values by name: of columns, of metrics, and of answers as "group.method"."""

    def __init__(
        self, declared: Mapping[str, Any] | None = None, *, is_replayed: bool = False
    ) -> None:
        """is_replayed: metrics are a run's own, so none that is read is an example."""
        self._is_replayed = is_replayed
        self._declared: dict[str, Any] = dict(declared or {})
        self._overruling = set(self._declared)
        self.used: dict[str, Any] = {}
        """Examples that the script came to see, or that decided a length."""
        self.guessed: set[str] = set()
        """Columns that nobody has declared."""

    def add(self, declared: Mapping[str, Any]) -> None:
        """What the script says; the word of configuration and command line counts more."""
        for name, value in declared.items():
            if name not in self._overruling:
                self._declared[name] = value

    def form(self, name: str) -> ColumnForm:
        """What a column looks like."""
        declared = self._declared.get(name)
        if isinstance(declared, str):
            return form_of(name, declared)
        if name not in KNOWN:
            self.guessed.add(name)
        return KNOWN.get(name, UNKNOWN)

    def tokens(self, name: str, ids: np.ndarray, otherwise: int) -> np.ndarray:
        """(n,) int64: items of the rows `ids` of prompts or responses."""
        declared = self._declared.get(name)
        if declared is None or isinstance(declared, str):
            return np.full(len(ids), otherwise, dtype=np.int64)
        self.used[name] = declared
        return _in_turn(name, declared, ids).astype(np.int64)

    def values(self, name: str, ids: np.ndarray, stored: str = "") -> np.ndarray:
        """(n,) float64: example values of a dense column; Refusal if there is none.

        stored: the name that the column had before it was renamed. No row fails in a dry run, so
        `valid` needs no example.
        """
        if (stored or name) in VALID:
            return np.ones(len(ids))
        known = _BUILT_IN | self._declared
        declared = known.get(name, known.get(stored))
        if declared is None or isinstance(declared, str):
            raise Refusal(
                f"reads the column {name!r}, whose values only a run knows; expected an example; "
                f"write flow.assume({name}=0.5) at the top of main, or add --assume {name}=0.5"
            )
        self.used[name] = declared
        return _in_turn(name, declared, ids)

    def metrics(self) -> dict[str, float]:
        """Declared numbers under names; what a script finds in the answer of any call."""
        return {
            name: float(value)
            for name, value in self._declared.items()
            if isinstance(value, int | float) and name not in KNOWN
        }

    def use(self, names: Iterable[str]) -> None:
        """The script came to see these metrics."""
        declared = {} if self._is_replayed else self.metrics()
        self.used.update({name: self._declared[name] for name in names if name in declared})

    def answer(self, label: str) -> Any:
        """The plain value of a call "group.method", if one was declared; else the metrics.

        Any: whatever the script's method returns.
        """
        if label in self._declared:
            self.used[label] = self._declared[label]
            return self._declared[label]
        return self.metrics()


def _in_turn(name: str, declared: Any, ids: np.ndarray) -> np.ndarray:
    """A number for every row, or those of a list in turn, by row id. Any: what a user declared."""
    if isinstance(declared, int | float):
        return np.full(len(ids), float(declared))
    values = declared.tolist() if isinstance(declared, np.ndarray) else declared
    values = values if isinstance(values, Sequence) else ()
    if not values or not all(isinstance(value, int | float) for value in values):
        raise Refusal(
            f"assume {name}: got {declared!r}, expected a number or a list of numbers; write "
            f"{name}=0.5 or {name}=[0, 1]"
        )
    numbers = np.asarray(values, dtype=np.float64)
    return numbers[ids % len(numbers)]
