"""How often each row was drawn in a step: responses to one prompt must not repeat each other."""

from __future__ import annotations

from collections import Counter

import numpy as np

from spmdflow.data.row_id import Ids


class DrawCounts:
    """Counts the responses drawn for each row id, in each phase (train, eval) of a step.

    The numbers depend on the script alone: not on ranks, nor on how rows are cut into calls.
    """

    def __init__(self) -> None:
        self._step = -1
        self._counts: dict[str, Counter[int]] = {}

    def take(self, step: int, phase: str, ids: Ids, *, greedy: bool = False) -> np.ndarray:
        """Return (B,) int64: how many earlier calls drew for each row in this step and phase.

        ids: each at most once. Also counts this call, unless greedy, because it draws no random
        numbers. The first call in another step resets all counts.
        """
        if step != self._step:
            self._step = step
            self._counts = {}
        counts = self._counts.setdefault(phase, Counter())
        numbers = ids.tolist()
        earlier = np.array([counts[number] for number in numbers], dtype=np.int64)
        if not greedy:
            counts.update(numbers)
        return earlier
