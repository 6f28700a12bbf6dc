"""Estimates from several samples per prompt: pass@k and majority@k, with intervals.

Pure functions of plain numbers. A prompt has n samples. Each is right or wrong (1 or 0) and has an
answer. Estimates are means over prompts, with intervals by bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import NamedTuple

import numpy as np

NUM_RESAMPLES = 1000
COVERAGE = 0.95


class Estimate(NamedTuple):
    """A mean over prompts and the ends of its interval (`COVERAGE`)."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of a prompt's n samples, drawn without replacement, include a right one.

    pass@k = 1 - C(n - c, k) / C(n, k), unbiased for k fresh samples (Chen et al. 2021, eq. 1).
    0 <= num_right <= num_samples, 1 <= k <= num_samples.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def reported_ks(num_samples: int) -> list[int]:
    """Return the values of k for n samples: powers of two up to n, and n itself, ascending.

    6 samples: [1, 2, 4, 6].
    """
    powers = []
    for exponent in range(num_samples.bit_length()):
        powers.append(1 << exponent)
    return sorted({k for k in powers if k <= num_samples} | {num_samples})


def majority(answers: Sequence[str | None], right: Sequence[float]) -> float:
    """Return the accuracy of the most frequent answer to one prompt (Wang et al. 2023).

    answers (n,): None is no vote. right (n,): 1 or 0; the accuracy of an answer is the mean over
    its samples. If answers tie, the result is the mean over these, the expectation of a random
    choice. Without any vote it is 0.
    """
    votes: dict[str, list[float]] = {}
    for answer, value in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(value)
    most = max(map(len, votes.values()), default=0)
    winners = []
    for values in votes.values():
        if len(values) == most:
            winners.append(sum(values) / most)
    if winners:
        return sum(winners) / len(winners)
    return 0.0


def prompt_accuracies(
    answers: Sequence[Sequence[str | None]], right: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """Return {"pass@k": P numbers, ..., "maj@n": P numbers}, one number for each of P prompts.

    k: see `reported_ks`. answers, right: P lists of n samples each, n the same for all and at least
    1. For pass@k a sample is right if its value is at least 0.5.
    """
    num_samples = len(right[0])
    counts = []
    for row in right:
        counts.append(sum(value >= 0.5 for value in row))
    accuracies = {}
    for k in reported_ks(num_samples):
        accuracies[f"pass@{k}"] = [pass_at_k(num_samples, count, k) for count in counts]
    votes = []
    for names, row in zip(answers, right, strict=True):
        votes.append(majority(names, row))
    return accuracies | {f"maj@{num_samples}": votes}


def estimates(numbers: Mapping[str, Sequence[float]], *, seed: int) -> dict[str, Estimate]:
    """Mean and percentile bootstrap interval over prompts, for each name in `numbers`.

    Interval: from the 2.5th to the 97.5th percentile of the means of `NUM_RESAMPLES` resamples of
    the P prompts (Efron 1979). All names share the resamples, which depend only on the seed and P.
    numbers: name -> one value for each of the P >= 1 prompts.
    """
    table = np.array([numbers[name] for name in numbers], dtype=np.float64)  # (names, P)
    num_prompts = table.shape[1]
    noise = np.random.Generator(np.random.PCG64(seed))
    drawn = []
    for _ in range(NUM_RESAMPLES):
        drawn.append(table[:, noise.integers(num_prompts, size=num_prompts)].mean(1))
    ends = [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2]
    lows, highs = np.quantile(np.array(drawn), ends, axis=0)
    result = {}
    for name, mean, low, high in zip(numbers, table.mean(1), lows, highs, strict=True):
        result[name] = Estimate(float(mean), float(low), float(high))
    return result


def estimate_metrics(estimates: Mapping[str, Estimate], prefix: str) -> dict[str, float]:
    """Return the metrics prefix/name, prefix/name_low and prefix/name_high of each estimate."""
    metrics: dict[str, float] = {}
    for name, estimate in estimates.items():
        metrics[f"{prefix}/{name}"] = estimate.value
        metrics[f"{prefix}/{name}_low"] = estimate.low
        metrics[f"{prefix}/{name}_high"] = estimate.high
    return metrics


def evaluation_table(
    title: str, estimates: Mapping[str, Estimate], facts: Mapping[str, float]
) -> str:
    """Return a text table of the estimates with their intervals, and of other facts.

    The title, a row for each estimate, a row for each fact. Ends with a newline. ValueError if
    there are neither estimates nor facts.
    """
    width = max(map(len, [*estimates, *facts]))
    lines = [title, f"{'':{width}}   value   {COVERAGE:.0%} interval"]
    for name, (value, low, high) in estimates.items():
        lines.append(f"{name:{width}} {value:7.4f}   {low:.4f} to {high:.4f}")
    lines += [f"{name:{width}} {value:7.4g}" for name, value in facts.items()]
    return "\n".join(lines) + "\n"
