"""PPO-ptx: the mixed loss against loops over tokens, whatever the micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import PolicyLossConfig
from spmdflow.data.ragged import lengths_of, pad, ragged, rows_of, select_rows
from spmdflow.models.rows import text_rows, with_text_rows
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.objectives.supervised import PretrainedPolicyLoss
from spmdflow.worker_api.command import Command, MiniBatch
from spmdflow.workers.micro_batch import micro_batches
from tests.outputs import causal_output

VOCABULARY = 7
COEF = 0.3
TEMPERATURE = 1.7
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
"""Logits of the next token, by token: a model that is a table."""


def make(seed: int, num_rows: int) -> TensorDict:
    """Samples with a text each."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator)

    def ids(sizes: Tensor) -> Tensor:
        size = (int(sizes.sum()),)
        return ragged(torch.randint(0, VOCABULARY, size, generator=generator), sizes)

    sizes = lengths(1, 5)
    total = int(sizes.sum())
    columns = {
        "prompts": ids(lengths(1, 4)),
        "responses": ids(sizes),
        "response_mask": ragged(torch.rand(total, generator=generator) < 0.8, sizes),
        "old_log_probs": ragged(torch.randn(total, generator=generator).double() - 2, sizes),
        "advantages": ragged(torch.randn(total, generator=generator).double(), sizes),
        "pretrain_ids": ids(lengths(1, 6)),
    }
    return TensorDict(columns, batch_size=[num_rows])


def mixed_loss(batch: TensorDict, table: Tensor, num_parts: int) -> Tensor:
    """What an engine sums over micro-batches."""
    policy = PolicyLoss(PolicyLossConfig(), TEMPERATURE)
    loss = PretrainedPolicyLoss(policy, COEF)
    totals = loss.denominators(batch)
    micros = micro_batches(
        batch, num_micro_batches=num_parts, by_tokens=False, device=torch.device("cpu")
    )
    parts = [
        loss(causal_output(table[micro.input_ids], micro), micro, totals)[0] for micro in micros
    ]
    return torch.stack(parts).sum()


def by_hand(batch: TensorDict, table: Tensor) -> Tensor:
    """PPO's token mean plus COEF times the mean cross-entropy, token by token."""
    hot = (table / TEMPERATURE).log_softmax(-1)
    plain = table.log_softmax(-1)
    columns = {str(name): rows_of(column) for name, column in batch.items()}
    policy = []
    texts = []
    for i in range(len(columns["prompts"])):
        before = torch.cat([columns["prompts"][i], columns["responses"][i]])
        start = len(columns["prompts"][i]) - 1
        for t, chosen in enumerate(columns["response_mask"][i].tolist()):
            if chosen:
                log_prob = hot[before[start + t], before[start + t + 1]]
                ratio = torch.exp(log_prob - columns["old_log_probs"][i][t])
                gain = columns["advantages"][i][t]
                policy.append(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain))
        text = columns["pretrain_ids"][i]
        texts += [-plain[text[t], text[t + 1]] for t in range(len(text) - 1)]
    zero = table.sum() * 0
    mean = [torch.stack(terms).mean() if terms else zero for terms in (policy, texts)]
    return mean[0] + COEF * mean[1]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12))
def test_mixed_loss_and_its_gradient_equal_the_loops_for_any_micro_batches(
    seed: int, num_rows: int, num_parts: int
) -> None:
    samples = make(seed, num_rows)
    batch, _ = with_text_rows(samples, Command(1, 1, torch.zeros(0, dtype=torch.int64)))
    table = TABLE.clone().requires_grad_()
    own = TABLE.clone().requires_grad_()

    found = mixed_loss(batch, table, num_parts)
    expected = by_hand(samples, own)
    found.backward()
    expected.backward()

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # masks are float32
    assert table.grad is not None and own.grad is not None
    torch.testing.assert_close(table.grad, own.grad, rtol=1e-6, atol=1e-9)


def test_text_is_in_the_mini_batches_of_its_sample() -> None:
    samples = make(1, 4)
    minis = (MiniBatch(torch.tensor([2, 0]), 1), MiniBatch(torch.tensor([1, 3]), 3))
    call = Command(1, 1, torch.arange(4), mini_batches=minis)

    batch, changed = with_text_rows(samples, call)

    first = select_rows(batch, changed.mini_batches[0].index)
    assert [mini.num_micro_batches for mini in changed.mini_batches] == [1, 3]
    assert first["is_text"].tolist() == [False, False, True, True]
    wanted = [rows_of(samples["pretrain_ids"])[i].tolist() for i in (2, 0)]
    parts = (rows_of(first[name])[2:] for name in ("prompts", "responses"))
    assert [[*a.tolist(), *b.tolist()] for a, b in zip(*parts)] == wanted
    assert lengths_of(first["prompts"]).tolist()[2:] == [1, 1]
    assert not any(bool(row.any()) for row in rows_of(first["response_mask"])[2:])


def test_batch_without_texts_has_the_policy_loss_alone() -> None:
    samples = make(2, 3)
    ids = samples["pretrain_ids"].values()
    one_token_each = samples.clone(False)
    one_token_each["pretrain_ids"] = ragged(ids[:3], torch.ones(3, dtype=torch.int64))
    call: Any = Command(1, 1, torch.arange(3))
    batch, _ = with_text_rows(one_token_each, call)

    found = mixed_loss(batch, TABLE, 2)

    policy = PolicyLoss(PolicyLossConfig(), TEMPERATURE)
    (micro,) = micro_batches(
        samples.exclude("pretrain_ids"),
        num_micro_batches=1,
        by_tokens=False,
        device=torch.device("cpu"),
    )
    expected, _ = policy(
        causal_output(TABLE[micro.input_ids], micro), micro, policy.denominators(samples)
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert pad(text_rows(one_token_each["pretrain_ids"])["responses"]).shape == (3, 0)


def test_texts_among_routed_rows_are_routed_by_the_trainer() -> None:
    """The column has entries for prompts too; 255: the router selects itself."""
    samples = make(1, 3)
    sizes = lengths_of(samples["prompts"]) + lengths_of(samples["responses"])
    values = torch.zeros(int(sizes.sum()), 2, 2, dtype=torch.uint8)
    samples["routed_experts"] = ragged(values, sizes)

    batch, _ = with_text_rows(samples, Command(1, 1, torch.zeros(0, dtype=torch.int64)))

    rows = rows_of(batch["routed_experts"])
    texts = lengths_of(batch["prompts"]) + lengths_of(batch["responses"])
    assert [len(row) for row in rows] == texts.tolist()
    assert all(bool((row == 0).all()) for row in rows[:3])
    assert all(bool((row == 255).all()) for row in rows[3:])
