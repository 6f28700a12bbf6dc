"""Advantages: closed forms, holes in the response, the KL in the reward, whitening over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import lengths_of, pad, ragged
from spmdflow.data.row_id import RowGroups
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.advantage import compute_advantages, gae
from spmdflow.objectives.loss import whiten
from spmdflow.worker_api.metric import Mean
from spmdflow.worker_api.register import map_spec
from tests.unit.threaded_ranks import run_ranks, take


def same(x: Tensor) -> Tensor:
    """The sum over one rank."""
    return x


def test_gae_with_lambda_and_gamma_1_is_reward_to_go_minus_value() -> None:
    rewards = torch.randn(2, 6).double()
    values = torch.randn(2, 6).double()
    mask = torch.ones(2, 6, dtype=torch.bool)

    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)

    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(advantages, to_go - values)


def test_gae_with_lambda_0_is_the_one_step_error() -> None:
    rewards = torch.randn(2, 5).double()
    values = torch.randn(2, 5).double()

    advantages, _ = gae(rewards, values, torch.ones(2, 5, dtype=torch.bool), 0.9, 0.0)

    next_values = torch.cat([values[:, 1:], torch.zeros(2, 1)], dim=1)
    torch.testing.assert_close(advantages, rewards + 0.9 * next_values - values)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.integers(0, 10_000), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_equals_the_sum_of_discounted_errors(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)

    advantages, _ = gae(rewards, values, torch.ones(3, 7, dtype=torch.bool), gamma, lam)

    deltas = rewards - values
    deltas[:, :-1] += gamma * values[:, 1:]
    for t in range(7):
        powers = (gamma * lam) ** torch.arange(7 - t, dtype=torch.float64)
        torch.testing.assert_close(advantages[:, t], (deltas[:, t:] * powers).sum(-1))


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_holes_take_no_time_so_the_result_equals_the_response_without_them(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, 9, generator=generator) < 0.5
    mask[0, 0] = True
    rewards, values = torch.randn(2, 1, 9, generator=generator, dtype=torch.float64)
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, torch.nan)  # what lies in a hole must not matter

    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    short, short_returns = gae(
        rewards[mask][None], values[mask][None], torch.ones(1, int(mask.sum())) > 0, 0.9, 0.8
    )

    torch.testing.assert_close(advantages[mask], short[0])
    torch.testing.assert_close(returns[mask], short_returns[0])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_reward_in_a_hole_belongs_to_the_chosen_token_before_it() -> None:
    mask = torch.tensor([[True, False, True, False, False]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0, 3.0]]).double()

    _, returns = gae(rewards, torch.zeros(1, 5).double(), mask, 0.5, 1.0)

    assert returns.tolist() == [[1 + 0.5 * 5, 0, 5, 0, 0]]


def test_compute_advantages_of_holes_single_tokens_and_masked_rows() -> None:
    batch = _batch([[True, False, True], [True], [False, False]])

    answer, _ = _run(batch, AdvantageConfig(gamma=1.0, lam=1.0, whiten=False))

    assert lengths_of(answer["advantages"]).tolist() == [3, 1, 2]
    rewards = pad(batch["token_level_rewards"])
    values = pad(batch["values"])
    assert answer["returns"].values()[3] == rewards[1, 0]
    torch.testing.assert_close(answer["advantages"].values()[3], rewards[1, 0] - values[1, 0])
    torch.testing.assert_close(answer["returns"].values()[0], rewards[0].sum())
    assert answer["advantages"].values()[[1, 4, 5]].tolist() == [0, 0, 0]
    assert answer["advantages"].dtype == answer["returns"].dtype == torch.float32


def test_kl_in_the_reward_is_taken_from_chosen_tokens_only() -> None:
    batch = _batch([[True, False, True]])
    cfg = AdvantageConfig(gamma=1.0, lam=1.0, whiten=False, kl_coef=0.5, kl_estimator="k1")

    answer, metrics = _run(batch, cfg)

    kl = batch["old_log_probs"].values() - batch["ref_log_probs"].values()
    expected = batch["token_level_rewards"].values().sum() - 0.5 * (kl[0] + kl[2])
    torch.testing.assert_close(answer["returns"].values()[0], expected)
    assert metrics["actor/reference_kl"] == pytest.approx(Mean(float(kl[0] + kl[2]), 2.0))
    assert metrics["actor/reference_kl_per_response"].weight == 1.0
    assert metrics["reward/penalised_mean"].total == pytest.approx(float(expected), rel=1e-5)


def test_compute_advantages_over_ranks_equals_one_rank_also_without_rows() -> None:
    batch = _batch([[True, True], [True, False, True], [True]])
    cfg = AdvantageConfig(whiten=True)
    whole, _ = _run(batch, cfg)

    parts = [take(batch, rows) for rows in ([0, 1], [2], [])]
    answers = run_ranks(lambda rank, reduce: _run(parts[rank], cfg, reduce)[0], 3)

    joined = torch.cat([answer["advantages"].values() for answer in answers])
    torch.testing.assert_close(joined, whole["advantages"].values(), rtol=0, atol=1e-7)
    assert answers[2].batch_size == torch.Size([0])


def test_whitened_advantages_have_mean_0_and_unbiased_variance_1() -> None:
    x = torch.randn(5, 8) * 3 + 7
    mask = torch.rand(5, 8) < 0.6

    inside = whiten(x, mask, same)[mask]

    assert float(inside.mean()) == pytest.approx(0, abs=1e-6)
    assert float(inside.var(unbiased=True)) == pytest.approx(1, abs=1e-5)
    assert (whiten(x, mask, same)[~mask] == 0).all()


@pytest.mark.parametrize("count", [0, 1])
def test_whitening_of_none_or_one_entry_is_finite_and_zero(count: int) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask.view(-1)[:count] = True

    assert (whiten(torch.full((2, 3), 5.0), mask, same) == 0).all()


def test_unknown_estimator_is_refused_with_the_choices() -> None:
    spec = map_spec(compute_advantages)

    with pytest.raises(ConfigError, match="got 'grpo2', expected one of .*dr_grpo, gae"):
        spec.reads_with({"estimator": "grpo2"})


def test_kl_weight_without_reference_is_refused_with_the_missing_columns() -> None:
    batch = _batch([[True]]).exclude("ref_log_probs")

    with pytest.raises(ColumnError, match=r"\['ref_log_probs'\] are missing; expected .* is 0\.1"):
        _run(batch, AdvantageConfig(kl_coef=0.1))


def test_compute_advantages_declares_its_columns() -> None:
    spec = map_spec(compute_advantages)

    assert spec.reads == ("response_mask", "token_level_rewards")
    plain = AdvantageConfig()
    penalised = AdvantageConfig(kl_coef=0.1)
    needed = {"gae": ("values",), "grpo": ()}
    for estimator, columns in needed.items():
        own = (*spec.reads, *columns)
        assert spec.reads_with({"estimator": estimator, "cfg": plain}) == own
        with_kl = spec.reads_with({"estimator": estimator, "cfg": penalised})
        assert with_kl == (*own, "ref_log_probs")
    assert spec.groups
    assert spec.writes == ("advantages", "returns")


def _batch(mask: list[list[bool]]) -> TensorDict:
    torch.manual_seed(0)
    lengths = torch.tensor([len(row) for row in mask])
    total = int(lengths.sum())
    columns = {
        name: ragged(torch.randn(total), lengths)
        for name in ("token_level_rewards", "values", "old_log_probs", "ref_log_probs")
    }
    flat = torch.tensor([place for row in mask for place in row])
    columns["response_mask"] = ragged(flat, lengths)
    return TensorDict(columns, batch_size=[len(mask)])


def _run(
    batch: TensorDict, cfg: AdvantageConfig, reduce: Any = same
) -> tuple[TensorDict, dict[str, Any]]:
    metrics: dict[str, Any] = {}
    answer = compute_advantages(
        batch,
        estimator="gae",
        cfg=cfg,
        groups=_alone(batch, reduce),
        reduce=reduce,
        report=metrics.update,
    )
    return answer, metrics


def _alone(batch: TensorDict, reduce: Any) -> RowGroups:
    """Each row a group of its own."""
    return RowGroups(torch.arange(batch.batch_size[0]), batch.batch_size[0], reduce)
