"""Log-probs, KL estimates, aggregation and the two losses: closed forms, finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import PolicyLossConfig, ValueLossConfig
from spmdflow.data.ragged import ragged
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.objectives.kl import KL_ESTIMATORS, kl_estimate
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.objectives.loss import AGGREGATIONS, Loss, aggregate, mask_totals, masked_sum
from spmdflow.objectives.policy import PolicyLoss, PreUpdateMetrics, ValueLoss, clipped_value_loss
from spmdflow.worker_api.metric import Mean
from tests.outputs import entropy_of, log_probs_of, of_logits, scalar_output


@dataclass
class Rows:
    """A micro-batch of responses only: position t predicts response token t."""

    targets: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def predicting(self) -> Tensor:
        return torch.arange(self.response_mask.numel())

    def spread(self, x: Tensor) -> Tensor:
        return x.view(self.response_mask.shape)

    def read(self, x: Tensor) -> CausalOutput | ScalarOutput:
        """Logits (b, R, V) or values (b, R) as a loss gets them."""
        return of_logits(x, self.targets) if x.dim() == 3 else scalar_output(x)


def test_mean_of_k1_and_k3_over_the_policys_samples_is_the_kl() -> None:
    policy, other = torch.randn(2, 6).double().log_softmax(-1)
    kl = (policy.exp() * (policy - other)).sum()

    for name in ("k1", "k3"):
        estimate = (policy.exp() * kl_estimate(name, policy, other)).sum()
        torch.testing.assert_close(estimate, kl)


def test_k2_has_half_the_mean_square_and_the_gradient_of_the_kl() -> None:
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    other = torch.randn(6).double().log_softmax(-1)
    weight = policy.exp().detach()
    d = (policy - other).detach()

    estimate = (weight * kl_estimate("k2", policy, other)).sum()

    torch.testing.assert_close(estimate.detach(), (weight * d * d).sum() / 2)
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - other)).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("name", ["k1+", "k3+", "abs+"])
def test_straight_through_estimate_has_its_own_value_and_the_gradient_of_the_kl(name: str) -> None:
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    other = torch.randn(6).double().log_softmax(-1)
    weight = policy.exp().detach()

    each = kl_estimate(name, policy, other)

    for found, one, two in zip(each.tolist(), policy.tolist(), other.tolist(), strict=True):
        gap = one - two
        values = {"k1+": gap, "k3+": math.exp(-gap) - 1 + gap, "abs+": abs(gap)}
        assert found == pytest.approx(values[name])
    (found,) = torch.autograd.grad((weight * each).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - other)).sum(), logits)
    torch.testing.assert_close(found, exact)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.floats(-500, 500))
def test_kl_estimates_are_finite_and_k2_k3_abs_never_negative(difference: float) -> None:
    d = torch.tensor(difference)
    found = {name: kl_estimate(name, d, torch.tensor(0.0)) for name in KL_ESTIMATORS}

    assert all(math.isfinite(x) for x in found.values())
    assert min(float(found[name]) for name in ("k2", "k3", "abs")) >= 0


def test_k3_of_a_tiny_difference_keeps_its_digits() -> None:
    tiny = torch.tensor(1e-3)

    assert float(kl_estimate("k3", tiny, torch.zeros(()))) == pytest.approx(5e-7, rel=1e-3)


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"got 'k9', expected one of abs, abs\+, k1"):
        kl_estimate("k9", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ConfigError, match="got 'mean', expected one of"):
        PolicyLoss(PolicyLossConfig(aggregation="mean"), 1.0)
    with pytest.raises(ConfigError, match="got 'k9'"):
        PolicyLoss(PolicyLossConfig(kl_estimator="k9"), 1.0)
    with pytest.raises(ConfigError, match="temperature: got 0.0; expected above 0"):
        PolicyLoss(PolicyLossConfig(), 0.0)


def test_aggregation_modes_weigh_tokens_and_sequences_as_their_formulas() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    totals = mask_totals(mask.sum(-1)) | {"budget": 2.0 * 8}  # two sequences of at most 8

    found = {mode: float(aggregate(x, mask, totals, mode)) for mode in AGGREGATIONS}

    assert totals == {"tokens": 4.0, "sequences": 2.0, "budget": 16.0}
    assert found == {
        "token-mean": 16 / 4,
        "sequence-mean-token-mean": (2 + 10) / 2,
        "sequence-mean-token-sum": (6 + 10) / 2,
        "sequence-mean-token-sum-by-budget": (6 + 10) / (2 * 8),
        "token-sum": 16,
    }


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_parts_of_a_batch_add_up_to_the_whole(mode: str) -> None:
    x = torch.randn(7, 5).double()
    mask = torch.rand(7, 5) < 0.6
    totals = mask_totals(mask.sum(-1)) | {"budget": 70.0}

    parts = sum(aggregate(x[i], mask[i], totals, mode) for i in torch.arange(7).split([3, 1, 3]))

    torch.testing.assert_close(parts, aggregate(x, mask, totals, mode), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_nothing_masked_in_gives_zero_whatever_the_numbers(mode: str) -> None:
    x = torch.tensor([[math.nan, math.inf]])
    none = torch.zeros(1, 2, dtype=torch.bool)

    assert float(aggregate(x, none, {"tokens": 0.0, "sequences": 0.0, "budget": 0.0}, mode)) == 0
    assert float(masked_sum(x, none)) == 0


@pytest.mark.parametrize("gap", [-1e4, -50.0, 50.0, 1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(gap: float) -> None:
    micro, logits = _policy_rows()
    micro.columns["old_log_probs"] -= gap
    loss, metrics = _policy(kl_coef=0.1, entropy_coef=0.1)(
        micro.read(logits), micro, _totals(micro)
    )

    loss.backward()

    assert torch.isfinite(loss) and all(torch.isfinite(x) for x in metrics.values())
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_policy_loss_gradient_equals_finite_differences(aggregation: str) -> None:
    micro, logits = _policy_rows()
    loss = _policy(aggregation=aggregation, entropy_coef=0.3, kl_coef=0.2)

    assert torch.autograd.gradcheck(
        lambda x: loss(micro.read(x), micro, _totals(micro))[0], (logits,)
    )


def test_value_loss_gradient_equals_finite_differences() -> None:
    micro, values = _value_rows()
    mask = micro.response_mask
    totals = _totals(micro)

    def loss(x: Tensor) -> Tensor:
        terms, _ = clipped_value_loss(x, micro.columns["values"], micro.columns["returns"], 0.2)
        return aggregate(terms, mask, totals, "token-mean")

    assert torch.autograd.gradcheck(loss, (values,))


def test_value_loss_is_the_worse_of_free_and_held_error() -> None:
    values = torch.tensor([1.0, 1.0])
    old = torch.tensor([0.0, 0.0])
    target = torch.tensor([2.0, 0.0])

    loss, clipped = clipped_value_loss(values, old, target, 0.2)
    plain, none = clipped_value_loss(values, old, target, None)

    assert loss.tolist() == pytest.approx([1.8**2 / 2, 0.5])
    assert clipped.tolist() == [True, False] and not none.any()
    assert plain.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("make", [lambda: _policy_case(), lambda: _value_case()])
def test_garbage_outside_the_mask_changes_neither_loss_nor_gradient(
    make: Callable[[], tuple[Loss, Rows, Tensor]],
) -> None:
    loss, micro, output = make()
    hole = ~micro.response_mask
    spoilt = {n: torch.where(hole, torch.nan, x) for n, x in micro.columns.items()}

    clean_value, clean_metrics = loss(micro.read(output), micro, _totals(micro))
    (clean,) = torch.autograd.grad(clean_value, output)
    value, metrics = loss(micro.read(output), replace(micro, columns=spoilt), _totals(micro))
    (dirty,) = torch.autograd.grad(value, output)

    assert hole.any() and torch.equal(value, clean_value) and torch.equal(dirty, clean)
    assert all(torch.equal(metrics[name], clean_metrics[name]) for name in metrics)


@pytest.mark.parametrize("make", [lambda: _policy_case(), lambda: _value_case()])
def test_rows_all_masked_run_backward_to_exact_zeros(
    make: Callable[[], tuple[Loss, Rows, Tensor]],
) -> None:
    loss, micro, output = make()
    nothing = replace(micro, response_mask=torch.zeros_like(micro.response_mask))

    value, metrics = loss(micro.read(output), nothing, {"tokens": 0.0, "sequences": 0.0})
    value.backward()

    assert value.item() == 0 and output.grad is not None and not output.grad.any()
    assert all(float(x) == 0 for x in metrics.values())


def test_policy_metrics_at_the_old_policy_are_those_of_ratio_one() -> None:
    micro, logits = _policy_rows()
    micro.columns["old_log_probs"] = log_probs_of(logits, micro.targets, 0.8).detach()
    loss = PolicyLoss(PolicyLossConfig(), 0.8)
    loss.before = PreUpdateMetrics(with_reference=False)

    _, sums = loss(micro.read(logits), micro, _totals(micro))
    metrics = loss.finalize({name: float(x) for name, x in sums.items()})

    advantages = micro.columns["advantages"][micro.response_mask]
    assert metrics["actor/pg_loss"] == pytest.approx(-float(advantages.mean()))
    assert metrics["actor/ratio_mean"] == pytest.approx(1)
    assert metrics["actor/ratio_std"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/approx_kl"] == metrics["actor/clip_fraction"] == 0
    entropy = entropy_of(logits, 0.8)[micro.response_mask].mean()
    found = loss.before.metrics()["actor/entropy"]
    assert isinstance(found, Mean) and found.total / found.weight == pytest.approx(entropy.item())


def test_entropy_is_left_out_unless_asked_for() -> None:
    micro, logits = _policy_rows()

    _, metrics = PolicyLoss(PolicyLossConfig(), 1.0)(micro.read(logits), micro, _totals(micro))

    assert "actor/entropy" not in metrics and "actor/kl_loss" not in metrics


def test_kl_in_the_loss_without_reference_is_refused() -> None:
    micro, logits = _policy_rows()
    del micro.columns["ref_log_probs"]

    with pytest.raises(ColumnError, match="expected ref_log_probs because loss.kl_coef is 0.1"):
        _policy(kl_coef=0.1)(micro.read(logits), micro, _totals(micro))


def test_explained_variance_from_parts_equals_the_definition() -> None:
    micro, values = _value_rows()
    loss = ValueLoss(ValueLossConfig())
    totals = _totals(micro)
    sums: dict[str, float] = {}
    for row in range(len(values)):
        columns = {name: x[row : row + 1] for name, x in micro.columns.items()}
        part = Rows(micro.targets[row : row + 1], micro.response_mask[row : row + 1], columns)
        for name, x in loss(part.read(values[row : row + 1]), part, totals)[1].items():
            sums[name] = sums.get(name, 0.0) + float(x)

    metrics = loss.finalize(sums)

    old, target = (micro.columns[n][micro.response_mask] for n in ("values", "returns"))
    expected = 1 - (target - old).var(unbiased=False) / target.var(unbiased=False)
    assert metrics["critic/explained_variance"] == pytest.approx(float(expected), abs=1e-6)
    assert not {name for name in metrics if "square" in name or "error" in name}


def test_explained_variance_of_constant_returns_is_zero() -> None:
    micro, values = _value_rows()
    micro.columns["returns"] = torch.ones_like(micro.columns["returns"])
    loss = ValueLoss(ValueLossConfig())

    _, sums = loss(micro.read(values), micro, _totals(micro))

    assert loss.finalize({n: float(x) for n, x in sums.items()})["critic/explained_variance"] == 0


@pytest.mark.parametrize(
    "loss", [PolicyLoss(PolicyLossConfig(), 1.0), ValueLoss(ValueLossConfig())]
)
def test_denominators_count_chosen_tokens_and_rows_that_have_some(loss: Loss) -> None:
    mask = ragged(torch.tensor([True, False, True, False, False]), torch.tensor([3, 2, 0]))
    empty = ragged(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))

    assert loss.denominators(TensorDict({"response_mask": mask}, batch_size=[3])) == {
        "tokens": 2.0,
        "sequences": 1.0,
    }
    assert loss.denominators(TensorDict({"response_mask": empty}, batch_size=[0])) == {
        "tokens": 0.0,
        "sequences": 0.0,
    }


def _policy(**settings: float | str) -> PolicyLoss:
    return PolicyLoss(PolicyLossConfig(**settings), 0.8)  # type: ignore[arg-type]


def _policy_rows() -> tuple[Rows, Tensor]:
    """Three rows of four tokens, some masked, and float64 logits (3, 4, 7)."""
    torch.manual_seed(3)
    logits = torch.randn(3, 4, 7, dtype=torch.float64)
    ids = torch.randint(0, 7, (3, 4))
    near = log_probs_of(logits, ids, 0.8)
    columns = {
        "old_log_probs": near + 0.3 * torch.randn(3, 4).double(),
        "ref_log_probs": near + 0.3 * torch.randn(3, 4).double(),
        "advantages": torch.randn(3, 4).double(),
    }
    return Rows(ids, _mask(), columns), logits.requires_grad_()


def _value_rows() -> tuple[Rows, Tensor]:
    torch.manual_seed(4)
    values = torch.randn(3, 4, dtype=torch.float64)
    columns = {
        "values": values + 0.3 * torch.randn(3, 4).double(),
        "returns": torch.randn(3, 4).double(),
    }
    return Rows(torch.zeros(3, 4).long(), _mask(), columns), values.requires_grad_()


def _mask() -> Tensor:
    rows = [[True, True, False, True], [True, False, False, False], [False, True, True, False]]
    return torch.tensor(rows)


def _policy_case() -> tuple[Loss, Rows, Tensor]:
    return _policy(entropy_coef=0.1, kl_coef=0.1), *_policy_rows()


def _value_case() -> tuple[Loss, Rows, Tensor]:
    return ValueLoss(ValueLossConfig()), *_value_rows()


def _totals(micro: Rows) -> dict[str, float]:
    return mask_totals(micro.response_mask.sum(-1))
