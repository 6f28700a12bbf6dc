"""Policy losses with gates, means and masks of their own against loops over printed formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.config.algorithm import SurrogateLossConfig
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.objectives.surrogate import POLICY_LOSSES
from tests.unit.objectives.test_surrogate import rows

NAMES = ["sapo", "gmpo", "dppo_tv", "dppo_kl", "dro", "kl_cov", "clip_cov"]


def drawn(seed: int, *, wide: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows whose policy is a probability (some near 1), with marked tokens, all (4, 6)."""
    log_probs, old, advantages, mask = rows(seed, wide=wide)
    generator = torch.Generator().manual_seed(seed + 1)
    marked = (torch.rand(4, 6, generator=generator) < 0.4) & mask
    # log-probabilities are below 0; some tokens are nearly certain
    return -(log_probs.abs() + 1e-3), -(old.abs() + 1e-3), advantages, mask, marked


def token_loss(
    name: str, log_p: float, old: float, a: float, marked: bool, cfg: SurrogateLossConfig
) -> float:
    """The printed formula of one token."""
    ratio = math.exp(log_p - old)
    p = math.exp(log_p)
    mu = math.exp(old)
    low = cfg.clip_ratio
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    if name == "sapo":
        tau = cfg.sapo_temperatures[0] if a > 0 else cfg.sapo_temperatures[1]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    if name == "dro":
        assert cfg.dro_beta is not None
        return -(a * log_p - cfg.dro_beta / 2 * (log_p - old) ** 2)
    if name == "kl_cov":
        return -ratio * a + (cfg.covariance_kl_coef * abs(log_p - old) if marked else 0.0)
    if name == "clip_cov":
        clip = min(max(ratio, 1 - low), 1 + high)
        return 0.0 if marked else -min(ratio * a, clip * a)
    weight = min(ratio, cfg.dual_clip or 20.0)
    if name == "dppo_tv":
        kept = p - mu <= high if a > 0 else p - mu >= -low
    else:
        divergence = mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu + 1e-8) / (1 - p + 1e-8))
        kept = divergence <= high or p <= mu if a > 0 else divergence <= low or p >= mu
    return -weight * a * log_p if kept else 0.0


def row_loss(gaps: list[float], a: float, low: float, high: float) -> float:
    """GMPO's objective of one response: the geometric mean of what each token's clip leaves."""
    sign = 1.0 if a > 0 else -1.0
    kept = [sign * min(sign * gap, sign * min(max(gap, -low), high)) for gap in gaps]
    return -a * math.prod(math.exp(gap) for gap in kept) ** (1 / len(kept))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gmpo"])
@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 10_000),
    st.floats(0.01, 0.5),
    st.none() | st.floats(0.01, 0.9),
    st.none() | st.floats(1.1, 3.0),
)
def test_loss_of_each_token_equals_the_formula(
    name: str, seed: int, low: float, high: float | None, dual: float | None
) -> None:
    dual = dual if name.startswith("dppo") else None
    cfg = SurrogateLossConfig(
        surrogate=name, clip_ratio=low, clip_ratio_high=high, dual_clip=dual, dro_beta=0.3
    )
    cfg.sapo_temperatures = [1.3, 2.1]
    cfg.covariance_kl_coef = 0.7
    log_probs, old, advantages, mask, marked = drawn(seed, wide=1.0)

    terms = PolicyLoss(cfg, 1.0).terms(log_probs, old, advantages, mask, marked)

    for i, t in mask.nonzero().tolist():
        numbers = [float(x[i, t]) for x in (log_probs, old, advantages)]
        one, two, a = numbers
        expected = token_loss(name, one, two, a, bool(marked[i, t]), cfg)
        assert float(terms.loss[i, t]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert float(terms.ratio[i, t]) == pytest.approx(math.exp(one - two), rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.05, 0.5), st.none() | st.floats(0.05, 0.9))
