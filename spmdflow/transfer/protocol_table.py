"""The eight built-in protocols: HybridFlow's Table 3 and the two that complete it.

Each gives every rank one share of the rows; they differ in which share, and in who answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from spmdflow.errors import RowError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol_rule import Answer, Protocol, RowsFunction, Shares

ShareOf = Callable[[Layout, int], int]
"""(layout, rank) -> the share that the rank is given."""


def _by_share(share_of: ShareOf) -> RowsFunction:
    """Rows function that gives each rank one share."""

    def rows(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
        return {rank: shares[share_of(layout, rank)] for rank in layout.ranks}

    return rows


def _one_each(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
    """The i-th of a list for the i-th rank."""
    if num_rows != layout.size:
        raise RowError(
            f"protocol ALL_TO_ALL: got a list of {num_rows}, expected {layout.size}, one entry "
            f"for each rank; give a list of {layout.size}"
        )
    return _by_share(Layout.group_rank)(layout, num_rows, shares)


def _last_stage(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
    """Every tp rank of the last stage computes the rows of its dp, so each of them holds them."""
    places = {rank: layout.coordinate(rank) for rank in layout.ranks}
    last = layout.pp_size - 1
    return {rank: shares[place.dp] for rank, place in places.items() if place.pp == last}


def _whole_share(layout: Layout, rank: int) -> int:
    return 0


def _dp_share(layout: Layout, rank: int) -> int:
    return layout.coordinate(rank).dp


def _micro_dp_share(layout: Layout, rank: int) -> int:
    return layout.generation_replica(rank)


def _pp_as_dp_share(layout: Layout, rank: int) -> int:
    pp, dp, _ = layout.coordinate(rank)
    return dp * layout.pp_size + pp


def _num_training_replicas(layout: Layout) -> int:
    return layout.dp_size


def _one(layout: Layout) -> int:
    return 1


def _num_generation_replicas(layout: Layout) -> int:
    return layout.generation_dp_size


def _all_ranks_listed(layout: Layout) -> Answer:
    return Answer(layout.ranks, joined=False)


def _all_ranks_joined(layout: Layout) -> Answer:
    return Answer(layout.ranks, joined=True)


def _last_stage_heads(layout: Layout) -> Answer:
    """pp = last, tp = 0, by dp."""
    return Answer(tuple(group[-1] for group in _stage_heads(layout)), joined=True)


def _first_replica_heads(layout: Layout) -> Answer:
    """tp = 0, dp = 0, by pp."""
    return Answer(_stage_heads(layout)[0], joined=False)


def _all_heads(layout: Layout) -> Answer:
    """tp = 0, by (dp, pp)."""
    return Answer(tuple(rank for group in _stage_heads(layout) for rank in group), joined=True)


def _generation_heads(layout: Layout) -> Answer:
    """First rank of each generation replica, by (dp, micro_dp)."""
    return Answer(tuple(group[0] for group in layout.axis_groups("gen_replica")), joined=True)


def _stage_heads(layout: Layout) -> list[tuple[int, ...]]:
    """For each dp the tp = 0 rank of each stage."""
    return layout.axis_groups("pp")[:: layout.tp_size]


def _num_ranks(layout: Layout) -> int:
    return layout.size


def _num_stages(layout: Layout) -> int:
    return layout.dp_size * layout.pp_size


_EVERYTHING, _DP_CHUNK = _by_share(_whole_share), _by_share(_dp_share)
_RANK_CHUNK, _MICRO_DP_CHUNK = _by_share(Layout.group_rank), _by_share(_micro_dp_share)
_PP_AS_DP_CHUNK = _by_share(_pp_as_dp_share)
_TABLE: list[
    tuple[
        str, Callable[[Layout], int], RowsFunction, Callable[[Layout], Answer], RowsFunction | None
    ]
] = [
    # name, num_shares, distribute, collect, holds
    ("ONE_TO_ALL", _one, _EVERYTHING, _all_ranks_listed, None),
    ("3D_PROTO", _num_training_replicas, _DP_CHUNK, _last_stage_heads, _last_stage),
    # every rank of a generation replica samples the same tokens, so all of them hold the rows
    (
        "3D_ALL_MICRO_DP",
        _num_generation_replicas,
        _MICRO_DP_CHUNK,
        _generation_heads,
        _MICRO_DP_CHUNK,
    ),
    ("3D_PP_ONLY", _one, _EVERYTHING, _first_replica_heads, None),
    ("DP_PROTO", _num_ranks, _RANK_CHUNK, _all_ranks_joined, None),
    ("ALL_TO_ALL", _num_ranks, _one_each, _all_ranks_listed, None),
    ("3D_PP_AS_DP", _num_stages, _PP_AS_DP_CHUNK, _all_heads, None),
    ("DP_METRIC", _num_ranks, _RANK_CHUNK, _all_ranks_listed, None),
]

BUILT_IN = tuple(
    Protocol(name, num_shares=num_shares, distribute=distribute, collect=collect, holds=holds)
    for name, num_shares, distribute, collect, holds in _TABLE
)
