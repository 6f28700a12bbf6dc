"""Every loss object gives one value and one gradient, however the rows are spread.

A policy that is a table (next token given this one) stands for the model: rows go to 1, 2 or 4
ranks in any uneven way, each rank cuts its rows into any number of micro-batches, float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import SurrogateLossConfig
from spmdflow.config.objective import MEANS
from spmdflow.config.offline import PreferenceLossConfig
from spmdflow.config.schema import ValueLossConfig
from spmdflow.data.ragged import ragged, select_rows
from spmdflow.objectives.loss import AGGREGATIONS, Loss
from spmdflow.objectives.policy import PolicyLoss, ValueLoss
from spmdflow.objectives.preference import (
    PREFERENCE_LOSSES,
    AnswerPair,
    LabelLoss,
    PairLoss,
    answer_log_probs,
    pair_losses,
)
from spmdflow.objectives.supervised import PretrainedPolicyLoss, SupervisedLoss
from spmdflow.workers.micro_batch import MicroBatch, micro_batches
from tests.outputs import causal_output, scalar_output

VOCAB = 11
CPU = torch.device("cpu")


def policy_loss(**settings: Any) -> PolicyLoss:
    cfg = SurrogateLossConfig(entropy_coef=0.1, kl_coef=0.2, **settings)
    return PolicyLoss(cfg, 0.9, budget=8)


LOSSES: dict[str, Loss] = {
    **{
        f"{surrogate}, {aggregation}": policy_loss(surrogate=surrogate, aggregation=aggregation)
        for surrogate in ("ppo", "gspo", "cispo", "plain")
        for aggregation in AGGREGATIONS
    },
    **{
        surrogate: policy_loss(surrogate=surrogate, dro_beta=0.2, kl_estimator="k3+")
        for surrogate in ("sapo", "gmpo", "dppo_tv", "dppo_kl", "dro", "kl_cov", "clip_cov")
    },
    "ppo, clip-higher and dual clip": policy_loss(clip_ratio_high=0.3, dual_clip=1.5),
    "ppo, with pre-training text": PretrainedPolicyLoss(policy_loss(), 0.3),
    "supervised": SupervisedLoss(),
    "kto": LabelLoss(PreferenceLossConfig(name="kto", undesirable_weight=0.7)),
}
PAIRS = {
    "dpo": PreferenceLossConfig(label_smoothing=0.1),
    "dpo, per token": PreferenceLossConfig(per_token=True, beta=1.0),
    "ipo": PreferenceLossConfig(name="ipo"),
    "slic": PreferenceLossConfig(name="slic"),
    "hinge": PreferenceLossConfig(name="hinge"),
}
layouts = st.tuples(
    st.integers(0, 10_000),  # seed
    st.integers(1, 9),  # rows
    st.sampled_from([1, 2, 4]),  # ranks
    st.integers(1, 4),  # micro-batches on each rank
    st.booleans(),  # cut by tokens
)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=4)
@given(layouts)
def test_value_and_gradient_do_not_depend_on_the_layout(name: str, layout: Any) -> None:
    seed, count, ranks, parts, by_tokens = layout
    loss = LOSSES[name]
    batch = make(seed, count)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    compare(
        step(loss, [batch], table, 1, by_tokens=False),
        step(loss, dealt(batch, seed, ranks), table, parts, by_tokens=by_tokens),
    )


@pytest.mark.parametrize("name", PAIRS)
@settings(deadline=None, max_examples=4)
@given(layouts)
def test_pairs_may_be_torn_apart_over_micro_batches(name: str, layout: Any) -> None:
    seed, count, ranks, parts, by_tokens = layout
    cfg = PAIRS[name]
    batch = make(seed, 2 * count)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    whole = with_slopes(batch, table, cfg)

    made = [
        with_slopes(both_answers(batch, rows), table, cfg) for rows in shares(seed, count, ranks)
    ]

    compare(
        directly(batch, table, cfg),
        step(PairLoss(answer_log_probs), [whole], table, 1, by_tokens=False),
        step(PairLoss(answer_log_probs), made, table, parts, by_tokens=by_tokens),
    )


@pytest.mark.parametrize("aggregation", MEANS)
@settings(deadline=None, max_examples=4)
@given(layouts)
def test_value_loss_does_not_depend_on_the_layout(aggregation: str, layout: Any) -> None:
    seed, count, ranks, parts, by_tokens = layout
    loss = ValueLoss(ValueLossConfig(aggregation=aggregation))
    batch = make(seed, count)
    table = torch.randn(VOCAB, 1, generator=torch.Generator().manual_seed(seed))

    compare(
        step(loss, [batch], table, 1, by_tokens=False),
        step(loss, dealt(batch, seed, ranks), table, parts, by_tokens=by_tokens),
    )


Step = tuple[float, Tensor, Mapping[str, float]]
"""Loss, gradient of the table, metrics."""


def step(
    loss: Loss, batches: list[TensorDict], table: Tensor, parts: int, *, by_tokens: bool
) -> Step:
    """One train step over ranks that hold these rows, as the engines do it."""
    leaf = table.clone().requires_grad_()
    local = [loss.denominators(batch) for batch in batches]
    totals = {name: sum(found[name] for found in local) for name in local[0]}
    sums: dict[str, float] = {}
    for batch in batches:
        for micro in micro_batches(batch, num_micro_batches=parts, by_tokens=by_tokens, device=CPU):
            value, metrics = loss(output_of(leaf, micro), micro, totals)
            value.backward()  # type: ignore[no-untyped-call]
            for name, x in {**metrics, "loss": value}.items():
                sums[name] = sums.get(name, 0.0) + float(x.detach())
    assert leaf.grad is not None
    return sums["loss"], leaf.grad, loss.finalize(sums)


def compare(first: Step, *others: Step) -> None:
    """Equal up to float32 sums in another order."""
    for other in others:
        assert other[0] == pytest.approx(first[0], rel=1e-5, abs=1e-5)
        torch.testing.assert_close(other[1], first[1], rtol=1e-4, atol=1e-5)
        for name in first[2].keys() & other[2].keys():
            assert other[2][name] == pytest.approx(first[2][name], rel=1e-4, abs=1e-4), name


def output_of(table: Tensor, micro: MicroBatch) -> Any:
    output = table[micro.input_ids]
    return scalar_output(output) if table.shape[1] == 1 else causal_output(output, micro)


def make(seed: int, count: int) -> TensorDict:
    """Rows with holes, some without a learnt token, log-ratios up to extreme ones."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.randint(1, 7, (2, count), generator=generator)
    responses = torch.where(torch.rand(count, generator=generator) < 0.1, 0, responses)
    tokens = int(responses.sum())
    mask = torch.rand(tokens, generator=generator) < 0.7
    spread = torch.where(torch.rand(tokens, generator=generator) < 0.1, 60.0, 0.5)
    columns = {
        name: ragged(-2.0 + spread * torch.randn(tokens, generator=generator), responses)
        for name in ("old_log_probs", "ref_log_probs", "values")
    }
    columns |= {
        name: ragged(torch.randn(tokens, generator=generator), responses)
        for name in ("advantages", "returns")
    }
    for name, lengths in (("prompts", prompts), ("responses", responses)):
        ids = torch.randint(0, VOCAB, (int(lengths.sum()),), generator=generator)
        columns[name] = ragged(ids, lengths)
    columns["response_mask"] = ragged(mask, responses)
    columns["covariant"] = ragged(torch.rand(tokens, generator=generator) < 0.2, responses)
    texts = torch.rand(count, generator=generator) < 0.3
    columns["is_text"] = texts
    columns["desirable"] = torch.rand(count, generator=generator) < 0.5
    columns["ref_answer_log_probs"] = -5 + 3 * torch.randn(count, 2, generator=generator)
    columns["kl_log_ratios"] = 3 * torch.randn(count, generator=generator)
    return TensorDict(columns, batch_size=[count])


