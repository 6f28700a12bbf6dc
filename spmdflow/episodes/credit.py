"""Which reward each segment of an episode gets, and how much it counts (rollout.episode.credit).

With S the episode's score, n its trained segments in the order of their last replies, s_i the
score of segment i (segment_scores), and w_i how much row i counts in baselines and losses:

    episode      R_i = S,  w_i = 1 / n
    segment      R_i = s_i, or S without one;  w_i = 1 / (segments of the same name);
                 the baseline is that of the same name in the group
    discounted   R_i = sum_{j >= i} gamma^(j - i) o_j,  w_i = 1 / n;
                 o_j = s_j, 0 without one, and S is added to the last

R_i is the reward of a row's last token. Scores of turns are added at the last token of the reply,
and scores of tokens at each of its tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdflow.episodes.parts import POLICY, TOKEN_SCORES, TRAINED
from spmdflow.episodes.recorder import Segment
from spmdflow.errors import DataError


@dataclass(frozen=True)
class CreditRule:
    """Settings rollout.episode.credit and credit_discount."""

    name: str
    discount: float
    """gamma of `discounted`."""


class CreditedSegment(NamedTuple):
    """A segment that is trained, with its rewards."""

    segment: Segment
    score: float
    """R_i."""
    weight: float
    """w_i."""
    rewards: list[float]
    """Of each token behind the prompt."""


def credit_segments(
    segments: Sequence[Segment],
    turn_of_reply: Mapping[str, int],
    score: float,
    parts: Mapping[str, Any],
    rule: CreditRule,
) -> list[CreditedSegment]:
    """Return the trained segments of an episode with their rewards, in the order of last replies.

    turn_of_reply: number of the turn of each reply's name. parts: see `parts.parts_of`. DataError
    for a key that is neither a name nor the id of a reply, for another number of token scores than
    the reply has tokens, and for scores of segments that the rule `episode` would ignore.
    """
    if rule.name == "episode" and parts.get("segment_scores"):
        raise DataError.of(
            "the environment",
            "segment_scores with actor.rollout.episode.credit=episode",
            "a rule that uses them",
            "set it to segment (players, subagents) or discounted, or return only a score",
        )
    trained = _trained_segments(segments, parts)
    own = _scores_of_segments(segments, turn_of_reply, parts)
    names = Counter(segment.name for segment in trained)
    result: list[CreditedSegment] = []
    following = 0.0
    for segment in reversed(trained):
        own_score = own.get(id(segment))
        weight = 1 / len(trained)
        if rule.name == "segment":
            reward = score if own_score is None else own_score
            weight = 1 / names[segment.name]
        elif rule.name == "discounted":
            last = 0.0 if result else score
            following = (own_score or 0.0) + last + rule.discount * following
            reward = following
        else:
            reward = score
        rewards = [0.0] * len(segment.tokens)
        rewards[-1] = reward
        result.append(CreditedSegment(segment, reward, weight, rewards))
    _add_rewards_of_turns(result, segments, turn_of_reply, parts)
    return result[::-1]


def _trained_segments(segments: Sequence[Segment], parts: Mapping[str, Any]) -> list[Segment]:
    """The segments with a sampled token whose names are trained, in the order of last replies."""
    chosen = []
    for segment in segments:
        is_trained = TRAINED not in parts or (segment.name or POLICY) in parts[TRAINED]
        if is_trained and segment.num_sampled:
            chosen.append(segment)
    return sorted(chosen, key=lambda segment: segment.replies[-1].turn)


def _scores_of_segments(
    segments: Sequence[Segment], turn_of_reply: Mapping[str, int], parts: Mapping[str, Any]
) -> dict[int, float]:
    """id of a segment -> the score that the environment gave it, by a name or by a reply.

    A score by a reply wins over one by a name.
    """
    by_name: dict[int, float] = {}
    by_reply: dict[int, float] = {}
    for key, score in parts.get("segment_scores", {}).items():
        named = [each for each in segments if (each.name or POLICY) == key]
        for segment in named:
            by_name[id(segment)] = score
        if not named:
            segment, _ = _locate_reply(segments, turn_of_reply, key, "segment_scores")
            by_reply[id(segment)] = score
    return by_name | by_reply


def _add_rewards_of_turns(
    credited: Sequence[CreditedSegment],
    segments: Sequence[Segment],
    turn_of_reply: Mapping[str, int],
    parts: Mapping[str, Any],
) -> None:
    """Add the scores of turns and tokens to the rewards, in place.

    Those of segments that are not trained are dropped.
    """
    rewards_of = {id(each.segment): each.rewards for each in credited}
    for key, score in parts.get("turn_scores", {}).items():
        segment, (_, stop) = _locate_reply(segments, turn_of_reply, key, "turn_scores")
        if id(segment) in rewards_of:
            rewards_of[id(segment)][stop - 1] += score
    for key, scores in parts.get(TOKEN_SCORES, {}).items():
        segment, (start, stop) = _locate_reply(segments, turn_of_reply, key, TOKEN_SCORES)
        if len(scores) != stop - start:
            raise DataError.of(
                f"{TOKEN_SCORES} of reply {key}",
                f"{len(scores)} numbers",
                f"{stop - start}, one for each token of the reply",
                "count the tokens with return_token_ids",
            )
        for position, score in zip(range(start, stop), scores, strict=True):
            if id(segment) in rewards_of:
                rewards_of[id(segment)][position] += score


def _locate_reply(
    segments: Sequence[Segment], turn_of_reply: Mapping[str, int], key: str, where: str
) -> tuple[Segment, tuple[int, int]]:
    """Return the segment with a reply, and where its tokens begin and end among the segment's.

    DataError if no reply of the episode has this id.
    """
    turn = turn_of_reply.get(re.split("[-_]", key)[-1])  # dialects write chatcmpl-NAME, resp_NAME
    for segment in segments:
        for reply in segment.replies:
            if reply.turn == turn:
                return segment, (reply.start, reply.stop)
    raise DataError.of(
        where,
        f"the key {key!r}",
        "a name in the URL of a request, or the id of a reply of this episode",
        "use response.id, or give the requests a name",
    )
