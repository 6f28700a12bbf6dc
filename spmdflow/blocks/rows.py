"""Row transfers: `redistribute` for 1-D blocks of single rows, vectorised. Integers only.

Rows with the same possible senders form a class. A class's rows, in the order (destination, id),
are cut into one stretch per sender, in the order of ranks, sized to level the senders' loads. So
peers with the same rows send equal parts, and there are few edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spmdflow.blocks.plan import Classes, NodeOf, Senders, candidates, share_classes
from spmdflow.errors import RowError

Ids = np.ndarray
"""(n,) int64 row ids."""

_Key = tuple[tuple[int, bytes], ...]
_REMEMBERED_IDS = 1 << 13


@dataclass(frozen=True, eq=False)
class RowEdge:
    """`source` sends the rows `ids` (ascending, at least one) to `destination`.

    ids may be a view of an argument, or shared between edges: do not write to it.
    """

    source: int
    destination: int
    ids: Ids


def redistribute_rows(
    have: Mapping[int, Ids], need: Mapping[int, Ids], *, node_of: NodeOf | None = None
) -> list[RowEdge]:
    """Return edges that send every rank the rows that it needs and lacks, each exactly once.

    have, need: by rank, int64 ids (n,), in any order, unique within a rank. A sender is chosen
    among the holders on the destination's node or, if there are none, among all holders, so that
    these send equally many rows. The edges are sorted by (source, destination), at most one per
    pair. RowError for an id that is repeated or that no rank holds. Results for up to 8192 ids are
    cached, also for a later call with all ids shifted by the same number.
    """
    if sum(map(len, have.values())) + sum(map(len, need.values())) > _REMEMBERED_IDS:
        return _redistribute(have, need, node_of)
    base = min((int(ids.min()) for ids in have.values() if len(ids)), default=0)
    keys = (
        tuple((rank, (np.asarray(ids, np.int64) - base).tobytes()) for rank, ids in side.items())
        for side in (have, need)
    )
    ranks = {*have, *need}
    if node_of is None:
        nodes = None
    else:
        nodes = tuple((rank, node_of(rank)) for rank in sorted(ranks))
    try:
        edges = _redistribute_cached(*keys, nodes)
    except RowError:
        return _redistribute(have, need, node_of)  # its error reports the original ids
    result = []
    for edge in edges:
        result.append(RowEdge(edge.source, edge.destination, edge.ids + base))
    return result


def plan_rounds(
    have: Mapping[int, Ids], need: Mapping[int, Ids], *, node_of: NodeOf | None = None
) -> list[list[RowEdge]]:
    """Like `redistribute_rows`, with a broadcast inside a node: one list of edges, or two.

    Ranks of one node that lack the same rows form a team, unless so many ranks there hold them that
    none has to send a row twice. In the first round each member receives a part of the rows. In the
    second the members exchange their parts. So rows enter a node once, no holder sends a row twice,
    and every member sends. (A broadcast as scatter and all-gather, van de Geijn 1994.) Without
    teams there is one list.
    """
    direct = redistribute_rows(have, need, node_of=node_of)
    parts: dict[int, Ids] = {}
    lacking: dict[int, Ids] = {}
    for team, ids in _find_teams(direct, node_of):
        parts |= zip(team, np.array_split(ids, len(team)), strict=True)
        lacking |= dict.fromkeys(team, ids)
    if not parts:
        return [direct]
    first = redistribute_rows(have, {**need, **parts}, node_of=node_of)
    return [first, redistribute_rows(parts, lacking, node_of=node_of)]


def _find_teams(
    direct: Sequence[RowEdge], node_of: NodeOf | None
) -> Iterator[tuple[list[int], Ids]]:
    """Yield (ranks of a node that lack the same rows, the rows) for each team of `plan_rounds`.

    direct: the edges without teams. Ranks form a team if there are several, at most as many as
    rows, and fewer ranks of their node send them rows than there are members. Ranks ascend.
    """
    arriving: dict[int, list[RowEdge]] = {}
    for edge in direct:
        arriving.setdefault(edge.destination, []).append(edge)
    teams: dict[tuple[int, bytes], tuple[list[int], set[int], Ids]] = {}
    for rank, edges in arriving.items():
        node = node_of(rank) if node_of else 0
        ids = _join_ids([edge.ids for edge in edges])
        team, sources, _ = teams.setdefault((node, ids.tobytes()), ([], set(), ids))
        team.append(rank)
        sources |= {e.source for e in edges if node_of is None or node_of(e.source) == node}
    for team, sources, ids in teams.values():
        if len(sources) < len(team) and 1 < len(team) <= len(ids):
            yield sorted(team), ids


@lru_cache(maxsize=128)
def _redistribute_cached(
    have: _Key, need: _Key, nodes: tuple[tuple[int, int], ...] | None
) -> list[RowEdge]:
    """`_redistribute` with a cache: a step repeats the previous step's transfers with shifted ids.

    have, need: (rank, bytes of its int64 ids minus the smallest id). nodes: (rank, its node) of
    every rank, as plain numbers, so that the cache keeps no session alive.
    """
    available, required = (
        {rank: np.frombuffer(ids, np.int64) for rank, ids in k} for k in (have, need)
    )
    return _redistribute(available, required, None if nodes is None else dict(nodes).__getitem__)


def _redistribute(
    have: Mapping[int, Ids], need: Mapping[int, Ids], node_of: NodeOf | None
) -> list[RowEdge]:
    """Return the edges of `redistribute_rows`, computed without its cache."""
    classes = _group_by_senders(_Holders(have), need, node_of)
    pieces: dict[tuple[int, int], list[Ids]] = {}
    for sent in share_classes(classes, dict.fromkeys(have, 0), _take, len):
        for pair, parts in sent.items():
            pieces.setdefault(pair, []).extend(parts)
    result = []
    for pair, parts in sorted(pieces.items()):
        result.append(RowEdge(*pair, _join_ids(parts)))
    return result


def _take(ids: Ids, room: int) -> tuple[Ids, Ids | None]:
    return ids[:room], ids[room:] if room < len(ids) else None


def _group_by_senders(
    holders: _Holders, need: Mapping[int, Ids], node_of: NodeOf | None
) -> Classes[Ids]:
    """Return {possible senders: [(destination, ids that it lacks and they may send), ...]}.

    Destinations ascend. Possible senders are by `candidates`.
    """
    classes: dict[Senders, list[tuple[int, Ids]]] = {}
    senders_of: dict[tuple[int, int | None], Senders] = {}
    for destination in sorted(need):
        node = None if node_of is None else node_of(destination)
        lacking: dict[Senders, list[Ids]] = {}
        for label, ids in holders.split(destination, need[destination]):
            if (label, node) not in senders_of:
                ranks = holders.ranks(label)
                senders_of[label, node] = candidates(ranks, destination, node_of)
            lacking.setdefault(senders_of[label, node], []).append(ids)
        for senders, parts in lacking.items():
            classes.setdefault(senders, []).append((destination, _join_ids(parts)))
    return classes


def _join_ids(parts: list[Ids]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.sort(np.concatenate(parts))


class _Holders:
    """Which ranks hold each id: ids held by the same ranks share a label.

    Labels are refined rank by rank: the ids of one rank that share a label move to a new one.
    Equal arrays are processed once, because peers hold the same rows.
    """

    def __init__(self, have: Mapping[int, Ids]) -> None:
        """Label all ids. Raises RowError if a rank holds an id twice."""
        self._key_of: dict[int, bytes] = {}
        self._ids: dict[bytes, Ids] = {}
        self._split: dict[tuple[bytes, bytes], list[tuple[int, Ids]]] = {}
        ranks_of: dict[bytes, list[int]] = {}
        for rank in sorted(have):
            ids = np.ascontiguousarray(have[rank], dtype=np.int64)
            key = self._key_of[rank] = ids.tobytes()
            if key not in self._ids:
                self._ids[key] = _sort_ids(ids, rank)
            ranks_of.setdefault(key, []).append(rank)
        self._all = np.unique(np.concatenate([*self._ids.values(), _NO_IDS]))
        self._labels = np.zeros(len(self._all), dtype=np.int64)
        self._origin: list[tuple[int, list[int]]] = [(0, [])]
        for key, ranks in ranks_of.items():
            self._refine(self._ids[key], ranks)

    def ranks(self, label: int) -> tuple[int, ...]:
        """Return the ranks that hold the ids of a label, ascending. () for label 0."""
        held_by: list[int] = []
        while label:
            label, more = self._origin[label]
            held_by += more
        return tuple(sorted(held_by))

    def split(self, rank: int, ids: Ids) -> list[tuple[int, Ids]]:
        """Return those of `ids` that the rank lacks, by label: [(label, ids ascending), ...].

        Ids of one label are held by the same ranks. RowError if no rank holds an id, or if one is
        repeated. The result is cached.
        """
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        key = (self._key_of.get(rank, b""), ids.tobytes())
        if key not in self._split:
            self._split[key] = self._find_lacking_ids(rank, _sort_ids(ids, rank))
        return self._split[key]

    def _find_lacking_ids(self, rank: int, ids: Ids) -> list[tuple[int, Ids]]:
        """Compute the result of `split`. ids: ascending. RowError if no rank holds an id."""
        own_ids = self._ids.get(self._key_of.get(rank, b""), _NO_IDS)
        lacking = ids[~_is_member(ids, own_ids)] if len(own_ids) else ids
        unknown = lacking[~_is_member(lacking, self._all)]
        if len(unknown):
            got = f"{len(unknown)} of {len(ids)} needed rows that no rank holds (first "
            got += f"id {unknown[0]})"
            do = "was the batch freed, or does the protocol's holds omit rows?"
            raise RowError.of(f"transfer to rank {rank}", got, "a holder of each", do)
        labels = self._labels[np.searchsorted(self._all, lacking)]
        order = np.argsort(labels, kind="stable")
        labels = labels[order]
        lacking = lacking[order]
        starts = np.flatnonzero(np.diff(labels, prepend=-1)).tolist()
        fresh = []
        for start, stop in zip(starts, [*starts[1:], len(lacking)], strict=False):
            fresh.append((int(labels[start]), lacking[start:stop]))
        return fresh

    def _refine(self, ids: Ids, ranks: list[int]) -> None:
        """Record that these ranks hold the ids, which get new labels: one for each old label.

        ids: the complete ids of the ranks.
        """
        indices = np.searchsorted(self._all, ids)
        old, inverse = np.unique(self._labels[indices], return_inverse=True)
        self._labels[indices] = len(self._origin) + inverse
        self._origin += [(label, ranks) for label in old.tolist()]


_NO_IDS = np.zeros(0, dtype=np.int64)


def _sort_ids(ids: Ids, rank: int) -> Ids:
    """Return the ids in ascending order; RowError if one is repeated. rank: for the error."""
    if (ids[1:] > ids[:-1]).all():
        return ids
    ascending = np.sort(ids)
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(repeated):
        got = f"id {repeated[0]} more than once among {len(ids)}"
        expected = f"{len(ids) - len(repeated)} distinct ids"
        raise RowError.of(f"rows of rank {rank}", got, expected, "name each row once")
    return ascending


def _is_member(ids: Ids, ascending: Ids) -> np.ndarray:
    """Return which ids are in an ascending array, (n,) bool. False for all if it is empty."""
    indices = np.searchsorted(ascending, ids)
    indices[indices == len(ascending)] = 0
    if len(ascending):
        return ascending[indices] == ids
    return np.zeros(len(ids), dtype=bool)
