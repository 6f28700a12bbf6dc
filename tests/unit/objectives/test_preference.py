"""Preference losses against loops in float64, their gradients, and the loss of split pairs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import PreferenceLossConfig
from spmdflow.data.ragged import ragged_from_rows, select_rows
from spmdflow.models.rows import pair_rows
from spmdflow.objectives.preference import (
    AnswerPair,
    PairLoss,
    bradley_terry,
    dpo,
    hinge,
    ipo,
    kto,
    score_slopes,
    slic,
)
from spmdflow.workers.micro_batch import micro_batches
from tests.outputs import scalar_output

BETA = 0.3
CFG = PreferenceLossConfig(beta=BETA)
SMOOTHED = PreferenceLossConfig(beta=BETA, label_smoothing=0.1)
WEIGHTS = torch.randn(50, generator=torch.Generator().manual_seed(1)).double()
"""Scores of tokens: a reward model that is a table."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loop_dpo(c: float, r: float, rc: float, rr: float) -> float:
    share = sigmoid(BETA * (c - rc - r + rr))
    return -0.9 * math.log(share) - 0.1 * math.log(1 - share)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., float], int]] = {
    "bradley_terry": (bradley_terry, lambda c, r: -math.log(sigmoid(c - r)), 2),
    "dpo": (lambda *x: dpo(AnswerPair(*x), SMOOTHED), loop_dpo, 4),
    "ipo": (
        lambda *x: ipo(AnswerPair(*x), CFG),
        lambda c, r, rc, rr: (c - rc - r + rr - 1 / (2 * BETA)) ** 2,
        4,
    ),
    "hinge": (
        lambda *x: hinge(AnswerPair(*x), CFG),
        lambda c, r, rc, rr: max(0.0, 1 - BETA * (c - rc - r + rr)),
        4,
    ),
    "slic": (
        lambda *x: slic(AnswerPair(*x, *x), CFG),
        lambda c, r: max(0.0, 1 - BETA * (c - r)),
        2,
    ),
}


def draw(seed: int, count: int, rows: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(rows, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_loss_equals_its_formula_pair_by_pair(name: str, seed: int) -> None:
    loss, formula, count = LOSSES[name]
    inputs = draw(seed, count)

    made = loss(*inputs)

    for row, value in enumerate(made.tolist()):
        expected = formula(*(x[row].item() for x in inputs))
        assert value == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_finite_differences(name: str) -> None:
    loss, _, count = LOSSES[name]
    inputs = [x.requires_grad_() for x in draw(3, count)]

    assert torch.autograd.gradcheck(loss, inputs)


@given(seed=st.integers(0, 1000), kl=st.floats(-2, 2))
@settings(max_examples=20, deadline=None)
def test_kto_equals_its_formula_row_by_row(seed: int, kl: float) -> None:
    log_probs, ref = draw(seed, 2)
    log_probs.requires_grad_()
    good = torch.tensor([True, False, True, True, False, False, True])
    drift = torch.tensor(kl, dtype=torch.float64, requires_grad=True)

    made = kto(log_probs, ref, good, drift, PreferenceLossConfig(beta=BETA, undesirable_weight=0.5))

    for row, value in enumerate(made.tolist()):
        gain = BETA * (log_probs[row].item() - ref[row].item() - max(kl, 0.0))
        sign, weight = (1, 1.0) if good[row] else (-1, 0.5)
        assert value == pytest.approx(weight * (1 - sigmoid(sign * gain)), rel=1e-10)
    made.sum().backward()
    assert drift.grad is None and log_probs.grad is not None
    assert bool((log_probs.grad[good] < 0).all() and (log_probs.grad[~good] > 0).all())


def test_policy_that_is_its_reference_has_the_known_losses() -> None:
    (same,) = draw(0, 1)
    zero = torch.zeros_like(same)

    assert torch.allclose(bradley_terry(same, same), zero + math.log(2))
    assert torch.allclose(dpo(AnswerPair(same, zero, same, zero), CFG), zero + math.log(2))
    assert torch.allclose(
        ipo(AnswerPair(same, zero, same, zero), PreferenceLossConfig(beta=0.5)), zero + 1
    )
    assert torch.allclose(hinge(AnswerPair(same, zero, same, zero), CFG), zero + 1)
    assert torch.allclose(slic(AnswerPair(same, same, zero, zero), CFG), zero + 1)
    good = torch.ones(7, dtype=torch.bool)
    assert torch.allclose(kto(same, same, good, torch.tensor(0.0), CFG), zero + 0.5)


def test_extreme_margins_stay_finite() -> None:
    far = torch.tensor([1e4, -1e4])
    zero = torch.zeros(2)

    losses = bradley_terry(far, zero)

    assert losses.tolist() == [0.0, 1e4]
    assert dpo(AnswerPair(far, zero, zero, zero), PreferenceLossConfig(beta=1.0)).isfinite().all()


def make_pairs(seed: int, count: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (2, count), generator=generator)
    rows = [torch.randint(0, 50, (int(n),), generator=generator) for n in lengths.sum(0)]
    return TensorDict({"prompts": ragged_from_rows(rows), "chosen_tokens": lengths[0]}, [count])


@given(seed=st.integers(0, 1000), count=st.integers(1, 6), parts=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_pairs_split_over_ranks_and_micro_batches_give_the_loss_of_whole_pairs(
    seed: int, count: int, parts: int
) -> None:
    pairs = make_pairs(seed, count)
    whole = WEIGHTS.clone().requires_grad_()
    losses = []
    for row, cut in zip(pairs["prompts"].unbind(), pairs["chosen_tokens"].tolist()):
        losses.append(bradley_terry(whole[row[:cut]][-1], whole[row[cut:]][-1]))
    expected = torch.stack(losses).mean()
    expected.backward()  # type: ignore[no-untyped-call]

    weights = WEIGHTS.clone().requires_grad_()
    loss = PairLoss()
    total = 0.0
    for rank in (0, 1):  # two ranks with uneven shares of the pairs, one of them perhaps empty
        mine = select_rows(
            pairs, torch.arange(count)[: count // 3] if rank else torch.arange(count)[count // 3 :]
        )
        rows = pair_rows(mine)
        ends = [WEIGHTS[row[-1]] for row in rows["prompts"].unbind()]
        scores = torch.stack(ends) if ends else torch.zeros(0, dtype=torch.float64)
        made = score_slopes(scores[: len(mine)], scores[len(mine) :]) if ends else (scores, scores)
        rows["pair_losses"] = torch.cat([made[0], made[0]])
        rows["score_slopes"] = made[1]
        micros = micro_batches(
            rows, num_micro_batches=parts, by_tokens=False, device=torch.device("cpu")
        )
        for micro in micros:
            share, _ = loss(scalar_output(weights[micro.input_ids]), micro, {"pairs": count})
            share.backward()  # type: ignore[no-untyped-call]
            total += share.item()

    assert total == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(weights.grad, whole.grad, rtol=1e-12, atol=1e-14)
