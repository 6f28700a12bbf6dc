"""Episodes with second tries, branches, subagents and summaries: every segment is a row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.programs import episode_segments as program

GAP = 1e-6
"""Largest distance of a recorded log-probability from transformers' forward, float32."""
SEGMENTS = 6
"""Two tries, a branch of the second, two helpers and a summary."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, spawn_ranks: Any) -> dict[str, Any]:
    """Case -> columns by row."""
    out: Path = tmp_path_factory.mktemp("segments")
    spawn_ranks(program.run_all, 2, str(out))
    return {case: json.loads((out / f"{case}.json").read_text()) for case in program.CASES}


def test_every_segment_of_every_episode_is_a_row(found: dict[str, Any]) -> None:
    columns = found["episode"]
    assert len(columns["ids"]) == SEGMENTS * program.NUM_EPISODES
    assert len(set(columns["ids"])) == len(columns["ids"]) and all(columns["valid"])
    for first in range(0, len(columns["ids"]), SEGMENTS):
        episode = slice(first, first + SEGMENTS)
        assert columns["row_weights"][episode] == pytest.approx([1 / SEGMENTS] * SEGMENTS)
        assert len(set(columns["parents"][episode])) == 1
        assert sorted(columns["num_turns"][episode]) == [1, 1, 1, 2, 2, 2]
        assert len(set(columns["scores"][episode])) == 1


@pytest.mark.parametrize("case", ["episode-2", "choices-2"])
def test_recorded_log_probs_are_those_of_transformers_and_masks_are_right(
    found: dict[str, Any], case: str
) -> None:
    columns = found[case]
    model = AutoModelForCausalLM.from_pretrained(program.TASK / "model", dtype=torch.float32)
    worst = 0.0
    num_sampled = 0
    for prompt, response, mask, recorded in zip(
        *(columns[name] for name in program.COLUMNS[:4]), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        for ours, theirs, is_sampled in zip(recorded, expected.tolist(), mask, strict=True):
            assert is_sampled or ours == 0
            worst = max(worst, abs(ours - theirs) * is_sampled)
            num_sampled += is_sampled
    assert worst < GAP and num_sampled > 8 * program.NUM_EPISODES


@pytest.mark.parametrize("case", ["episode", "choices"])
def test_ranks_change_no_bit_of_the_rows(found: dict[str, Any], case: str) -> None:
    one = found[case]
    two = found[f"{case}-2"]
    assert len(set(one["scores"])) > 2
    exact = [name for name in (*program.COLUMNS, "ids", "parents") if name != "old_log_probs"]

    assert {name: two[name] for name in exact} == {name: one[name] for name in exact}
    for name in ("actor/loss", "actor/grad_norm"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4, abs=1e-7)


def test_choices_are_rows_of_which_each_trains_its_own_tokens(found: dict[str, Any]) -> None:
    columns = found["choices-2"]
    assert len(columns["ids"]) == 4 * program.NUM_EPISODES
    for first in range(0, len(columns["ids"]), 4):
        rows = range(first, first + 4)
        (trunk,) = [row for row in rows if columns["num_turns"][row] == 2]
        branch = first + 3  # of the last reply
        assert [columns["num_turns"][row] for row in rows if row != trunk] == [1, 1, 1]
        starts = [columns["prompts"][row] for row in rows if row != branch]
        assert starts[0] == starts[1] == starts[2]
        ids = columns["prompts"][trunk] + columns["responses"][trunk]
        mask = [False] * len(columns["prompts"][trunk]) + columns["response_mask"][trunk]
        read = len(columns["prompts"][branch])
        assert ids[:read] == columns["prompts"][branch]
        assert all(mask[read:]) and not mask[read - 1]
        for row in rows:
            if row != trunk:
                assert all(columns["response_mask"][row])


def test_choices_have_the_tokens_of_as_many_requests(found: dict[str, Any]) -> None:
    exact = [name for name in (*program.COLUMNS, "ids", "parents") if name != "old_log_probs"]

    assert {name: found["choices"][name] for name in exact} == {
        name: found["requests"][name] for name in exact
    }


def test_segments_have_the_grpo_advantage_of_their_episodes(found: dict[str, Any]) -> None:
    columns = found["episode"]
    scores = torch.tensor(columns["scores"]).view(-1, 4, SEGMENTS)[..., 0].double()
    expected = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)

    for number, row in enumerate(columns["advantages"]):
        wanted = expected.flatten()[number // SEGMENTS].item()
        chosen = columns["response_mask"][number]
        assert row == pytest.approx([wanted * each for each in chosen], abs=1e-5)


def test_named_segments_are_compared_with_their_own_name(found: dict[str, Any]) -> None:
    columns = found["segment-2"]
    sizes = Counter(columns["parents"])
    # of each group of four episodes: four segments of each helper, and 16 of the policy
    assert sorted(sizes.values()) == sorted([4, 4, 16] * 3)
    weights = Counter[int]()
    for parent, weight in zip(columns["parents"], columns["row_weights"], strict=True):
        weights[parent] += weight
    assert list(weights.values()) == pytest.approx([4.0] * len(weights))
    scores_of: dict[int, list[float]] = {}
    for parent, score in zip(columns["parents"], columns["scores"], strict=True):
        scores_of.setdefault(parent, []).append(score)
    for number, parent in enumerate(columns["parents"]):
        # one score for each episode: the policy's four segments have the same
        episodes = torch.tensor(scores_of[parent]).double().view(4, -1)[:, 0]
        wanted = (columns["scores"][number] - episodes.mean()) / (episodes.std() + 1e-6)
        assert columns["advantages"][number][-1] == pytest.approx(float(wanted), abs=1e-5)
    assert len(set(columns["scores"])) > 3


def test_all_segments_of_a_batch_are_one_mini_batch(found: dict[str, Any]) -> None:
    for columns in found.values():
        assert columns["metrics"]["actor/optimizer_steps"] == 1