def test_gmpo_is_the_geometric_mean_of_clipped_ratios_and_so_is_its_gradient(
    seed: int, low: float, high: float | None
) -> None:
    cfg = SurrogateLossConfig(surrogate="gmpo", clip_ratio=low, clip_ratio_high=high)
    log_probs, old, advantages, mask, _ = drawn(seed)
    log_probs.requires_grad_()

    terms = PolicyLoss(cfg, 1.0).terms(log_probs, old, advantages, mask)
    lengths = mask.sum(-1)
    ours = (
        (terms.loss * mask).sum()
        if not mask.any()
        else sum((terms.loss[i] * mask[i]).sum() / lengths[i] for i in range(4) if lengths[i])
    )

    expected = 0.0
    for i in range(4):
        gaps = [float((log_probs - old)[i, t].detach()) for t in range(6) if mask[i, t]]
        if gaps:
            of_row = row_loss(gaps, float(advantages[i, 0]), low, low if high is None else high)
            expected += of_row
            found = terms.loss[i][mask[i]]
            torch.testing.assert_close(found, torch.full_like(found, of_row))
    assert isinstance(ours, Tensor) and float(ours.detach()) == pytest.approx(expected)

    if mask.any():
        (slope,) = torch.autograd.grad(ours, log_probs)
        for i, t in mask.nonzero().tolist()[:3]:
            step = 1e-6
            shifted = []
            for sign in (1, -1):
                gaps = (log_probs - old)[i].detach().clone()
                gaps[t] += sign * step
                kept = [float(gap) for gap, counts in zip(gaps, mask[i]) if counts]
                a = float(advantages[i, 0])
                most = low if high is None else high
                shifted.append(row_loss(kept, a, low, most))
            numeric = (shifted[0] - shifted[1]) / (2 * step)
            assert float(slope[i, t]) == pytest.approx(numeric, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_gradient_is_the_capped_ratio_and_0_where_the_token_is_left_out(name: str) -> None:
    cfg = SurrogateLossConfig(surrogate=name, clip_ratio=0.02, dual_clip=1.5)
    log_probs, old, advantages, mask, _ = drawn(3, wide=1.5)
    log_probs.requires_grad_()

    terms = PolicyLoss(cfg, 1.0).terms(log_probs, old, advantages, mask)
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_probs)

    ratio = (log_probs - old).exp().detach().clamp(max=1.5)
    torch.testing.assert_close(slope, torch.where(terms.clipped, 0.0, -ratio * advantages))
    assert terms.clipped.any() and not terms.clipped.all()


def test_sapo_slopes_are_those_of_policy_gradients_where_the_ratio_is_1() -> None:
    log_probs, _, advantages, mask, _ = drawn(4)
    log_probs.requires_grad_()
    cfg = SurrogateLossConfig(surrogate="sapo")

    terms = PolicyLoss(cfg, 1.0).terms(log_probs, log_probs.detach(), advantages, mask)
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_probs)

    # f'(1) = 4 / tau * tau / 4 = 1 for every tau
    torch.testing.assert_close(slope, -advantages.clone())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(name: str, gap: float) -> None:
    log_probs, old, advantages, mask, marked = drawn(2)
    log_probs.requires_grad_()
    more: Any = {"marked": marked} if name.endswith("cov") else {}

    cfg = SurrogateLossConfig(dro_beta=0.1)
    terms = POLICY_LOSSES.find(name)(log_probs, old - abs(gap), advantages, mask, cfg, **more)
    terms = (
        terms
        if gap > 0
        else POLICY_LOSSES.find(name)(log_probs + gap, old, advantages, mask, cfg, **more)
    )
    (slope,) = torch.autograd.grad(terms[0][mask].sum(), log_probs)

    assert torch.isfinite(terms[0][mask]).all() and torch.isfinite(slope).all()


def test_losses_that_lack_a_setting_or_a_column_say_what_to_do() -> None:
    log_probs, old, advantages, mask, _ = drawn(1)

    with pytest.raises(ConfigError, match=r"loss\.dro_beta: got none with loss\.surrogate=dro"):
        PolicyLoss(SurrogateLossConfig(surrogate="dro"), 1.0).terms(
            log_probs, old, advantages, mask
        )
    with pytest.raises(ColumnError, match=r"got no column covariant, .*mark_covariant_tokens"):
        PolicyLoss(SurrogateLossConfig(surrogate="kl_cov"), 1.0).terms(
            log_probs, old, advantages, mask
        )
