"""Advantages without a critic against their definitions in loops, also with groups over ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import pad, ragged
from spmdflow.data.row_id import RowGroups, positions_in_groups
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.objectives.advantage import compute_advantages
from spmdflow.objectives.estimator import ESTIMATORS, Samples, advantage, reward_to_go
from tests.unit.threaded_ranks import run_ranks, take

PLAIN = AdvantageConfig(whiten=False, gamma=0.9)
GROUPED = ["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_pp_baseline"]
OTHERS = ["gpg", "pass_at_k_std", "optimal_token_baseline"]
"""With definitions in test_more_advantages."""

cases = st.builds(
    lambda seed, sizes: (seed, [g for g, n in enumerate(sizes) for _ in range(n)]),
    st.integers(0, 10_000),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
"""(seed, group of each row): groups of one to five samples."""


def definition(name: str, scores: list[float], lengths: list[int], i: int) -> float:
    """The advantage of sample i of one group, from the formula as it is printed."""
    n = len(scores)
    if n == 1:
        return scores[0]
    if name == "grpo":
        return (scores[i] - statistics.fmean(scores)) / (statistics.stdev(scores) + 1e-6)
    if name == "rloo":
        return scores[i] - sum(scores[j] for j in range(n) if j != i) / (n - 1)
    if name == "opo":
        tokens = max(sum(lengths), 1)
        return scores[i] - sum(x * y for x, y in zip(lengths, scores, strict=True)) / tokens
    if name == "pass_at_k":  # of AdvantageConfig, where k is the whole group
        return max(scores) - max(scores[:i] + scores[i + 1 :])
    return scores[i] - sum(scores) / n


@pytest.mark.parametrize("name", GROUPED)
@settings(deadline=None, max_examples=40)
@given(cases)
def test_group_advantage_equals_its_definition(name: str, case: tuple[int, list[int]]) -> None:
    batch, groups = make(*case)

    found = pad(run(batch, groups, name)["advantages"])

    mask = pad(batch["response_mask"])
    rewards = pad(batch["token_level_rewards"]).double()
    rows = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    for members in rows.values():
        scores = [float(rewards[row].sum()) for row in members]
        lengths = [int(mask[row].sum()) for row in members]
        for i, row in enumerate(members):
            expected = torch.where(mask[row], definition(name, scores, lengths, i), 0.0)
            torch.testing.assert_close(found[row], expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*GROUPED, *OTHERS, "remax", "reinforce_pp"])
@settings(deadline=None, max_examples=8)
@given(cases, st.integers(0, 100))
def test_advantages_do_not_depend_on_which_rank_has_a_row(
    name: str, case: tuple[int, list[int]], seed: int
) -> None:
    batch, groups = make(*case)
    owner = torch.randint(0, 3, (len(groups),), generator=torch.Generator().manual_seed(seed))
    rows = [torch.nonzero(owner == rank)[:, 0].tolist() for rank in range(3)]
    cfg = AdvantageConfig(whiten=True)

    def on_rank(rank: int, reduce: Callable[[Tensor], Tensor]) -> TensorDict:
        return run(take(batch, rows[rank]), groups, name, cfg, reduce, rows[rank])

    whole = run(batch, groups, name, cfg)
    parts = run_ranks(on_rank, 3)

    width = pad(whole["advantages"]).shape[1]
    for rank, part in enumerate(parts):
        expected = pad(whole["advantages"])[rows[rank]]
        torch.testing.assert_close(pad(part["advantages"], width=width), expected)


@settings(deadline=None)
@given(cases)
def test_centred_advantages_of_a_group_add_up_to_zero(case: tuple[int, list[int]]) -> None:
    batch, groups = make(*case, holes=False)

    for name in ("grpo", "dr_grpo", "rloo"):
        first = pad(run(batch, groups, name)["advantages"])[:, 0].double()
        for group in set(groups):
            members = [row for row, its in enumerate(groups) if its == group]
            if len(members) > 1:
                assert float(first[members].sum()) == pytest.approx(0, abs=1e-5)


def test_samples_that_all_score_the_same_have_no_grpo_advantage() -> None:
    batch, groups = make(0, [0, 0, 0], holes=False)
    lengths = torch.tensor([3, 3, 3])
    batch["token_level_rewards"] = ragged(torch.full((9,), 0.1), lengths)
    batch["response_mask"] = ragged(torch.ones(9, dtype=torch.bool), lengths)

    found = run(batch, groups, "grpo")["advantages"].values()

    assert float(found.abs().max()) < 1e-6


def test_remax_subtracts_the_greedy_score_from_the_reward_to_go() -> None:
    batch, groups = make(5, [0, 1, 2])

    found = pad(run(batch, groups, "remax")["advantages"])

    mask = pad(batch["response_mask"])
    rewards = pad(batch["token_level_rewards"]).double()
    for row in range(3):
        for t in range(mask.shape[1]):
            to_go = float(rewards[row, t:].sum())
            expected = to_go - float(batch["baseline_scores"][row]) if mask[row, t] else 0.0
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-5)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 1.0))
def test_reward_to_go_equals_the_discounted_sum_over_chosen_tokens(seed: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, 8, generator=generator) < 0.6
    rewards = torch.randn(1, 8, generator=generator, dtype=torch.float64) * mask

    found = reward_to_go(rewards, mask, gamma)

    chosen = rewards[mask]
    expected = [
        sum(gamma ** (u - t) * float(chosen[u]) for u in range(t, len(chosen)))
        for t in range(len(chosen))
    ]
    torch.testing.assert_close(found[mask], torch.tensor(expected, dtype=torch.float64))
    assert (found[~mask] == 0).all()


def test_reinforce_pp_is_the_whitened_reward_to_go() -> None:
    batch, groups = make(1, [0, 0, 1])

    found = run(batch, groups, "reinforce_pp", AdvantageConfig(whiten=True, gamma=0.9))

    mask = pad(batch["response_mask"])
    rewards = pad(batch["token_level_rewards"]).double()
    to_go = reward_to_go(rewards, mask, 0.9)[mask]
    expected = (to_go - to_go.mean()) / to_go.std()
    torch.testing.assert_close(pad(found["advantages"])[mask].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [*GROUPED, *OTHERS, "remax", "reinforce_pp"])
def test_rows_without_a_chosen_token_and_no_rows_at_all_are_finite_and_zero(name: str) -> None:
    batch, groups = make(2, [0, 0, 1])
    batch["response_mask"] = ragged(
        torch.zeros_like(batch["response_mask"].values()), batch["response_mask"].offsets().diff()
    )

    assert (run(batch, groups, name)["advantages"].values() == 0).all()
    empty = run(take(batch, []), [], name)
    assert empty.batch_size == torch.Size([0])


def test_own_estimator_is_known_by_its_name_with_the_columns_it_reads() -> None:
    @advantage("own_test", reads=("values",))
    def own(samples: Samples, cfg: AdvantageConfig) -> tuple[Tensor, Tensor]:
        assert samples.columns["values"].shape == samples.mask.shape
        return samples.spread(samples.scores * 0 + 2), samples.rewards

    batch, groups = make(3, [0, 1])

    assert ESTIMATORS.find("own_test").reads == ("values",)
    assert set(run(batch, groups, "own_test")["advantages"].values().tolist()) <= {0.0, 2.0}


def test_own_estimator_that_returns_one_tensor_is_refused_with_what_it_should_return() -> None:
    @advantage("own_test")
    def own(samples: Samples, cfg: AdvantageConfig) -> Any:
        return samples.rewards

    batch, groups = make(3, [0, 1])

    with pytest.raises(ProtocolError, match=r"got 1 of .*expected \(advantages, returns\), each"):
        run(batch, groups, "own_test")


def test_name_of_another_modules_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="not taken by spmdflow.objectives.estimator"):
        advantage("rloo")(lambda samples, cfg: (samples.rewards, samples.rewards))


def make(seed: int, groups: list[int], *, holes: bool = True) -> tuple[TensorDict, list[int]]:
    """Rows with random rewards; rewards outside the mask lie in holes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (len(groups),), generator=generator)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < (0.7 if holes else 2)
    columns = {
        name: ragged(torch.randn(total, generator=generator), lengths)
        for name in ("token_level_rewards", "values")
    }
    if holes:  # so that a reward to go is a sum over places
        rewards = columns["token_level_rewards"].values() * mask
        columns["token_level_rewards"] = ragged(rewards, lengths)
    columns["response_mask"] = ragged(mask, lengths)
    columns["baseline_scores"] = torch.randn(len(groups), generator=generator)
    chosen = 0.05 + 0.9 * torch.rand(total, generator=generator)
    columns["old_log_probs"] = ragged(chosen.log(), lengths)
    columns["squared_probs"] = ragged(chosen.square() + (1 - chosen).square() / 10, lengths)
    return TensorDict(columns, batch_size=[len(groups)]), groups


def run(
    batch: TensorDict,
    groups: list[int],
    name: str,
    cfg: AdvantageConfig = PLAIN,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
    rows: list[int] | None = None,
) -> TensorDict:
    """compute_advantages of the rows that batch has; groups are those of the whole batch."""
    places, largest = positions_in_groups(np.array(groups, dtype=np.int64))
    here = torch.tensor(range(len(groups)) if rows is None else rows, dtype=torch.int64)
    index = torch.tensor(groups, dtype=torch.int64)
    place = torch.from_numpy(places)
    count = max(groups, default=0) + 1
    return compute_advantages(
        batch,
        estimator=name,
        cfg=cfg,
        groups=RowGroups(index[here], count, reduce, place[here], largest),
        reduce=reduce,
        report=lambda metrics: None,
    )
