"""Who judges the episodes of a prompt: they may have run on several replicas.

The replica of the group's first row calls the judge. It gets what the judge needs of the others'
episodes, and sends the scores back. Rows and seeds decide, never the layout: the judge gets the
same episodes in the same order on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdflow.episodes.recorder import Recorder
from spmdflow.episodes.result import Episode


@dataclass(frozen=True)
class EpisodeGroups:
    """The groups of a call's episodes, as one rank of the pool sees them."""

    rows: Sequence[int]
    """Row id of each episode of this rank's replica."""
    parents: Sequence[int]
    """Episodes with the same parent are samples of one prompt."""
    leader: int
    """Index of the first rank of this replica among the ranks of the pool."""
    exchange: Callable[[Any], list[Any]]
    """Returns what each rank of the pool passes, in order; plain data. All of them call it."""


class JudgedGroup(NamedTuple):
    """The episodes of one prompt."""

    rows: list[int]
    """Row ids, ascending."""
    owner: int
    """The replica that calls the judge, by `EpisodeGroups.leader`."""
    seed: int
    """That of the first row's episode. Replies to the judge derive theirs from it."""
    is_split: bool
    """Whether the episodes have run on several replicas."""


def plan_groups(rows_of_ranks: Sequence[Sequence[Sequence[int]]]) -> list[JudgedGroup]:
    """Returns the groups of a call, in the order of their first rows.

    rows_of_ranks: for each rank (row id, parent, seed) of each episode; [] for ranks that are not
    the first of a replica.
    """
    rows_of_parent: dict[int, list[tuple[int, int, int]]] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row, parent, seed in rows:
            rows_of_parent.setdefault(parent, []).append((row, rank, seed))
    groups = []
    for rows in rows_of_parent.values():
        rows.sort()
        _, owner, seed = rows[0]
        ids = [row for row, _, _ in rows]
        groups.append(JudgedGroup(ids, owner, seed, len({rank for _, rank, _ in rows}) > 1))
    return sorted(groups, key=lambda group: group.rows[0])


def describe_episode(row: dict[str, Any], episode: Episode, recorder: Recorder) -> dict[str, Any]:
    """Returns what a judge gets of an episode (`judgement`), as JSON values."""
    decode = recorder.chat.tokenizer.decode
    segments = []
    for segment in sorted(recorder.segments, key=lambda each: each.replies[-1].turn):
        segments.append(
            {
                "name": segment.name,
                "messages": segment.messages,
                "prompt": decode(segment.prompt),
                "response": decode(segment.tokens),
                "num_sampled": segment.num_sampled,
            }
        )
    scores = episode.scores
    return {
        "row": row,
        "score": None if scores is None else scores["score"],
        "scores": scores,
        "failed": episode.cause.partition("\n")[0],
        "segments": segments,
    }


def judged_scores(own: dict[str, Any], judged: dict[str, float] | None) -> dict[str, Any] | None:
    """Returns an episode's scores after the judge's: its numbers replace equal names, and the
    environment's score becomes environment_score. None: the judge omits the episode."""
    if judged is None:
        return None
    return {**own, **judged, "environment_score": own["score"]}
