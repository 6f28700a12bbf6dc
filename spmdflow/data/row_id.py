"""Row ids, groups and seeds: the identity of a row in every column and on every rank.

Rows of training are numbered as they are drawn. A held-out row's id is made of its number in the
file and the number of its sample. So an evaluation takes no ids from training, whose random streams
depend on row ids, and samples a row with the same random numbers every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from spmdflow.errors import ColumnError, ConfigError, RowError
from spmdflow.renamed import warn_renamed

Ids = np.ndarray
"""Row ids, int64, in order."""

_FIRST_HELD_OUT = 1 << 62
_MOST_SAMPLES = 1 << 20
_FIRST_SEGMENT = 1 << 61
_FIRST_NAMED_GROUP = 1 << 60
_MOST_PARTS = 1 << 12
_MOST_WHOLES = 1 << 48


class RowIds:
    """Numbers rows of training; `next_id` is part of a checkpoint."""

    def __init__(self) -> None:
        self.next_id = 0
        """The first id that was not given out yet."""

    def take(self, count: int) -> Ids:
        """(count,) int64: ids never used before in this run."""
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id, dtype=np.int64)

    def take_groups(self, count: int, size: int) -> tuple[Ids, Ids]:
        """Ids and parents (count * size,) of `count` groups of `size` new rows."""
        groups = self.take(count)
        return self.take(count * size), np.repeat(groups, size)


def held_out_ids(rows: np.ndarray, num_samples: int) -> tuple[Ids, Ids]:
    """Return ids and parents (P * num_samples,) int64 for num_samples samples of P held-out rows.

    rows (P,) int64: row numbers in the file. id = 2**62 + row * 2**20 + sample, and the parent is
    the id of sample 0; the samples of a row are adjacent. So an id does not depend on num_samples,
    and no training row has it. ConfigError if num_samples is above 2**20.
    """
    if num_samples > _MOST_SAMPLES:
        where = "data.eval_samples"
        got = f"{num_samples} samples for each prompt"
        raise ConfigError.of(where, got, f"at most {_MOST_SAMPLES}", "ask for less")
    first = _FIRST_HELD_OUT + rows.astype(np.int64) * _MOST_SAMPLES
    ids = first[:, None] + np.arange(num_samples, dtype=np.int64)
    return ids.reshape(-1), np.repeat(first, num_samples)


def segment_ids(episodes: Ids, segments: np.ndarray) -> Ids:
    """Return ids (n,) int64 for segments of episodes; no other row has them.

    episodes (n,): row ids of training. segments (n,) int64: number of each segment in its episode,
    below 4096. An id depends on these two alone, and takes none from the rows that are drawn later.
    RowError for held-out rows and for too many segments.
    """
    return _ids_of_parts(_FIRST_SEGMENT, episodes, segments)


def named_group_ids(groups: Ids, names: np.ndarray) -> Ids:
    """Return ids (n,) int64 for groups of rows with the same name; no other group has them.

    groups (n,): ids of the groups. names (n,) int64: a number for each row's name. Rows with the
    same group and name get the same id. RowError for more than 4096 names in a group.
    """
    result = np.zeros_like(groups)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        _, index = np.unique(names[rows], return_inverse=True)
        result[rows] = _ids_of_parts(_FIRST_NAMED_GROUP, groups[rows], index.reshape(-1))
    return result


def _ids_of_parts(first: int, wholes: Ids, parts: np.ndarray) -> Ids:
    largest = int(wholes.max(initial=0))
    if largest >= _MOST_WHOLES or int(parts.max(initial=0)) >= _MOST_PARTS:
        raise RowError.of(
            "segments",
            f"row id {largest} with {int(parts.max(initial=0)) + 1} parts",
            f"a row of training with at most {_MOST_PARTS} parts",
            "take segments of rows that are trained, and lower actor.rollout.episode.max_turns",
        )
    return first + wholes * _MOST_PARTS + parts


def is_held_out(row_id: int) -> bool:
    """Whether the id is one of `held_out_ids`."""
    return row_id >= _FIRST_HELD_OUT


def seed_of(seed: int, purpose: str, *numbers: int, name: str = "") -> int:
    """63-bit seed of one random stream, e.g. seed_of(cfg.run.seed, "sample", step, row_id).

    Every stream of a run (shuffles, permutations, samples) takes its seed here, never from a rank
    or from the process's generator: results do not depend on the layout, and a resumed run
    continues the same streams. The same arguments give the same seed on every node and Python
    version (blake2b over the arguments' text); different ones give unrelated seeds. name: of one of
    several streams with the same purpose.
    """
    named = (name,) if name else ()
    text = repr((int(seed), purpose, *map(int, numbers), *named))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class RowGroups:
    """Which rows of a batch belong together, such as the samples of one prompt.

    As one rank sees it: other rows of a group may lie on other ranks, so sums go through `reduce`.
    """

    index: Tensor
    """(B,) int64: the group of each row here; groups are numbered alike on every rank."""
    count: int
    """Groups of the whole batch; in an estimator one more, that of the rows that failed."""
    reduce: Callable[[Tensor], Tensor]
    """Sums a tensor over the ranks that share the batch; all of them call it equally often."""
    position: Tensor | None = None
    """(B,) int64: which row of its group each row is, from 0; other ranks have the others."""
    largest: int = 0
    """Rows of the largest group."""
    weights: Tensor | None = None
    """(B,) float64: how much each row counts in sums, sizes and means; None: 1. The segments of an
    episode count as one row together."""

    @property
    def place(self) -> Tensor | None:
        """The old name of `position`, until 0.3.0; warns."""
        warn_renamed("RowGroups.place", "RowGroups.position")
        return self.position

    def only(self, valid: Tensor) -> RowGroups:
        """The groups of the rows where valid (B,) is True; the others are one more group."""
        index = torch.where(valid, self.index, self.count)
        return replace(self, index=index, count=self.count + 1)

    def sums(self, x: Tensor) -> Tensor:
        """Return, for each row, the float64 sum of x over its group, including rows on other ranks.

        (B, ...) -> (B, ...). Each row counts with its weight. All ranks that share the batch call
        it together, also ranks without rows.
        """
        index = self.index.to(x.device)
        values = x.double()
        if self.weights is not None:
            values = values * self.weights.view(-1, *[1] * (x.dim() - 1)).to(x.device)
        totals = x.new_zeros((self.count, *x.shape[1:]), dtype=torch.float64)
        totals.index_add_(0, index, values)
        return self.reduce(totals)[index]

    def sizes(self) -> Tensor:
        """Return (B,) float64: the number of rows in each row's group, as `sums` of ones.

        With weights it is rounded to six digits: three segments of one third each are one episode.
        """
        sizes = self._total_weights()
        return sizes if self.weights is None else sizes.round(decimals=6)

    def _total_weights(self) -> Tensor:
        return self.sums(torch.ones_like(self.index, dtype=torch.float64))

    def members(self, x: Tensor) -> Tensor:
        """Return, for each row, x of all rows of its whole group: (B,) -> (B, largest) float64.

        The rows of a group, including those on other ranks, are in the order of `position`, and
        smaller groups are padded with nan. All ranks that share the batch call it together. Needs
        `position`. ColumnError if rows have weights other than 1, because values of whole groups
        would then count the segments of an episode as samples.
        """
        assert self.position is not None, "made without positions"
        if self.weights is not None and bool((self.weights != 1).any()):
            raise ColumnError.of(
                "advantages that compare each row with all rows of its group",
                "episodes of several segments (row_weights)",
                "one row for each episode",
                "choose another advantage.estimator, such as grpo or rloo",
            )
        index = self.index.to(x.device)
        position = self.position.to(x.device)
        table = x.new_zeros((2, self.count, self.largest), dtype=torch.float64)
        table[0, index, position] = x.double()
        table[1, index, position] = 1.0
        values, there = self.reduce(table)
        return torch.where(there > 0, values, torch.nan)[index]

    def means(self, x: Tensor) -> Tensor:
        """Return, for each row, the mean of x over its whole group: (B,) -> (B,) float64.

        All ranks that share the batch call it together, also ranks without rows.
        """
        # not by rounded sizes: equal values must have exactly this mean, whatever the weights are
        return self.sums(x) / self._total_weights()


def positions_in_groups(groups: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (B,) int64, each row's position in its group from 0, and the largest group's size.

    groups (B,) int64: group numbers, from 0. The rows of a group are counted in the order in which
    they occur. Without rows the result is empty, and the size 0.
    """
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups) if len(groups) else np.zeros(0, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    indices = np.empty(len(groups), dtype=np.int64)
    indices[order] = np.arange(len(groups)) - starts[groups[order]]
    return indices, int(sizes.max(initial=0))
