"""pass_at_k against all subsets, and its expected gradient against that of the best of k."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.config.algorithm import GroupAdvantageConfig
from spmdflow.data.row_id import RowGroups, positions_in_groups
from spmdflow.objectives.estimator import Samples, pass_at_k


def advantages_of(scores: list[float], groups: list[int], best_of: int) -> list[float]:
    """The estimator's advantage of each row, given rows of one token."""
    places, largest = positions_in_groups(np.array(groups))
    index = torch.tensor(groups)
    place = torch.from_numpy(places)
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    samples = Samples(
        {"token_level_rewards": rewards},
        torch.ones_like(rewards, dtype=torch.bool),
        RowGroups(index, max(groups) + 1, lambda x: x, place, largest),
        lambda x: x,
    )
    found, _ = pass_at_k(samples, GroupAdvantageConfig(best_of=best_of))
    return found[:, 0].tolist()


def definition(scores: list[float], i: int, k: int) -> float:
    """The mean over all sets of k samples with i of what i adds to their best."""
    others = scores[:i] + scores[i + 1 :]
    k = max(2, min(k or len(scores), len(scores)))
    gains = [max(scores[i] - max(rest), 0.0) for rest in combinations(others, k - 1)]
    return sum(gains) / len(gains)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, 1.0, -0.5, 2.25]) | st.floats(-3, 3), min_size=1, max_size=6
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 7),
    st.randoms(use_true_random=False),
)
def test_advantage_is_what_a_sample_adds_to_the_best_of_k(
    by_prompt: list[list[float]], best_of: int, order: object
) -> None:
    rows = [(g, i) for g, scores in enumerate(by_prompt) for i in range(len(scores))]
    order.shuffle(rows)  # type: ignore[attr-defined]

    found = advantages_of([by_prompt[g][i] for g, i in rows], [g for g, _ in rows], best_of)

    for value, (g, i) in zip(found, rows, strict=True):
        scores = by_prompt[g]
        expected = scores[0] if len(scores) == 1 else definition(scores, i, best_of)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("n", "k"), [(3, 2), (4, 2), (4, 3), (3, 3)])
def test_expected_gradient_is_that_of_the_best_of_k(n: int, k: int) -> None:
    rewards = [0.0, 1.0, 0.3]  # of three answers
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64, requires_grad=True)

    def probability(draws: tuple[int, ...]) -> Tensor:
        return torch.stack([logits.log_softmax(0)[d] for d in draws]).sum().exp()

    best = sum(max(rewards[d] for d in s) * probability(s) for s in product(range(3), repeat=k))
    (exact,) = torch.autograd.grad(best, logits)  # type: ignore[arg-type]

    expected = torch.zeros(3, dtype=torch.float64)
    for draws in product(range(3), repeat=n):
        weights = advantages_of([rewards[d] for d in draws], [0] * n, k)
        log_probs = logits.log_softmax(0)
        mean = sum(w * log_probs[d] for w, d in zip(weights, draws, strict=True)) / n
        (gradient,) = torch.autograd.grad(mean, logits)  # type: ignore[arg-type]
        expected += k * gradient * probability(draws).detach()

    torch.testing.assert_close(expected, exact)
