"""Which tokens of rows a rank has, and which keys its queries see; without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.workers.attention import PackedRows
from spmdflow.workers.context_group import GATHER, RING, ULYSSES, ContextGroup
from spmdflow.workers.context_parallel import GatheredKeys, TokenShard, _repeats
from spmdflow.workers.micro_batch import _positions_with_sharing, _with_padding_row

KINDS = (ULYSSES, GATHER, RING)


def of_rank(rank: int, size: int, attention: str) -> ContextGroup:
    """A context group whose ranks send nothing."""
    group: Any = SimpleNamespace(size=lambda: size)
    return ContextGroup(rank, group, attention)


@given(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from(KINDS), st.integers(1, 6))
def test_each_token_of_a_row_is_on_one_rank(size: int, attention: str, chunks: int) -> None:
    length = chunks * of_rank(0, size, attention).multiple

    every = [of_rank(0, size, attention).columns(length, rank) for rank in range(size)]

    assert torch.cat(every).sort().values.tolist() == list(range(length))
    assert len({len(columns) for columns in every}) == 1
    if attention != ULYSSES:  # all ranks see equally many keys
        assert len({int((columns + 1).sum()) for columns in every}) == 1


@given(st.sampled_from([2, 4]), st.sampled_from(KINDS), st.integers(1, 3), st.data())
def test_every_response_token_is_predicted_on_one_rank(
    size: int, attention: str, rows: int, data: st.DataObject
) -> None:
    length = 2 * of_rank(0, size, attention).multiple
    every = range(rows * length)
    predicting = torch.tensor(data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True)))
    tokens = torch.arange(rows * length).view(rows, length)

    slots = []
    for rank in range(size):
        shard = TokenShard.of(
            of_rank(rank, size, attention), shape=(rows, length), predicting=predicting
        )
        own = shard.select(tokens).flatten()
        assert (shard.index[own] == torch.arange(len(own))).all()
        real = shard.slots < len(predicting)
        assert (own[shard.predicting[real]] == predicting[shard.slots[real]]).all()
        slots += shard.slots[real].tolist()

    assert sorted(slots) == list(range(len(predicting)))


@st.composite
def packed(draw: st.DrawFn, multiple: int) -> PackedRows:
    """Rows of a packed sequence, whose number of tokens is a multiple; some share a prompt."""
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    groups = []
    lengths = []
    totals = []
    for prompt in prompts:
        count = draw(st.integers(1, 3))
        if count > 1:
            groups.append(list(range(len(totals), len(totals) + count)))
        for _ in range(count):
            lengths.append(prompt)
            totals.append(prompt + draw(st.integers(0, 7)))
    found = _positions_with_sharing(groups, lengths, totals).packed
    assert found is not None and found.seen is not None
    extra = -sum(found.lengths) % multiple
    if not extra:
        return found
    return _with_padding_row(found, sum(found.lengths), extra)


def keys_of_queries(rows: PackedRows, tokens: list[int]) -> dict[int, list[int]]:
    """Token -> the keys that it sees: its row's queries are the last of the row's keys."""
    assert rows.seen is not None
    result = {}
    all_keys = rows.seen.indices.split(list(rows.seen.lengths))
    index = 0
    for length, keys in zip(rows.lengths, all_keys, strict=True):
        for number in range(length):
            result[tokens[index]] = keys[: len(keys) - length + number + 1].tolist()
            index += 1
    return result


@given(st.sampled_from([2, 3, 4]), st.data())
def test_queries_see_the_keys_of_their_rows_wherever_a_row_is_cut(
    size: int, data: st.DataObject
) -> None:
    multiple = 2 * size
    rows = data.draw(packed(multiple))
    length = sum(rows.lengths)
    expected = keys_of_queries(rows, list(range(length)))

    found = {}
    for rank in range(size):
        group = of_rank(rank, size, GATHER)
        own = GatheredKeys.of(group, length, rows)
        assert own.rows is not None
        found |= keys_of_queries(own.rows, group.columns(length, rank).tolist())

    assert found == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "repeats"),
    [(8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 4, 6, 3), (8, 8, 4, 1), (6, 2, 3, 3)],
)
def test_key_heads_are_repeated_no_more_than_needed(
    heads: int, kv_heads: int, size: int, repeats: int
) -> None:
    assert _repeats(heads, kv_heads, size) == repeats
