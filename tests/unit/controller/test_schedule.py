"""Mini-batches first, shares second: which rows go where. Integers only."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.config.schema import UpdateConfig
from spmdflow.controller.assignment import (
    MicroLimit,
    cut_mini_batches,
    even_costs,
    generation_shares,
    permutation,
    plan_mini_batches,
    share_near,
)
from spmdflow.data.micro import balance
from spmdflow.transfer.protocol import even_chunks
from spmdflow.weights.architecture import sizes_if_there

LIMIT = MicroLimit(max_rows=4, max_tokens=None)


def plan(parents, num_shares, holder=None, **changes):
    cfg = UpdateConfig(**{"mini_batch_size": 4} | changes)
    parents = np.asarray(parents)
    holder = np.full(len(parents), -1) if holder is None else np.asarray(holder)
    return plan_mini_batches(
        parents,
        holder,
        num_shares,
        cfg,
        LIMIT,
        np.ones(len(parents), dtype=np.int64),
        seed=0,
        step=3,
    )


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_optimizer_steps_have_the_same_rows_for_every_number_of_shares(rows, size, n, shares):
    parents = np.repeat(np.arange(rows), n)

    one = plan(parents, 1, mini_batch_size=size * n)
    many = plan(parents, shares, mini_batch_size=size * n)

    assert [set(p.shares[0]) for p in one] == [set(np.concatenate(p.shares)) for p in many]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_every_row_is_used_once_in_every_epoch(rows, shares, epochs):
    plans = plan(np.arange(rows), shares, num_epochs=epochs)

    used = np.concatenate([share for p in plans for share in p.shares])

    assert sorted(used.tolist()) == sorted(list(range(rows)) * epochs)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 10))
def test_groups_of_one_parent_are_never_cut(parents, size):
    parents = np.array(parents)
    order = permutation(parents, seed=1, step=1, epoch=0)

    batches = cut_mini_batches(parents, order, size)

    where = {}
    for number, batch in enumerate(batches):
        for parent in parents[batch]:
            assert where.setdefault(int(parent), number) == number


def test_the_permutation_depends_on_seed_step_and_epoch():
    parents = np.arange(50)
    orders = {
        tuple(permutation(parents, seed=s, step=t, epoch=e))
        for s in (0, 1)
        for t in (1, 2)
        for e in (0, 1)
    }

    assert len(orders) == 8


@given(st.lists(st.integers(-1, 3), min_size=0, max_size=40))
def test_shares_are_even_and_keep_the_rows_they_hold(holder):
    holder = np.array(holder, dtype=np.int64)

    shares = share_near(np.arange(len(holder)), holder, 4)

    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(holder)))
    for share, rows in enumerate(shares):
        own = int((holder == share).sum())
        assert (holder[rows] == share).sum() == min(own, len(rows))


def test_one_mini_batch_over_its_holders_moves_no_row():
    holder = np.repeat(np.arange(4), 8)

    (only,) = plan(np.arange(32), 4, holder, mini_batch_size=32)

    assert [share.tolist() for share in only.shares] == [
        list(range(8 * rank, 8 * rank + 8)) for rank in range(4)
    ]


@pytest.mark.parametrize(("rows", "expected"), [(32, 2), (33, 3), (0, 1)])
def test_all_shares_make_as_many_forwards_as_the_largest_needs(rows, expected):
    shares = [
        np.arange(part[0], part[-1] + 1) if len(part) else part
        for part in np.array_split(np.arange(rows), 4)
    ]

    assert LIMIT.count_of(shares, None) == expected


@given(weights=st.lists(st.integers(0, 50), max_size=60), parts=st.integers(1, 9))
def test_balanced_shares_have_every_row_once_within_the_bound_of_graham(weights, parts):
    shares = balance(weights, parts)

    assert len(shares) == parts
    assert sorted(chain(*shares)) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    largest = max(sum(weights[row] for row in share) for share in shares)
    assert largest * parts <= sum(weights) + (parts - 1) * max(weights, default=0)


@given(weight=st.integers(0, 5), num_rows=st.integers(0, 40), parts=st.integers(1, 9))
def test_balanced_shares_of_equal_rows_are_even(weight, num_rows, parts):
    sizes = {len(share) for share in balance([weight] * num_rows, parts)}

    assert sizes <= {num_rows // parts, -(-num_rows // parts)}


def test_balanced_shares_put_one_long_row_against_many_short_ones():
    assert balance([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]


def test_balanced_shares_depend_on_the_arguments_alone():
    weights = np.random.default_rng(0).integers(0, 9, 300).tolist()

    assert balance(weights, 7) == balance(list(weights), 7)
    assert balance([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]


@given(st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=6))
def test_rows_stay_where_they_are_unless_a_share_has_over_five_percent_too_many_tokens(
    given_lengths,
):
    lengths = np.array([n for part in given_lengths for n in part], dtype=np.int64)
    ends = np.cumsum([len(part) for part in given_lengths])
    shares = np.split(np.arange(len(lengths)), ends[:-1])

    found = even_costs(shares, lengths)

    tokens = [int(lengths[share].sum()) for share in found]
    before = [sum(part) for part in given_lengths]
    if max(before) <= 1.05 * sum(before) / len(before):
        assert found is shares
    else:
        assert max(tokens) <= sum(tokens) / len(tokens) + max(lengths)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))


def test_update_of_one_long_row_and_many_short_ones_shares_out_tokens_unless_told_otherwise():
    lengths = np.array([70, 10, 10, 10, 10, 10, 10, 10])
    holder = np.repeat([0, 1], 4)

    for balanced, expected in ((True, [70, 70]), (False, [100, 40])):
        cfg = UpdateConfig(mini_batch_size=8, shuffle=False, balance_tokens=balanced)
        (only,) = plan_mini_batches(np.arange(8), holder, 2, cfg, LIMIT, lengths, seed=0, step=0)
        assert [int(lengths[share].sum()) for share in only.shares] == expected


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    st.floats(0, 1e-3),
    st.one_of(st.none(), st.integers(1, 10_000)),
)
def test_cost_of_a_row_is_its_tokens_and_how_often_they_attend_to_one(lengths, cost, window):
    limit = MicroLimit(1, None, seen_token_cost=cost, window=window)

    found = limit.costs_of(np.array(lengths))

    for length, total in zip(lengths, found.tolist(), strict=True):
        narrow = min(length, window or length)
        seen = narrow**2 / 2 + (length - narrow) * narrow  # the first tokens, and all others
        assert total == pytest.approx(length + cost * seen, abs=0.6, rel=1e-12)


def test_a_long_row_weighs_more_than_short_ones_with_as_many_tokens(tmp_path):
    """A 7B's row of 120,000 tokens, next to 64 rows of 7,500: attention of the first costs more."""
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    shape = sizes_if_there(tmp_path)
    limit = MicroLimit(1, None, seen_token_cost=shape.seen_token_cost)
    lengths = np.array([120_000, *[7_500] * 64])

    by_tokens = even_costs([np.arange(33), np.arange(33, 65)], lengths)
    by_cost = even_costs([np.arange(33), np.arange(33, 65)], limit.costs_of(lengths))

    ratios = []
    for shares in (by_tokens, by_cost):
        costs = [int(limit.costs_of(lengths)[share].sum()) for share in shares]
        ratios.append(max(costs) / sum(costs) * 2)
    assert sizes_if_there(tmp_path / "none") is None
    assert 1.15 < ratios[0] and ratios[1] < 1.02


