"""GPG, pass@k by the deviation, the optimal token baseline and token rewards, in plain loops."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import lengths_of, pad, ragged
from spmdflow.objectives.advantage import compute_teacher_rewards
from spmdflow.objectives.log_prob import CausalOutput
from tests.unit.objectives.test_critic_free import cases, make, run

PLAIN = AdvantageConfig(whiten=False, gamma=0.9)


def rows_of_groups(groups: list[int]) -> list[list[int]]:
    rows = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    return list(rows.values())


def scores_of(batch: TensorDict) -> list[float]:
    return [float(row.double().sum()) for row in pad(batch["token_level_rewards"])]


@settings(deadline=None, max_examples=40)
@given(cases, st.booleans())
def test_gpg_scales_the_centred_scores_by_the_share_of_rows_with_a_gradient(
    case: tuple[int, list[int]], flat: bool
) -> None:
    batch, groups = make(*case, holes=False)
    members = rows_of_groups(groups)
    if flat:  # the first prompt's samples all score the same
        rewards = pad(batch["token_level_rewards"]).double()
        rewards[members[0]] = 0.0
        lengths = lengths_of(batch["token_level_rewards"])
        values = torch.cat([rewards[i, : lengths[i]] for i in range(len(groups))])
        batch["token_level_rewards"] = ragged(values.float(), lengths)

    found = pad(run(batch, groups, "gpg", PLAIN)["advantages"])

    scores = scores_of(batch)
    idle = 0
    for rows in members:
        if len(rows) > 1 and max(scores[i] for i in rows) == min(scores[i] for i in rows):
            idle += len(rows)
    alpha = len(groups) / max(len(groups) - idle, 1)
    for rows in members:
        mean = sum(scores[i] for i in rows) / len(rows) if len(rows) > 1 else 0.0
        for i in rows:
            expected = alpha * (scores[i] - mean)
            assert float(found[i, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(cases)
def test_pass_at_k_std_is_the_lead_of_the_best_by_the_deviation(
    case: tuple[int, list[int]],
) -> None:
    batch, groups = make(*case, holes=False)

    found = pad(run(batch, groups, "pass_at_k_std", PLAIN)["advantages"])

    scores = scores_of(batch)
    for rows in rows_of_groups(groups):
        for i in rows:
            expected = scores[i]
            if len(rows) > 1:
                second = max(scores[j] for j in rows if j != i)
                lead = max(scores[i] - second, 0.0)
                expected = lead / (statistics.stdev(scores[j] for j in rows) + 1e-6)
            assert float(found[i, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(cases, st.booleans())
def test_optimal_token_baseline_equals_its_definition(
    case: tuple[int, list[int]], weights: bool
) -> None:
    batch, groups = make(*case)
    if weights:
        lengths = lengths_of(batch["response_mask"])
        batch["rollout_weights"] = ragged(0.5 + torch.rand(int(lengths.sum())), lengths)

    made = run(batch, groups, "optimal_token_baseline", PLAIN)

    mask = pad(batch["response_mask"])
    columns = {
        name: pad(batch[name]).double() for name in batch.keys() if name != "baseline_scores"
    }
    to_go: dict[int, list[float]] = {}
    energy: dict[int, list[float]] = {}
    for i in range(len(groups)):
        own = mask[i].nonzero()[:, 0].tolist()
        to_go[i] = []
        energy[i] = []
        total = 0.0
        for t in own:
            pi = math.exp(float(columns["old_log_probs"][i, t]))
            w = 1 - 2 * pi + float(columns["squared_probs"][i, t])
            total += w * (float(columns["rollout_weights"][i, t]) ** 2 if weights else 1.0)
            energy[i].append(total)
            to_go[i].append(float(columns["token_level_rewards"][i, t:].sum()))
    found = pad(made["advantages"])
    for rows in rows_of_groups(groups):
        for i in rows:
            for place, t in enumerate(mask[i].nonzero()[:, 0].tolist()):
                there = [j for j in rows if len(to_go[j]) > place]
                baseline = 0.0
                if len(there) > 1:
                    top = sum(energy[j][place] * to_go[j][place] for j in there)
                    baseline = top / (sum(energy[j][place] for j in there) + 1e-8)
                expected = to_go[i][place] - baseline
                assert float(found[i, t]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (found[~mask] == 0).all()


def test_optimal_token_baseline_has_less_variance_than_the_group_mean() -> None:
    """Two actions of unlike probability: the baseline is that of least variance, by enumeration."""
    probs = [0.9, 0.1]
    rewards = [0.0, 1.0]
    squared = sum(p * p for p in probs)
    energies = [1 - 2 * p + squared for p in probs]  # |grad log pi|^2 by the logits
    mean = sum(p * r for p, r in zip(probs, rewards))
    best = sum(p * w * r for p, w, r in zip(probs, energies, rewards)) / sum(
        p * w for p, w in zip(probs, energies)
    )

    def second_moment(baseline: float) -> float:
        parts = zip(probs, energies, rewards, strict=True)
        return sum(p * w * (r - baseline) ** 2 for p, w, r in parts)

    # ten draws in the policy's own proportions
    lengths = torch.ones(10, dtype=torch.int64)
    actions = torch.tensor([0] * 9 + [1])
    columns: dict[str, Any] = {
        "token_level_rewards": ragged(torch.tensor(rewards)[actions], lengths),
        "response_mask": ragged(torch.ones(10, dtype=torch.bool), lengths),
        "old_log_probs": ragged(torch.tensor(probs)[actions].log(), lengths),
        "squared_probs": ragged(torch.full((10,), squared), lengths),
    }
    made = run(TensorDict(columns, batch_size=[10]), [0] * 10, "optimal_token_baseline", PLAIN)

    baseline = -float(pad(made["advantages"])[0, 0])
    assert baseline == pytest.approx(best, rel=1e-6)
    assert second_moment(baseline) < second_moment(mean)


def test_without_a_discount_a_token_has_its_own_reward_and_that_of_the_tool_behind_it() -> None:
    lengths = torch.tensor([4])
    columns = {
        "token_level_rewards": ragged(torch.tensor([1.0, 2.0, 4.0, 8.0]), lengths),
        "response_mask": ragged(torch.tensor([True, True, False, True]), lengths),
    }

    cfg = AdvantageConfig(whiten=False, gamma=0.0)
    made = run(TensorDict(columns, batch_size=[1]), [0], "reinforce_pp", cfg)

    assert pad(made["advantages"])[0].tolist() == [1.0, 6.0, 0.0, 8.0]


def test_distillation_advantage_is_the_teachers_log_probability_less_the_students() -> None:
    batch, groups = make(3, [0, 0, 1])
    mask = batch["response_mask"].values()
    lengths = lengths_of(batch["response_mask"])
    teacher = batch["old_log_probs"].values() - 0.3 * torch.rand(int(lengths.sum()))
    batch["ref_log_probs"] = ragged(teacher, lengths)

    rewards = compute_teacher_rewards(batch, reduce=lambda x: x, report=lambda metrics: None)
    batch["token_level_rewards"] = rewards["token_level_rewards"]
    made = run(batch, groups, "reinforce_pp", AdvantageConfig(whiten=False, gamma=0.0))

    expected = [
        float(ref) - float(own) if chosen else 0.0
        for ref, own, chosen in zip(teacher, batch["old_log_probs"].values(), mask, strict=True)
    ]
    torch.testing.assert_close(made["advantages"].values(), torch.tensor(expected))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sum_of_squared_probabilities_is_that_of_two_log_probabilities(temperature: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 16)
    weight = 0.7 * torch.randn(50, 16)
    targets = torch.randint(0, 50, (9,))
    output = CausalOutput(hidden, weight, targets)

    found = (2 * output.log_probs(temperature) - output.log_probs(temperature / 2)).exp()

    probs = (hidden.double() @ weight.double().T / temperature).softmax(-1)
    torch.testing.assert_close(found.double(), probs.square().sum(-1), rtol=2e-5, atol=1e-7)
