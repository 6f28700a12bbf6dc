"""PPO-Lagrangian: both signals' advantages against loops, and the multiplier's own update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import LagrangeConfig
from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import pad, ragged
from spmdflow.objectives.advantage import (
    LagrangeMultiplier,
    compute_safe_advantages,
    lagrangian,
)
from tests.unit.threaded_ranks import run_ranks, take

NUMBERS = (
    "token_level_rewards",
    "token_level_costs",
    "values",
    "cost_values",
    "old_log_probs",
    "ref_log_probs",
)


def make(seed: int, num_rows: int) -> TensorDict:
    """Rows of one to six tokens, some not chosen by the policy."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (num_rows,), generator=generator)
    size = int(lengths.sum())
    columns = {name: ragged(torch.randn(size, generator=generator), lengths) for name in NUMBERS}
    columns["response_mask"] = ragged(torch.rand(size, generator=generator) < 0.8, lengths)
    return TensorDict(columns, batch_size=[num_rows])


def run(batch: TensorDict, multiplier: float, cfg: AdvantageConfig, **given: Any) -> TensorDict:
    return compute_safe_advantages(
        batch,
        multiplier=multiplier,
        cfg=cfg,
        reduce=given.get("reduce", lambda x: x),
        report=given.get("report", dict),
    )


def discounted(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE of tokens without holes, as the sum of discounted errors."""
    ends = [*values, 0.0][1:]
    errors = [r + gamma * end - v for r, end, v in zip(rewards, ends, values, strict=True)]
    return [
        sum((gamma * lam) ** (u - t) * errors[u] for u in range(t, len(errors)))
        for t in range(len(errors))
    ]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.01, 20.0), st.floats(0.0, 0.5))
def test_advantages_and_returns_equal_their_definitions(
    seed: int, multiplier: float, kl_coef: float
) -> None:
    batch = make(seed, 3)
    cfg = AdvantageConfig(gamma=0.9, lam=0.8, whiten=False, kl_coef=kl_coef)

    made = run(batch, multiplier, cfg)

    columns = {str(name): pad(column).double() for name, column in batch.items()}
    found = {name: pad(made[name]) for name in ("advantages", "returns", "cost_returns")}
    for i in range(3):
        chosen = [t for t, m in enumerate(columns["response_mask"][i].tolist()) if m]
        mine = {name: columns[name][i].tolist() for name in NUMBERS}
        kl = [mine["old_log_probs"][t] - mine["ref_log_probs"][t] for t in chosen]
        signals = {}
        for name, values, sign in (("reward", "values", -1), ("cost", "cost_values", 1)):
            raw = with_holes_moved_back(mine[f"token_level_{name}s"], chosen)
            shaped = [x + sign * kl_coef / 2 * k for x, k in zip(raw, kl, strict=True)]
            old = [mine[values][t] for t in chosen]
            signals[name] = discounted(shaped, old, 0.9, 0.8), old
        for place, t in enumerate(chosen):
            rewarded, old = signals["reward"]
            costly, old_costs = signals["cost"]
            mixed = (rewarded[place] - multiplier * costly[place]) / (1 + multiplier)
            close = {"rel": 1e-5, "abs": 1e-5}  # answers are float32
            assert float(found["advantages"][i, t]) == pytest.approx(mixed, **close)
            returns = rewarded[place] + old[place], costly[place] + old_costs[place]
            assert float(found["returns"][i, t]) == pytest.approx(returns[0], **close)
            assert float(found["cost_returns"][i, t]) == pytest.approx(returns[1], **close)


def with_holes_moved_back(rewards: list[float], chosen: list[int]) -> list[float]:
    """A reward in a hole belongs to the policy's token before it; before the first: to none."""
    ends = [*chosen[1:], len(rewards)][: len(chosen)]
    return [sum(rewards[t:end]) for t, end in zip(chosen, ends, strict=True)]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(0, 100))
def test_advantages_do_not_depend_on_which_rank_has_a_row(seed: int, deal: int) -> None:
    batch = make(seed, 5)
    cfg = AdvantageConfig(kl_coef=0.1)
    owner = torch.randint(0, 3, (5,), generator=torch.Generator().manual_seed(deal))
    rows = [torch.nonzero(owner == rank)[:, 0].tolist() for rank in range(3)]

    whole = run(batch, 2.0, cfg)
    parts = run_ranks(
        lambda rank, reduce: run(take(batch, rows[rank]), 2.0, cfg, reduce=reduce), num_ranks=3
    )

    for rank, mine in enumerate(rows):
        expected = take(whole, mine)
        for name in ("advantages", "returns", "cost_returns"):
            torch.testing.assert_close(
                parts[rank][name].values(), expected[name].values(), rtol=1e-5, atol=1e-6
            )


def test_mixture_goes_from_the_reward_to_the_cost_as_the_multiplier_grows() -> None:
    rewarded = torch.tensor([1.0, -2.0]).double()
    costly = torch.tensor([3.0, 0.5]).double()

    assert lagrangian(rewarded, costly, 0.0).tolist() == rewarded.tolist()
    assert lagrangian(rewarded, costly, 1.0).tolist() == ((rewarded - costly) / 2).tolist()
    torch.testing.assert_close(lagrangian(rewarded, costly, 1e9), -costly)


@given(st.floats(1e-3, 10.0), st.floats(-50, 50), st.floats(-1, 1), st.floats(0.01, 5.0))
def test_multiplier_follows_its_formula_and_stays_positive_and_bounded(
    multiplier: float, cost: float, limit: float, lr: float
) -> None:
    cfg = LagrangeConfig(limit=limit, lr=lr, initial=multiplier, largest=10.0)
    kept = LagrangeMultiplier(cfg)

    kept.update(cost)

    found = kept.value
    exponent = min(max(lr * multiplier * (cost - limit), -20), 20)
    expected = min(math.exp(math.log(multiplier) + exponent), 10.0)
    assert found == pytest.approx(expected, rel=1e-9)
    assert 0 < found <= 10.0


def test_multiplier_grows_above_the_limit_shrinks_below_it_and_resumes() -> None:
    cfg = LagrangeConfig(limit=0.2, lr=1.0)
    multiplier = LagrangeMultiplier(cfg)
    values = []
    for cost in (0.5, 0.2, 0.1):
        multiplier.update(cost)
        values.append(multiplier.value)
    other = LagrangeMultiplier(cfg)

    other.load_state_dict(multiplier.state_dict())

    assert values[0] > 1.0 and values[1] == values[0] > values[2] == other.value


def test_whitened_mixture_has_mean_0_and_variance_1() -> None:
    batch = make(3, 8)

    made = pad(run(batch, 0.7, AdvantageConfig(whiten=True))["advantages"])

    chosen: Tensor = made[pad(batch["response_mask"])]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-6)
    assert float(chosen.var()) == pytest.approx(1, rel=1e-5)
