"""Losses of whole answers: closed forms, finite differences, extreme ratios, names of one's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import PreferenceLossConfig
from spmdflow.data.ragged import ragged
from spmdflow.errors import ConfigError
from spmdflow.objectives.preference import (
    AnswerPair,
    LabelLoss,
    answer_log_probs,
    pair_losses,
    preference_loss,
)
from spmdflow.workers.micro_batch import MicroBatch, micro_batches
from tests.outputs import causal_output

NAMES = ("dpo", "ipo", "slic", "hinge")
KTO = PreferenceLossConfig(name="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
gaps = st.floats(-1e4, 1e4)


def rows(masks: list[list[bool]], *, desirable: list[bool], kl: list[float]) -> MicroBatch:
    """Rows with prompts of two tokens and responses with these masks."""
    count = len(masks)
    lengths = torch.tensor([len(mask) for mask in masks])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    columns = {
        "prompts": ragged(torch.ones(2 * count, dtype=torch.int64), torch.full((count,), 2)),
        "responses": ragged(ids, lengths),
        "response_mask": ragged(torch.tensor([x for mask in masks for x in mask]), lengths),
        "desirable": torch.tensor(desirable),
        "kl_log_ratios": torch.tensor(kl, dtype=torch.float64),
        "ref_answer_log_probs": torch.randn(count, 2, generator=generator).double() - 3,
    }
    batch = TensorDict(columns, batch_size=[count])
    (micro,) = micro_batches(
        batch, num_micro_batches=1, by_tokens=False, device=torch.device("cpu")
    )
    return micro


def totals_of(micro: MicroBatch) -> dict[str, float]:
    columns = {name: micro.columns[name] for name in ("desirable", "kl_log_ratios")}
    batch = TensorDict(columns, batch_size=[len(columns["desirable"])])
    return LabelLoss(KTO).denominators(batch)


def logits_of(micro: MicroBatch) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*micro.input_ids.shape, 5, generator=generator, dtype=torch.float64)


MICRO = rows(
    [[True, True], [False, True, False, True], [False, False], [True]],
    desirable=[True, False, True, False],
    kl=[0.5, 1.5, -0.2, 0.6],
)


def test_kto_of_a_micro_batch_is_the_mean_of_its_formula() -> None:
    logits = logits_of(MICRO)

    value, metrics = LabelLoss(KTO)(causal_output(logits, MICRO), MICRO, totals_of(MICRO))

    full = logits.log_softmax(-1)
    expected = 0.0
    kl = (0.5 + 1.5 - 0.2 + 0.6) / 4
    for row in range(4):
        log_prob = sum(
            float(full[row, 1 + t, int(MICRO.input_ids[row, 2 + t])])
            for t, learnt in enumerate(MICRO.response_mask[row].tolist())
            if learnt
        )
        gain = KTO.beta * (log_prob - float(MICRO.columns["ref_answer_log_probs"][row, 0]) - kl)
        sign, weight = (1, 1.5) if bool(MICRO.columns["desirable"][row]) else (-1, 0.5)
        expected += weight * (1 - 1 / (1 + math.exp(-sign * gain))) / 4
    assert float(value) == pytest.approx(expected, rel=1e-12)
    assert float(metrics["kl"]) == pytest.approx(kl)


def test_kto_gradient_equals_finite_differences_in_float64() -> None:
    logits = logits_of(MICRO).requires_grad_()
    totals = totals_of(MICRO)

    assert torch.autograd.gradcheck(
        lambda x: LabelLoss(KTO)(causal_output(x, MICRO), MICRO, totals)[0], (logits,)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_token", [False, True])
def test_gradient_of_pairs_equals_finite_differences_in_float64(name: str, per_token: bool) -> None:
    cfg = PreferenceLossConfig(name=name, beta=0.3, per_token=per_token)
    micro = rows(
        [[True, True], [True, False, True], [True], [False, True]],
        desirable=[True] * 4,
        kl=[0.0] * 4,
    )
    ref = micro.columns["ref_answer_log_probs"][:2]
    logits = logits_of(micro)
    tokens = micro.response_mask.sum(-1).view(2, 2).T

    def mean(x: Tensor) -> Tensor:
        return pair_losses(
            answer_log_probs(causal_output(x, micro), micro).view(2, 2).T, ref, tokens, cfg
        )[0].mean()

    leaf = logits.clone().requires_grad_()
    scores = answer_log_probs(causal_output(leaf, micro), micro).view(2, 2).T
    _, slopes = pair_losses(scores, ref, tokens, cfg)
    (scores * slopes / 2).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    for place in torch.nonzero(leaf.grad)[:40].tolist():
        step = torch.zeros_like(logits)
        step[tuple(place)] = 1e-6
        slope = (mean(logits + step) - mean(logits - step)) / 2e-6
        assert float(leaf.grad[tuple(place)]) == pytest.approx(float(slope), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(gaps, gaps)
def test_extreme_log_ratios_give_finite_losses_and_slopes(
    name: str, chosen: float, rejected: float
) -> None:
    cfg = PreferenceLossConfig(name=name, beta=5.0)
    log_probs = torch.tensor([[chosen, rejected]])

    losses, slopes = pair_losses(log_probs, torch.zeros(1, 2), torch.ones(1, 2), cfg)

    assert bool(losses.isfinite().all() and slopes.isfinite().all())


@settings(deadline=None, max_examples=40)
@given(gaps, st.booleans(), gaps)
def test_kto_of_extreme_log_ratios_is_finite_and_bounded(gap: float, good: bool, kl: float) -> None:
    micro = rows([[True]], desirable=[good], kl=[kl])
    micro.columns["ref_answer_log_probs"].fill_(gap)
    logits = logits_of(micro).requires_grad_()

    value, _ = LabelLoss(KTO)(causal_output(logits, micro), micro, totals_of(micro))
    value.backward()  # type: ignore[no-untyped-call]

    assert 0 <= float(value.detach()) <= 1.5
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_padding_rows_and_rows_without_a_learnt_token_pass_no_gradient() -> None:
    batch = TensorDict(
        {
            "prompts": ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
            "responses": ragged(
                torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
            ),
            "desirable": torch.zeros(0, dtype=torch.bool),
            "kl_log_ratios": torch.zeros(0),
            "ref_answer_log_probs": torch.zeros(0, 2),
        },
        batch_size=[0],
    )
    (padding,) = micro_batches(
        batch, num_micro_batches=1, by_tokens=False, device=torch.device("cpu")
    )
    masked = rows([[False, False]], desirable=[True], kl=[2.0])
    totals = {"rows": 3.0, "desirable": 3.0, "undesirable": 0.0, "kl": 6.0}

    for micro, expected in ((padding, 0.0), (masked, None)):
        logits = logits_of(micro).requires_grad_()
        value, metrics = LabelLoss(KTO)(causal_output(logits, micro), micro, totals)
        value.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None and bool((logits.grad == 0).all())
        if expected is not None:
            assert float(value.detach()) == expected
            assert all(float(x) == 0 for x in metrics.values())


def test_policy_that_is_its_reference_has_a_dpo_loss_of_log_2_and_equal_slopes() -> None:
    same = torch.randn(5, 2, generator=torch.Generator().manual_seed(3))

    losses, slopes = pair_losses(same, same, torch.ones(5, 2), PreferenceLossConfig(beta=0.4))

    torch.testing.assert_close(losses, torch.full((5,), math.log(2)))
    torch.testing.assert_close(slopes, torch.tensor([[-0.2, 0.2]]).expand(5, 2))


def test_no_pairs_have_no_losses() -> None:
    losses, slopes = pair_losses(*(torch.zeros(0, 2),) * 3, PreferenceLossConfig())

    assert losses.shape == (0,) and slopes.shape == (0, 2)


def test_own_loss_of_pairs_is_known_by_its_name_and_others_names_are_refused() -> None:
    @preference_loss("own_test")
    def own(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
        return cfg.beta * (pair.rejected - pair.chosen)

    cfg = PreferenceLossConfig(name="own_test", beta=2.0)
    losses, _ = pair_losses(torch.tensor([[1.0, 4.0]]), torch.zeros(1, 2), torch.ones(1, 2), cfg)
    assert losses.tolist() == [6.0]
    for taken in ("dpo", "kto"):
        with pytest.raises(ConfigError, match=rf"preference loss '{taken}': .* choose another"):
            preference_loss(taken)(own)
