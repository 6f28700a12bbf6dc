"""Policy losses by name against their formulas in loops, and their gradients by differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.config.algorithm import SurrogateLossConfig
from spmdflow.config.schema import PolicyLossConfig
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.objectives.surrogate import POLICY_LOSSES, policy_loss

NAMES = ["ppo", "gspo", "cispo", "plain"]


def rows(seed: int, *, wide: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs, old_log_probs, advantages of each row alike, mask with holes; (4, 6) float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[3] = False
    old = draw(4, 6) - 3
    return old + wide * draw(4, 6), old, draw(4, 1).expand(4, 6), mask


def token_loss(name: str, ratio: float, a: float, log_prob: float, cfg: Any) -> float:
    """The printed formula of one token; ratio is the sequence's for gspo."""
    low = 1 - cfg.clip_ratio
    high = 1 + (cfg.clip_ratio_high or cfg.clip_ratio)
    clip = min(max(ratio, low), high)
    if name == "cispo":
        return -clip * a * log_prob
    if name == "plain":
        return -a * log_prob
    objective = min(ratio * a, clip * a)
    if cfg.dual_clip is not None and a < 0:
        objective = max(objective, cfg.dual_clip * a)
    return -objective


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.floats(0.05, 0.5),
    st.none() | st.floats(0.05, 0.9),
    st.none() | st.floats(1.1, 3.0),
)
def test_policy_loss_of_each_token_equals_the_formula(
    name: str, seed: int, low: float, high: float | None, dual: float | None
) -> None:
    cfg = SurrogateLossConfig(clip_ratio=low, clip_ratio_high=high, dual_clip=dual)
    log_probs, old, advantages, mask = rows(seed)

    terms = POLICY_LOSSES.find(name)(log_probs, old, advantages, mask, cfg)

    for i in range(4):
        gaps = [float(log_probs[i, t] - old[i, t]) for t in range(6) if mask[i, t]]
        sequence = math.exp(sum(gaps) / len(gaps)) if gaps else 1.0
        for t in range(6):
            if mask[i, t]:
                ratio = math.exp(float(log_probs[i, t] - old[i, t]))
                ratio = sequence if name == "gspo" else ratio
                expected = token_loss(name, ratio, float(advantages[i, t]), log_probs[i, t], cfg)
                assert float(terms.loss[i, t]) == pytest.approx(float(expected), rel=1e-9)
                assert float(terms.ratio[i, t]) == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, -2.4, 0.0),  # too likely and good: held
        (0.5, 2.0, -1.0, -1.0),  # too unlikely and good: free to return
        (1.5, -2.0, 3.0, 3.0),  # too likely and bad: free to return
        (0.5, -2.0, 1.6, 0.0),  # too unlikely and bad: held
    ],
)
def test_clipped_surrogate_and_its_slope_in_each_case(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    log_probs = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)

    cfg = PolicyLossConfig(clip_ratio=0.2)
    mask = torch.ones((), dtype=torch.bool)
    terms = POLICY_LOSSES.find("ppo")(
        log_probs, torch.zeros(()), torch.tensor(advantage).double(), mask, cfg
    )
    terms.loss.backward()

    assert terms.loss.item() == pytest.approx(loss)
    assert log_probs.grad is not None and float(log_probs.grad) == pytest.approx(slope)
    assert bool(terms.clipped) == (slope == 0)


@pytest.mark.parametrize("dual", [None, 1.5])
def test_gradient_of_ppo_equals_finite_differences_and_is_zero_where_clipped(
    dual: float | None,
) -> None:
    cfg = SurrogateLossConfig(clip_ratio=0.2, clip_ratio_high=0.3, dual_clip=dual)
    log_probs, old, advantages, mask = rows(1, wide=1.0)
    log_probs.requires_grad_()
    ppo = POLICY_LOSSES.find("ppo")

    assert torch.autograd.gradcheck(lambda x: ppo(x, old, advantages, mask, cfg).loss, (log_probs,))
    terms = ppo(log_probs, old, advantages, mask, cfg)
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_probs)

    assert torch.equal(terms.clipped, slope == 0)
    assert 0 < int(terms.clipped.sum()) < terms.clipped.numel()


