"""Which tokens become which rows, which rewards they get, and how much they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.objective import AdvantageConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.data.row_id import RowGroups, named_group_ids, segment_ids
from spmdflow.episodes.credit import CreditRule, credit_segments
from spmdflow.episodes.recorder import RecordedReply, Segment
from spmdflow.errors import ColumnError, DataError, RowError
from spmdflow.objectives.advantage import compute_advantages
from spmdflow.objectives.loss import AGGREGATIONS, aggregate, mask_totals

CFG = AdvantageConfig()


def segment(name: str, turns: Sequence[int], *, tokens_each: int = 2) -> Segment:
    """A segment whose replies have this many tokens, with one token of the user between them."""
    replies = []
    tokens: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        start = len(tokens)
        tokens += list(range(tokens_each))
        mask += [True] * tokens_each
        replies.append(RecordedReply(turn, start, len(tokens), (), ""))
        tokens.append(9)
        mask.append(False)
    tokens.pop()
    mask.pop()
    return Segment([1], tokens, mask, name=name, replies=replies)


IDS = {f"{turn}": turn for turn in range(10)}
THREE = [segment("", [0, 3]), segment("helper", [1]), segment("", [2, 4])]
"""In the order of their last replies: helper, the first, the third."""


def rewards_of(rule: CreditRule, **parts: object) -> list[tuple[str, float, float]]:
    credited = credit_segments(THREE, IDS, 1.0, parts, rule)
    for each in credited:
        assert sum(each.rewards) == pytest.approx(each.score)
    return [(each.segment.name, each.score, each.weight) for each in credited]


def test_by_episode_every_segment_gets_the_score_and_all_count_as_one() -> None:
    third = 1 / 3
    assert rewards_of(CreditRule("episode", 0.9)) == [
        ("helper", 1.0, third),
        ("", 1.0, third),
        ("", 1.0, third),
    ]


def test_by_segment_each_gets_its_own_score_and_those_of_a_name_count_as_one() -> None:
    found = rewards_of(CreditRule("segment", 0.9), segment_scores={"helper": -2.0, "id-4": 5.0})

    assert found == [("helper", -2.0, 1.0), ("", 1.0, 0.5), ("", 5.0, 0.5)]


def test_discounted_rewards_are_sums_over_the_segments_that_follow() -> None:
    found = rewards_of(CreditRule("discounted", 0.5), segment_scores={"helper": 3.0})

    assert found == [
        ("helper", 3.0 + 0.25, 1 / 3),
        ("", 0.5, 1 / 3),
        ("", 1.0, 1 / 3),
    ]


def test_only_the_named_are_trained() -> None:
    assert rewards_of(CreditRule("episode", 0.9), trained=["policy"]) == [
        ("", 1.0, 0.5),
        ("", 1.0, 0.5),
    ]
    assert rewards_of(CreditRule("episode", 0.9), trained=["nobody"]) == []


def test_scores_of_turns_and_tokens_are_added_where_they_are() -> None:
    parts = {"turn_scores": {"id-0": 10.0}, "token_scores": {"id-3": [1.0, 2.0]}}
    credited = credit_segments(THREE, IDS, 1.0, parts, CreditRule("episode", 0.9))

    assert credited[1].rewards == [0.0, 10.0, 0.0, 1.0, 3.0]  # the last has the score too
    assert credited[0].rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    "parts",
    [
        {"segment_scores": {"nobody": 1.0}},
        {"turn_scores": {"id-9": 1.0}},
        {"token_scores": {"id-0": [1.0]}},
    ],
)
def test_scores_of_unknown_parts_are_refused(parts: dict[str, object]) -> None:
    with pytest.raises(DataError, match="expected"):
        credit_segments(THREE, IDS, 1.0, parts, CreditRule("episode", 0.9))


def test_scores_of_segments_are_not_ignored_silently() -> None:
    with pytest.raises(DataError, match=r"credit=episode.*set it to segment"):
        rewards_of(CreditRule("episode", 0.9), segment_scores={"helper": 1.0})


def advantages(
    estimator: str, scores: list[float], groups: list[int], weights: Tensor | None
) -> list[float]:
    """The advantage of each row's only token."""
    batch = TensorDict(
        {
            "response_mask": ragged_from_rows([torch.ones(1, dtype=torch.bool) for _ in scores]),
            "token_level_rewards": ragged_from_rows([torch.tensor([x]) for x in scores]),
        },
        batch_size=[len(scores)],
    )
    if weights is not None:
        batch["row_weights"] = weights
    index = torch.tensor(groups)
    row_groups = RowGroups(index, max(groups) + 1, lambda x: x, torch.zeros_like(index), 1)
    made = compute_advantages(
        batch,
        estimator=estimator,
        cfg=CFG,
        groups=row_groups,
        reduce=lambda x: x,
        report=lambda metrics: None,
    )
    return [float(row) for row in rows_of(made["advantages"])]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 7), st.integers(-3, 3)), min_size=1, max_size=12
    ),
    st.sampled_from(["grpo", "dr_grpo", "rloo", "opo"]),
)
def test_segments_have_the_advantage_of_their_episode(
    episodes: list[tuple[int, int, int]], estimator: str
) -> None:
    groups, counts, scores = (list(each) for each in zip(*episodes, strict=True))
    groups = [sorted(set(groups)).index(group) for group in groups]
    whole = advantages(estimator, [float(x) for x in scores], groups, None)

    def repeated(values: list[float]) -> list[float]:
        return [x for x, count in zip(values, counts, strict=True) for _ in range(count)]

    weights = torch.tensor(repeated([1 / count for count in counts]))
    group_of_row = [int(x) for x in repeated([float(group) for group in groups])]
    found = advantages(estimator, repeated([float(x) for x in scores]), group_of_row, weights)

    assert found == pytest.approx(repeated(whole), abs=2e-5)