def shares(seed: int, count: int, ranks: int) -> list[Tensor]:
    """Rows of each rank; some have many, some none."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, ranks, (count,), generator=generator)
    return [torch.nonzero(owner == rank)[:, 0] for rank in range(ranks)]


def dealt(batch: TensorDict, seed: int, ranks: int) -> list[TensorDict]:
    return [select_rows(batch, rows) for rows in shares(seed, batch.batch_size[0], ranks)]


def both_answers(batch: TensorDict, pairs: Tensor) -> TensorDict:
    """Rows i and n + i of 2n sequences for each pair i."""
    return select_rows(batch, torch.cat([pairs, pairs + batch.batch_size[0] // 2]))


def facts(batch: TensorDict, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log pi, a reference's and the learnt tokens of pairs, each (n, 2)."""
    if not batch.batch_size[0]:
        return torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2)
    (micro,) = micro_batches(batch, num_micro_batches=1, by_tokens=False, device=CPU)
    scores = answer_log_probs(output_of(table, micro), micro)
    ref = answer_log_probs(output_of(0.7 * table.detach(), micro), micro)
    counts = micro.response_mask.sum(-1).float()
    sides = [x.view(2, len(x) // 2).T for x in (scores, ref, counts)]
    return sides[0], sides[1], sides[2]


def with_slopes(batch: TensorDict, table: Tensor, cfg: PreferenceLossConfig) -> TensorDict:
    losses, slopes = pair_losses(*facts(batch, table), cfg)
    rows = batch.exclude("kl_log_ratios")
    rows["pair_losses"] = torch.cat([losses, losses])
    rows["score_slopes"] = torch.cat([slopes[:, 0], slopes[:, 1]])
    return rows


def directly(batch: TensorDict, table: Tensor, cfg: PreferenceLossConfig) -> Step:
    """The mean loss of whole pairs, through autograd alone."""
    leaf = table.clone().requires_grad_()
    scores, ref, counts = facts(batch, leaf)
    if cfg.per_token:
        scores = scores / counts.clamp(min=1)
        ref = ref / counts.clamp(min=1)
    pair = AnswerPair(scores[:, 0], scores[:, 1], ref[:, 0], ref[:, 1])
    loss = PREFERENCE_LOSSES.find(cfg.name)(pair, cfg).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad, {}