def test_gradient_of_gspo_is_that_of_the_sequence_objective() -> None:
    cfg = SurrogateLossConfig(surrogate="gspo", clip_ratio=0.1, clip_ratio_high=0.2)
    log_probs, old, advantages, mask = rows(7)
    log_probs.requires_grad_()
    lengths = mask.sum(-1).clamp(min=1)

    terms = POLICY_LOSSES.find("gspo")(log_probs, old, advantages, mask, cfg)
    ours = ((terms.loss * mask).sum(-1) / lengths).sum()
    gap = ((log_probs - old) * mask).sum(-1) / lengths
    ratio = gap.exp()
    a = advantages[:, 0]
    objective = torch.minimum(ratio * a, ratio.clamp(0.9, 1.2) * a)[mask.any(-1)].sum()

    assert ours.item() == pytest.approx(-objective.item())
    torch.testing.assert_close(
        torch.autograd.grad(ours, log_probs)[0], torch.autograd.grad(-objective, log_probs)[0]
    )


def test_gradient_of_cispo_is_never_lost_and_weighted_by_the_clipped_ratio() -> None:
    cfg = SurrogateLossConfig(surrogate="cispo", clip_ratio=0.2, clip_ratio_high=0.4)
    log_probs, old, advantages, mask = rows(3, wide=1.0)
    log_probs.requires_grad_()

    terms = POLICY_LOSSES.find("cispo")(log_probs, old, advantages, mask, cfg)
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_probs)

    ratio = (log_probs - old).exp().detach()
    torch.testing.assert_close(slope, -ratio.clamp(0.8, 1.4) * advantages)
    assert torch.equal(terms.clipped, (ratio < 0.8) | (ratio > 1.4)) and terms.clipped.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(name: str, gap: float) -> None:
    log_probs, old, advantages, mask = rows(2)
    log_probs.requires_grad_()

    terms = POLICY_LOSSES.find(name)(log_probs, old - gap, advantages, mask, SurrogateLossConfig())
    (slope,) = torch.autograd.grad(terms.loss[mask].sum(), log_probs)

    assert torch.isfinite(terms.loss[mask]).all() and torch.isfinite(slope).all()


def test_plain_and_ppo_agree_in_gradient_on_samples_of_the_policy_itself() -> None:
    log_probs, _, advantages, mask = rows(4)
    log_probs.requires_grad_()
    slopes = [
        torch.autograd.grad(
            POLICY_LOSSES.find(name)(
                log_probs, log_probs.detach(), advantages, mask, SurrogateLossConfig()
            ).loss.sum(),
            log_probs,
        )[0]
        for name in ("ppo", "cispo", "plain")
    ]

    torch.testing.assert_close(slopes[0], slopes[1])
    torch.testing.assert_close(slopes[0], slopes[2])


def test_own_policy_loss_is_known_by_its_name_and_others_are_refused() -> None:
    @policy_loss("own_test")
    def own(log_probs: Tensor, *rest: Any) -> Any:
        return POLICY_LOSSES.find("plain")(2 * log_probs, *rest)

    log_probs, old, advantages, mask = rows(5)
    cfg = SurrogateLossConfig(surrogate="own_test")

    terms = PolicyLoss(cfg, 1.0).terms(log_probs, old, advantages, mask)

    torch.testing.assert_close(terms.loss, -2 * advantages * log_probs)
    with pytest.raises(ConfigError, match="got 'nothing', expected one of cispo, clip_cov"):
        PolicyLoss(SurrogateLossConfig(surrogate="nothing"), 1.0)
    with pytest.raises(ConfigError, match="not taken by spmdflow.objectives.surrogate"):
        policy_loss("gspo")(own)


@pytest.mark.parametrize("returned", ["loss", "two", "sums"])
def test_own_policy_loss_that_returns_other_things_is_refused_with_both(returned: str) -> None:
    @policy_loss("own_test")
    def own(log_probs: Tensor, *rest: Any) -> Any:
        made = {"loss": log_probs, "two": (log_probs,) * 2, "sums": (log_probs.sum(-1),) * 3}
        return made[returned]

    loss = PolicyLoss(SurrogateLossConfig(surrogate="own_test"), 1.0)

    with pytest.raises(
        ProtocolError, match=r"\('own_test'\): got .*\(loss, ratio, clipped\), each"
    ):
        loss.terms(*rows(5))


def test_ppos_own_settings_are_those_of_the_chooser_with_its_defaults() -> None:
    log_probs, old, advantages, mask = rows(6)

    one = PolicyLoss(PolicyLossConfig(), 1.0).terms(log_probs, old, advantages, mask)
    other = PolicyLoss(SurrogateLossConfig(), 1.0).terms(log_probs, old, advantages, mask)

    assert torch.equal(one.loss, other.loss)
