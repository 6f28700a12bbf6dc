"""Attention over parts of the keys, joined, is attention over all of them; without processes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.workers.attention import AttentionForm, PackedRows, packed_attention
from spmdflow.workers.context_group import RING
from spmdflow.workers.context_parallel import TokenShard
from spmdflow.workers.partial_attention import PartialRows, attend_to_part, partial_gradients
from spmdflow.workers.ring_attention import RingSteps, join_result
from tests.unit.workers.test_token_shards import of_rank, packed


@dataclass(frozen=True)
class Case:
    """Rows of a micro-batch, and how they attend."""

    rows: PackedRows
    size: int
    form: AttentionForm
    heads: tuple[int, int]
    """Of queries, and of keys."""
    widths: tuple[int, int]
    """Of a query and of a value. No kernel takes two that differ."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from([1, 2, 3, 4]))
    rows = draw(packed(2 * size))
    cap = draw(st.sampled_from([None, 1.5]))
    window = draw(st.sampled_from([None, 1, 3, 1000]))
    heads = draw(st.sampled_from([(4, 4), (4, 2), (3, 1)]))
    widths = draw(st.sampled_from([(8, 8), (8, 4)]))
    return Case(rows, size, AttentionForm(window=window, cap=cap), heads, widths)


@settings(deadline=None)
@given(cases())
def test_results_and_gradients_of_parts_add_up_to_those_of_all_keys(case: Case) -> None:
    """Within 1e-5, for rows that share prompts, windows, caps, and with and without a kernel."""
    torch.manual_seed(0)
    num_tokens = sum(case.rows.lengths)
    q = torch.randn(num_tokens, case.heads[0], case.widths[0], requires_grad=True)
    k = torch.randn(num_tokens, case.heads[1], case.widths[0], requires_grad=True)
    v = torch.randn(num_tokens, case.heads[1], case.widths[1], requires_grad=True)
    expected = packed_attention(q, k, v, case.rows, case.form)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    found = [torch.zeros_like(x) for x in (expected, q, k, v)]
    with torch.no_grad():
        for rank in range(case.size):
            add_results_of_rank(case, rank, (q, k, v, gradient), found)

    for name, own, whole in zip("oqkv", found, (expected, q.grad, k.grad, v.grad), strict=True):
        assert whole is not None
        torch.testing.assert_close(own, whole, atol=1e-5, rtol=1e-5, msg=name)


def add_results_of_rank(
    case: Case, rank: int, tensors: tuple[Tensor, ...], found: list[Tensor]
) -> None:
    """Add what a rank computes to the result and the gradients of query, key and value."""
    q, k, v, gradient = tensors
    group = of_rank(rank, case.size, RING)
    columns = [group.columns(len(q), each) for each in range(case.size)]
    steps = steps_of(case, rank)
    own = columns[rank]
    output = torch.zeros_like(gradient[own])
    lse = torch.full((q.shape[1], len(own)), -torch.inf)
    parts: list[tuple[PartialRows, Tensor]] = []
    for step, of_step in enumerate(steps.parts):
        for part in of_step:
            assert part.rows.seen is not None
            keys = columns[(rank - step) % case.size][part.rows.seen.indices]
            parts.append((part, keys))
            result = attend_to_part(part.of_queries(q[own]), k[keys], v[keys], part, case.form)
            join_result(output, lse, part, *result)
    found[0][own] = output
    for part, keys in parts:
        queries = part.of_queries(own)
        gradients = partial_gradients(
            gradient[queries], q[queries], k[keys], v[keys], part.of_queries(output),
            part.of_queries(lse, 1), part, case.form,
        )  # fmt: skip
        for whole, index, added in zip(found[1:], (queries, keys, keys), gradients, strict=True):
            whole.index_add_(0, index, added)


def steps_of(case: Case, rank: int) -> RingSteps:
    shard = TokenShard.of(
        of_rank(rank, case.size, RING),
        shape=(1, sum(case.rows.lengths)),
        predicting=torch.tensor([0]),
        rows=case.rows,
    )
    assert shard.ring is not None
    return shard.ring


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 5))
def test_no_rank_has_more_scores_than_another_and_none_are_masked_twice(
    size: int, chunk: int
) -> None:
    """One row: the scores that kernels compute are those that causality leaves, in equal shares."""
    length = 2 * size * chunk
    counts = []
    for rank in range(size):
        case = Case(PackedRows.of([length]), size, AttentionForm(), (1, 1), (8, 8))
        scores = 0
        for part in chain(*steps_of(case, rank).parts):
            assert part.rows.seen is not None
            for queries, keys in zip(part.rows.lengths, part.rows.seen.lengths, strict=True):
                hidden = queries * (queries - 1) // 2 if part.is_causal else 0
                scores += queries * keys - hidden
        counts.append(scores)

    assert sum(counts) == length * (length + 1) // 2
    assert len(set(counts)) == 1


def test_few_scores_are_stored_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row is computed in blocks of its queries, with the same result."""
    rows = PackedRows.of([64])
    case = Case(rows, 2, AttentionForm(cap=2.0), (2, 1), (8, 8))
    part = steps_of(case, 1).parts[0][0]
    assert part.rows.seen is not None
    q, g = torch.randn(2, 32, 2, 8)
    k, v = torch.randn(2, len(part.rows.seen.indices), 1, 8)
    whole = attend_to_part(q, k, v, part, case.form)
    gradients = partial_gradients(g, q, k, v, *whole, part, case.form)

    monkeypatch.setattr("spmdflow.workers.partial_attention._MAX_SCORES", 256)
    in_blocks = attend_to_part(q, k, v, part, case.form)
    torch.testing.assert_close(in_blocks, whole)
    again = partial_gradients(g, q, k, v, *whole, part, case.form)
    torch.testing.assert_close(again, gradients)
