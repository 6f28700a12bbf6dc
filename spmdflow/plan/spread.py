"""Lengths of responses as they usually are in a run: few are long, and these decide.

Nobody knows the lengths before a run. A plan assumes a lognormal distribution that is cut at the
largest length which the settings allow (a response that would be longer ends there). Its mean after
the cut is the assumed one.

That responses of reinforcement learning have a long tail, and that it decides the time of
generation, is what systems for it report (RollPacker, arXiv 2509.21009; APRIL, arXiv 2509.18521;
both September 2025). The coefficient of variation of 1 (standard deviation = mean, before the cut)
is this project's choice: the 99th percentile is then seven times the 50th. `--spread` changes it.

Without an assumed mean it is half of the largest length. NeMo-RL's published runs (its performance
summary, v0.4, December 2025) have means of 0.27 (Llama 3.1 8B) and 0.80 (Qwen3 32B) of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist

import numpy as np

USUAL_VARIATION = 1.0
"""Coefficient of variation before the cut."""
MEAN_SHARE = 0.5
"""Mean of the largest length, if nothing is assumed."""
_SEED = 0
_HALVINGS = 60


@dataclass(frozen=True)
class Spread:
    """A lognormal distribution of response lengths, cut at `most`."""

    mean: float
    """Mean tokens after the cut."""
    most: int
    variation: float = USUAL_VARIATION

    def lengths(self, count: int) -> np.ndarray:
        """Return (count,) int64: tokens of responses in random order, the same in every call.

        They are the quantiles (i + 0.5) / count, rounded, at least 1. So their mean is that of the
        distribution also for few rows.
        """
        sigma = sqrt(log(1 + self.variation**2))
        normal = NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        low = log(1e-3)
        high = log(self.most) + sigma * float(z.max(initial=0.0)) + 1
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._cut(middle, sigma * z).mean() < self.mean:
                low = middle
            else:
                high = middle
        lengths = np.maximum(np.rint(self._cut(high, sigma * z)), 1).astype(np.int64)
        return np.random.default_rng(_SEED).permutation(lengths)

    def _cut(self, location: float, spread: np.ndarray) -> np.ndarray:
        return np.minimum(exp(location) * np.exp(spread), self.most)

    def __str__(self) -> str:
        text = f"lognormal, mean {self.mean:,.0f}, coefficient of variation {self.variation:g}"
        return f"{text}, at most {self.most:,}"
