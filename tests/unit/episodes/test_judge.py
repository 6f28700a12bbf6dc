"""What a judge may return, who judges which group, and judges that hang or cannot be called."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.episode import EpisodeConfig, check_episode
from spmdflow.episodes.judgement import EPISODES, load_judge, pack_scores, unpack_scores
from spmdflow.episodes.judging import JudgedGroup, judged_scores, plan_groups
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.errors import ConfigError
from spmdflow.rewards.child import InvalidScore
from tests.distributed.programs import judge_env

FILE = str(judge_env.__file__)
ENDPOINT = {"base_url": "http://127.0.0.1:1", "model": "policy", "api_key": "key"}


def episode_of(length: int, does: str = "ranks") -> dict[str, Any]:
    """What a judge gets of an episode with one conversation."""
    segment = {"name": "", "messages": [], "prompt": "", "response": "", "num_sampled": length}
    return {"row": {"does": does}, "score": 0.0, "scores": {}, "failed": "", "segments": [segment]}


def test_scores_are_packed_and_unpacked_by_episode() -> None:
    values = [1, {"score": 2.5, "length": 3, "why": "long", "answer": "x"}, None]

    packed = pack_scores(values, 3)

    assert packed == {"score": 0.0, "0:score": 1.0, "1:score": 2.5, "1:length": 3.0}
    assert unpack_scores(packed, 3) == [{"score": 1.0}, {"score": 2.5, "length": 3.0}, None]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0], "returned 1 scores for 2 episodes"),
        (3.0, "returned float, no list of 2 scores"),
        ("ab", "returned str, no list"),
        ({"score": 1.0}, "returned dict, no list"),
        ([1.0, float("nan")], "nan"),
        ([1.0, {"length": 1}], 'a dict without "score"'),
    ],
)
def test_what_is_no_score_for_each_episode_is_refused(values: object, text: str) -> None:
    with pytest.raises(InvalidScore, match=text):
        pack_scores(values, 2)


def test_the_first_rows_replica_judges_a_group_and_rows_are_in_order() -> None:
    # parents 7 and 9; ranks 1 and 3 are no first ranks of a replica
    ranks = [[[5, 9, 50], [2, 7, 20]], [], [[1, 7, 10], [6, 9, 60]], []]

    assert plan_groups(ranks) == [
        JudgedGroup(rows=[1, 2], owner=2, seed=10, is_split=True),
        JudgedGroup(rows=[5, 6], owner=0, seed=50, is_split=True),
    ]
    whole = plan_groups([[[1, 7, 10], [2, 7, 20]], []])
    assert whole == [JudgedGroup(rows=[1, 2], owner=0, seed=10, is_split=False)]


def test_the_judges_numbers_replace_those_of_the_environment() -> None:
    own = {"score": 0.25, "turns": 2.0, "answer": "3"}

    assert judged_scores(own, {"score": 3.0, "turns": 1.0}) == {
        **{"score": 3.0, "turns": 1.0, "answer": "3"},
        "environment_score": 0.25,
    }
    assert judged_scores(own, None) is None


@pytest.mark.parametrize("name", ["judge", "plain"])
def test_judge_may_be_async_or_not(name: str) -> None:
    judge = load_judge(f"{FILE}:{name}")
    row = {EPISODES: [episode_of(3), episode_of(1), episode_of(5)]}

    scores = unpack_scores(asyncio.run(judge(row, **ENDPOINT)), 3)  # type: ignore[arg-type]

    assert [each and each["score"] for each in scores] == [1.0, 0.0, 2.0]


def test_judge_with_other_parameters_is_refused_with_the_form() -> None:
    with pytest.raises(ConfigError, match=r"judge: got .*expected def judge\(episodes, \*"):
        load_judge(f"{FILE}:other_parameters")


def test_judge_that_does_not_exist_is_refused_before_the_run(tmp_path: Path) -> None:
    cfg = EpisodeConfig(f"{FILE}:episode", judge=f"{FILE}:nobody")

    with pytest.raises(ConfigError, match=r"episode\.judge: .*nobody"):
        check_episode("actor.rollout.episode", cfg)
    check_episode("actor.rollout.episode", EpisodeConfig(f"{FILE}:episode", judge=f"{FILE}:plain"))


def judge_in_pool(pool: EnvironmentPool, groups: dict[int, list[Any]]) -> dict[int, EndedEpisode]:
    """The results of calls of a judge, by number."""
    ended: dict[int, EndedEpisode] = {}
    reader, writer = socket.socketpair()
    rows = {number: {EPISODES: episodes} for number, episodes in groups.items()}
    pool.begin(rows, first=True, judge=True)
    while ended.keys() != groups.keys():
        pool.start_waiting(lambda number: dict(ENDPOINT))
        for each in pool.advance(1.0, wake=reader.fileno(), faults=dict):
            ended[each.number] = each
    reader.close()
    writer.close()
    return ended


def test_judge_that_hangs_fails_its_group_alone_in_words() -> None:
    pool = EnvironmentPool(EpisodeConfig(f"{FILE}:episode", judge=f"{FILE}:plain", seconds=0.1))
    groups = {4: [episode_of(1, "hangs")], 5: [episode_of(2), episode_of(1)]}
    try:
        ended = judge_in_pool(pool, groups)
    finally:
        pool.close()

    assert ended[4].scores is None
    assert "judge_env.py:plain' kept its worker process busy" in ended[4].cause
    assert "fix the judge" in ended[4].cause
    assert ended[5].cause == "" and ended[5].scores is not None
    assert unpack_scores(ended[5].scores, 2) == [{"score": 1.0}, {"score": 0.0}]