def test_an_estimator_of_whole_groups_refuses_segments() -> None:
    with pytest.raises(ColumnError, match="several segments"):
        advantages("pass_at_k", [1.0, 1.0, 0.0], [0, 0, 0], torch.tensor([0.5, 0.5, 1.0]))


@pytest.mark.parametrize("mode", sorted(set(AGGREGATIONS) - {"sequence-mean-token-sum-by-budget"}))
def test_a_row_of_weight_one_half_counts_as_half_of_two_equal_rows(mode: str) -> None:
    draw = torch.Generator().manual_seed(1)
    losses = torch.randn(3, 4, generator=draw)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    expected = aggregate(losses, mask, mask_totals(mask.sum(-1)), mode)

    rows = torch.tensor([0, 1, 1, 2])
    weights = torch.tensor([1.0, 0.5, 0.5, 1.0])
    totals = mask_totals(mask[rows].sum(-1), weights)
    found = aggregate(losses[rows], mask[rows], totals, mode, weights)

    torch.testing.assert_close(found, expected)


def test_ids_of_segments_depend_on_the_episode_alone_and_are_no_other_rows() -> None:
    episodes = torch.tensor([5, 5, 6, 1 << 40]).numpy()
    numbers = torch.tensor([0, 1, 0, 4095]).numpy()
    ids = segment_ids(episodes, numbers)

    assert len(set(ids.tolist())) == 4 and min(ids) >= 1 << 61 and max(ids) < 1 << 62
    assert segment_ids(episodes[1:2], numbers[1:2])[0] == ids[1]
    groups = named_group_ids(episodes, torch.tensor([7, 8, 7, 7]).numpy())
    assert len(set(groups.tolist())) == 4
    same = named_group_ids(episodes[:2], torch.tensor([7, 7]).numpy())
    assert same[0] == same[1] and not set(groups.tolist()) & set(ids.tolist())
    with pytest.raises(RowError):
        segment_ids(torch.tensor([1 << 62]).numpy(), numbers[:1])


def test_weights_do_not_change_sums_of_groups_without_them() -> None:
    index = torch.tensor([0, 0, 1])
    plain = RowGroups(index, 2, lambda x: x)
    weighted = replace(plain, weights=torch.ones(3).double())
    values = torch.tensor([1.0, 2.0, 4.0])

    assert torch.equal(plain.means(values), weighted.means(values))
    assert torch.equal(plain.sizes(), weighted.sizes())
