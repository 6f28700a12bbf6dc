"""Which draw of the step a call is for each of its rows. Script thread only; integers."""

from __future__ import annotations

import numpy as np

from spmdflow.data.row_id import Ids

_NONE = np.zeros(0, dtype=np.int64)


class Draws:
    """Counts by row id how often rows were drawn for, in each phase (train, eval) of a step.

    The numbers depend on the script alone: not on ranks, nor on how rows are cut into calls.
    """

    def __init__(self) -> None:
        self._step = -1
        self._counted: dict[str, tuple[Ids, np.ndarray]] = {}

    def take(self, step: int, phase: str, ids: Ids, *, greedy: bool = False) -> np.ndarray:
        """(B,) int64: earlier draws for rows ids (each once); greedy: this call draws nothing."""
        if step != self._step:
            self._step, self._counted = step, {}
        known, counts = self._counted.get(phase, (_NONE, _NONE))
        everyone = np.union1d(known, ids)
        totals = np.zeros(len(everyone), dtype=np.int64)
        totals[np.searchsorted(everyone, known)] = counts
        places = np.searchsorted(everyone, ids)
        earlier = totals[places]
        if not greedy:
            totals[places] += 1
            self._counted[phase] = everyone, totals
        return earlier
