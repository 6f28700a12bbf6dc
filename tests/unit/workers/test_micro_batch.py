"""Cutting rows into micro-batches (integers), and building their tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.data.micro import cut, num_micro_batches
from spmdflow.data.ragged import ragged, ragged_from_rows, rows_of
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.workers.micro_batch import MicroBatch, join_answers, micro_batches

LENGTHS = st.lists(st.integers(1, 40), max_size=24)
CPU = torch.device("cpu")


@settings(deadline=None)  # a loaded machine is no failure
@given(LENGTHS, st.integers(1, 30), st.booleans(), st.booleans())
def test_cut_gives_exactly_the_parts_asked_for_and_each_row_once(
    lengths: list[int], parts: int, by_tokens: bool, packed: bool
) -> None:
    found = cut(lengths, parts, by_tokens=by_tokens, packed=packed)

    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in found)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 12))
def test_cut_by_rows_is_contiguous_and_even_first(rows: int, parts: int) -> None:
    found = cut([5] * rows, parts, by_tokens=False, packed=True)

    sizes = [len(part) for part in found]
    assert [row for part in found for row in part] == list(range(rows))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 9))
def test_number_by_rows_is_the_least_that_keeps_every_part_within_max_rows(
    shares: list[list[int]], max_rows: int
) -> None:
    number = num_micro_batches(shares, max_rows=max_rows, max_tokens=None, packed=True)

    assert _largest_part(shares, number) <= max_rows
    assert number == 1 or _largest_part(shares, number - 1) > max_rows


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(40, 160), st.booleans())
def test_number_by_tokens_is_the_least_that_keeps_every_part_within_the_budget(
    shares: list[list[int]], max_tokens: int, packed: bool
) -> None:
    number = num_micro_batches(shares, max_rows=1, max_tokens=max_tokens, packed=packed)

    assert _largest_cost(shares, number, packed) <= max_tokens
    assert number == 1 or _largest_cost(shares, number - 1, packed) > max_tokens


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 39), st.booleans())
def test_budget_below_the_longest_row_costs_no_more_than_that_row(
    lengths: list[int], max_tokens: int, packed: bool
) -> None:
    number = num_micro_batches([lengths], max_rows=1, max_tokens=max_tokens, packed=packed)

    assert _largest_cost([lengths], number, packed) <= max(max_tokens, *lengths, 0)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 12), st.booleans())
def test_more_parts_never_cost_more_tokens(lengths: list[int], parts: int, packed: bool) -> None:
    fewer, more = (_largest_cost([lengths], number, packed) for number in (parts, parts + 1))

    assert more <= fewer


@pytest.mark.parametrize("packed", [False, True])
def test_row_longer_than_the_budget_has_a_part_of_its_own(packed: bool) -> None:
    assert num_micro_batches([[50, 3, 3]], max_rows=1, max_tokens=10, packed=packed) == 2
    assert cut([50, 3, 3], 2, by_tokens=True, packed=packed) == [[0], [1, 2]]


def test_number_for_no_rows_is_one_because_every_rank_runs_the_collectives() -> None:
    assert num_micro_batches([[], []], max_rows=4, max_tokens=None, packed=True) == 1
    assert num_micro_batches([[], []], max_rows=4, max_tokens=9, packed=True) == 1
    assert num_micro_batches([], max_rows=4, max_tokens=None, packed=True) == 1


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(0, None), (4, 0)])
def test_limit_below_one_is_refused_with_the_number(max_rows: int, max_tokens: int | None) -> None:
    with pytest.raises(
        ConfigError, match="got max_rows .* expected at least 1; set engine.micro_batch"
    ):
        num_micro_batches([[3]], max_rows=max_rows, max_tokens=max_tokens, packed=True)


def test_micro_batch_joins_prompt_and_response_and_pads_on_the_right() -> None:
    (micro,) = micro_batches(_batch(), num_micro_batches=1, by_tokens=False, device=CPU)

    assert micro.input_ids.tolist() == [[1, 2, 11, 12, 13], [3, 14, 0, 0, 0], [4, 5, 6, 0, 0]]
    assert micro.position_ids[1].tolist() == [0, 1, 2, 3, 4]
    assert micro.response_mask.tolist() == [[True, False, True], [True, False, False], [False] * 3]
    assert micro.columns["values"].tolist() == [[0.5, 1.5, 2.5], [3.5, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert micro.columns["scores"].tolist() == [7.0, 8.0, 9.0]
    assert "text" not in micro.columns
    assert micro.row_weight.tolist() == [1.0, 1.0, 1.0]


ROWS = st.lists(
    st.tuples(st.sampled_from([(7, 8, 9), (7, 8), (4,)]), st.lists(st.integers(1, 9), max_size=5)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(ROWS)
def test_shared_prompts_lie_once_and_every_row_can_be_read_from_what_it_sees(
    rows: list[tuple[tuple[int, ...], list[int]]],
) -> None:
    columns = {
        "prompts": ragged_from_rows([torch.tensor(prompt) for prompt, _ in rows]),
        "responses": ragged_from_rows([torch.tensor(own, dtype=torch.int64) for _, own in rows]),
    }
    batch = TensorDict(columns, batch_size=[len(rows)])

    (micro,) = micro_batches(
        batch, num_micro_batches=1, by_tokens=True, device=CPU, packed=True, shares_prompts=True
    )

    ids = micro.input_ids[0]
    positions = micro.position_ids[0]
    packed = micro.packed
    assert packed is not None and packed.lengths == tuple(packed.offsets.diff().tolist())
    read = []  # tokens of what each packed row sees
    for own, number in enumerate(packed.lengths):
        own_places = range(int(packed.offsets[own]), int(packed.offsets[own]) + number)
        places = own_places
        if packed.seen is not None:
            start, end = packed.seen.offsets[own : own + 2].tolist()
            places = packed.seen.indices[start:end].tolist()
            assert places[-number:] == list(own_places)
        assert positions[list(places)].tolist() == list(range(len(places)))
        read.append(tuple(ids[list(places)].tolist()))
    whole = [(*prompt, *own) for prompt, own in rows]
    assert set(whole) <= set(read)
    saved = sum(map(len, whole)) - ids.numel()
    assert (saved > 0) == (packed.seen is not None) and saved >= 0
    start = 0
    for place, row in enumerate(micro.index.tolist()):
        prompt, own = rows[row]
        before = micro.predicting[start : start + len(own)]
        assert ids[before].tolist() == [*prompt[-1:], *own[:-1]][: len(own)]
        assert positions[before].tolist() == list(
            range(len(prompt) - 1, len(prompt) - 1 + len(own))
        )
        assert ids[micro.ends[place]] == [*prompt, *own][-1]
        start += len(own)
    assert micro.targets.tolist() == [
        token for row in micro.index.tolist() for token in rows[row][1]
    ]


def test_prompt_is_shared_only_where_it_saves_an_eighth() -> None:
    def places(prompt: int, response: int) -> int:
        columns = {
            "prompts": ragged_from_rows([torch.arange(prompt)] * 2),
            "responses": ragged_from_rows([torch.arange(response)] * 2),
        }
        (micro,) = micro_batches(
            TensorDict(columns, batch_size=[2]),
            num_micro_batches=1, by_tokens=True, device=CPU, packed=True, shares_prompts=True,
        )  # fmt: skip
        return micro.input_ids.numel()

    assert places(4, 12) == 28 and places(4, 13) == 34


def test_packed_rows_lie_end_to_end_shorter_ones_first_and_positions_restart() -> None:
    (micro,) = _micros(_batch(), packed=True)

    assert micro.index.tolist() == [1, 2, 0]
    assert micro.input_ids.tolist() == [[3, 14, 4, 5, 6, 1, 2, 11, 12, 13]]
    assert micro.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 4]]
    assert micro.packed is not None and micro.packed.lengths == (2, 3, 5)
    assert micro.packed.offsets.tolist() == [0, 2, 5, 10]
    assert micro.columns["values"].tolist() == [[3.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 1.5, 2.5]]


@pytest.mark.parametrize("packed", [False, True])
def test_each_response_token_is_predicted_at_the_position_before_it(packed: bool) -> None:
    (micro,) = _micros(_batch(), packed=packed)

    assert packed or micro.predicting.tolist() == [1, 2, 3, 5]  # of rows of 5 places
    assert torch.equal(micro.input_ids.flatten()[micro.predicting + 1], micro.targets)
    order = micro.index.argsort()
    spread = micro.spread(micro.targets)[order]
    assert spread.tolist() == [[11, 12, 13], [14, 0, 0], [0, 0, 0]]
    assert micro.input_ids.flatten()[micro.ends][order].tolist() == [13, 14, 6]


def test_batch_without_rows_gives_padding_of_weight_zero_with_every_column() -> None:
    empty = TensorDict(
        {
            "prompts": ragged_from_rows([], dtype=torch.int64),
            "responses": ragged_from_rows([], dtype=torch.int64),
            "values": ragged_from_rows([], dtype=torch.float32),
            "scores": torch.zeros(0),
        },
        batch_size=[0],
    )

    micros = micro_batches(empty, num_micro_batches=3, by_tokens=True, device=CPU)

    assert len(micros) == 3
    for micro in micros:
        assert micro.input_ids.shape == (1, 2) and micro.packed is None
        assert not micro.response_mask.any() and micro.row_weight.tolist() == [0.0]
        assert micro.columns["values"].shape == (1, 1) and micro.columns["scores"].shape == (1,)
        assert len(micro.index) == 0


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 9), st.booleans(), st.booleans())
def test_rows_return_to_their_order_whatever_the_parts(
    lengths: list[int], parts: int, by_tokens: bool, packed: bool
) -> None:
    responses = [torch.arange(n) + 100 * row for row, n in enumerate(lengths)]
    batch = TensorDict(
        {
            "prompts": ragged_from_rows([torch.tensor([row + 1]) for row in range(len(lengths))]),
            "responses": ragged_from_rows(responses),
        },
        batch_size=[len(lengths)],
    )

    micros = micro_batches(
        batch, num_micro_batches=parts, by_tokens=by_tokens, device=CPU, packed=packed
    )
    answers = [
        {
            "first": micro.input_ids.flatten()[micro.ends - micro.response_lengths],
            "tokens": micro.spread(micro.targets),
        }
        for micro in micros
    ]
    joined = join_answers(answers, micros)

    assert joined["first"].tolist() == [row + 1 for row in range(len(lengths))]
    restored = rows_of(joined["tokens"])
    assert all(torch.equal(a, b) for a, b in zip(restored, responses, strict=True))


def test_missing_response_mask_means_every_token_was_chosen() -> None:
    (micro,) = _micros(_batch().exclude("response_mask"))

    assert torch.equal(micro.response_mask, micro.response_tokens)


def test_empty_prompt_is_refused_because_nothing_predicts_the_first_token() -> None:
    batch = _batch()
    batch["prompts"] = ragged_from_rows(
        [torch.tensor([1]), torch.zeros(0).long(), torch.tensor([2])]
    )

    with pytest.raises(ColumnError, match="row 1 has an empty prompt; expected at least one"):
        _micros(batch)


def test_column_of_other_lengths_than_the_responses_is_refused_with_both() -> None:
    batch = _batch()
    batch["values"] = ragged(torch.zeros(4), torch.tensor([2, 2, 0]))

    with pytest.raises(ColumnError, match=r"values has row lengths \[2, 2, 0\].*\[3, 1, 0\]"):
        _micros(batch)


def test_batch_without_responses_is_refused_with_its_columns() -> None:
    with pytest.raises(ColumnError, match="got columns .*'prompts'.* expected ragged responses"):
        _micros(_batch().exclude("responses"))


def _batch() -> TensorDict:
    """Three rows; prompts of 2, 1, 3 tokens, responses of 3, 1, 0."""
    lengths = torch.tensor([3, 1, 0])
    batch = TensorDict(
        {
            "prompts": ragged(torch.arange(1, 7), torch.tensor([2, 1, 3])),
            "responses": ragged(torch.arange(11, 15), lengths),
            "response_mask": ragged(torch.tensor([True, False, True, True]), lengths),
            "values": ragged(torch.tensor([0.5, 1.5, 2.5, 3.5]), lengths),
            "scores": torch.tensor([7.0, 8.0, 9.0]),
        },
        batch_size=[3],
    )
    batch.set_non_tensor("text", ["a", "b", "c"])
    return batch


def _micros(batch: TensorDict, *, packed: bool = False) -> list[MicroBatch]:
    return micro_batches(batch, num_micro_batches=1, by_tokens=False, device=CPU, packed=packed)


def _largest_part(shares: list[list[int]], number: int) -> int:
    parts = [cut(ls, number, by_tokens=False, packed=True) for ls in shares]
    return max(len(part) for each in parts for part in each)


def _largest_cost(shares: list[list[int]], number: int, packed: bool) -> int:
    """Tokens that the model computes of the costliest part: with padding unless packed."""
    found = [0]
    for lengths in shares:
        for part in cut(lengths, number, by_tokens=True, packed=packed):
            tokens = [lengths[row] for row in part]
            found.append(sum(tokens) if packed else len(part) * max(tokens, default=0))
    return max(found)