def generation_costs(shares, prompts, parents, limit, new_tokens):
    """What each replica computes: each prompt once, and every new token of its rows."""
    costs = []
    for share in shares:
        own = {int(parents[row]): int(prompts[row]) for row in share}
        cost = sum(int(limit.costs_of(np.array([length]))[0]) for length in own.values())
        for row in share:
            before, after = limit.costs_of(np.array([prompts[row], prompts[row] + new_tokens]))
            cost += int(after - before)
        costs.append(cost)
    return costs


@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 500),
    st.floats(0, 1e-2),
)
def test_generated_rows_go_to_one_replica_each_and_never_make_the_busiest_slower(
    lengths, samples, num_shares, new_tokens, cost
):
    limit = MicroLimit(1, None, seen_token_cost=cost)
    prompts = np.repeat(lengths, samples)
    parents = np.repeat(np.arange(len(lengths)), samples)
    even = [np.array(part, dtype=np.int64) for part in even_chunks(len(prompts), num_shares)]
    words = (prompts, parents, limit, new_tokens)

    found = generation_shares(prompts, parents, num_shares, limit, new_tokens)

    if found is not None:
        assert sorted(np.concatenate(found).tolist()) == list(range(len(prompts)))
        assert len(found) == num_shares
        assert 1.05 * max(generation_costs(found, *words)) < max(generation_costs(even, *words))


def test_prompts_of_one_length_are_generated_in_even_chunks():
    parents = np.repeat(np.arange(8), 4)

    assert generation_shares(np.full(32, 77), parents, 4, LIMIT, 16) is None


def test_long_prompts_are_generated_by_several_replicas_and_each_group_by_one():
    """Two long prompts in a row: even chunks give both to the first replica."""
    prompts = np.repeat([9_000, 9_000, 100, 100, 100, 100], 4)
    parents = np.repeat(np.arange(6), 4)

    found = generation_shares(prompts, parents, 2, LIMIT, 16)

    assert found is not None
    for share in found:
        assert len(share) == 12 and len(np.unique(parents[share])) == 3
        assert np.count_nonzero(prompts[share] == 9_000) == 4


def test_one_long_prompt_is_computed_by_one_replica_and_the_others_have_the_short_ones():
    prompts = np.array([50_000, *[2_000] * 15])

    found = generation_shares(prompts, np.arange(16), 4, LIMIT, 16)

    assert found is not None
    assert [len(share) for share in found] == [1, 5, 5, 5]
