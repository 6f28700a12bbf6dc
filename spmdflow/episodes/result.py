"""What an episode ends with: its score, and the segments that are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from spmdflow.episodes.credit import CreditedSegment
from spmdflow.episodes.recorder import Call


class SegmentRow(NamedTuple):
    """A segment that is trained. Prompt to routes are as in `Segment`."""

    name: str
    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    calls: list[list[Call]]
    routes: np.ndarray | None
    score: float
    weight: float
    """How much it counts in baselines and losses."""
    rewards: list[float]
    """Of each of the tokens."""


class Episode(NamedTuple):
    """The result of one row's episode."""

    number: int
    scores: dict[str, Any] | None
    """None: it failed, or the environment returned None."""
    cause: str
    """Why it failed. Empty: it did not fail."""
    num_turns: int
    num_segments: int
    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    """-1 where the mask is False."""
    calls: list[list[Call]]
    """Tool calls of each reply."""
    routes: np.ndarray | None = None
    """See `Segment.routes`."""
    segments: tuple[SegmentRow, ...] = ()
    """All its trained segments, in the order of their last replies. Empty if they are not recorded
    (segments is not "all"), and for an episode without a score."""
    uses: Mapping[str, list[int]] = MappingProxyType({})
    """Model that is not the policy -> [requests, failed ones, tokens of its replies]."""


def row_of(credited: CreditedSegment) -> SegmentRow:
    """A segment with its reward, as part of a result."""
    segment = credited.segment
    return SegmentRow(
        segment.name,
        segment.prompt,
        segment.tokens,
        segment.mask,
        segment.log_probs,
        segment.versions,
        segment.calls,
        segment.routes,
        credited.score,
        credited.weight,
        credited.rewards,
    )


def to_plain(episode: Episode) -> tuple[Any, ...]:
    """The fields of an episode as plain data, for a broadcast."""
    segments: Any = tuple(tuple(each) for each in episode.segments)
    return tuple(episode._replace(segments=segments, uses=dict(episode.uses)))


def from_plain(fields: Sequence[Any]) -> Episode:
    """The episode of `to_plain`."""
    episode = Episode(*fields)
    return episode._replace(segments=tuple(SegmentRow(*each) for each in episode.segments))
