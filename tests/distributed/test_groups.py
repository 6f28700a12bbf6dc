"""Process groups by their ranks, on four gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdflow.errors import MessageError, ProtocolError
from spmdflow.message import MAX_MESSAGE_BYTES, encode
from spmdflow.parallel.group import GroupSpec, GroupTable, broadcast_plain
from spmdflow.parallel.layout import Layout

LAYOUT = Layout((0, 1, 2, 3), tp_size=2, pp_size=2, gen_tp_size=1)


def on_each_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    table = GroupTable(rank, timeout_seconds=600)
    axes = ("tp", "pp", "dp", "replica", "micro_dp")
    groups = [ranks for axis in axes for ranks in LAYOUT.axis_groups(axis)]
    table.make([GroupSpec(ranks, "compute", "gloo") for ranks in groups])
    table.make([GroupSpec(ranks, "compute", "gloo") for ranks in groups])  # already there
    sums = {}
    for axis in axes:
        ranks = LAYOUT.axis_group(rank, axis)
        total = torch.tensor([float(10**rank)])
        dist.all_reduce(total, group=table.get(ranks))
        sums[axis] = (float(total), sum(float(10**other) for other in ranks))
    reduce = table.reducer(LAYOUT.ranks)
    given = torch.full((2,), 0.1, dtype=torch.float32)
    reduced = reduce(given)
    outside = next(ranks for ranks in LAYOUT.axis_groups("tp") if rank not in ranks)
    said = []
    for ranks in (outside, (rank, 9)):
        with pytest.raises(ProtocolError) as caught:
            table.get(ranks)
        said.append(str(caught.value))
    pair = LAYOUT.axis_group(rank, "tp")
    is_first = rank == pair[0]
    episodes = [[rank, "text", [1.5] * 3, bytes(MAX_MESSAGE_BYTES + 8)], None]
    with pytest.raises(MessageError):
        encode(episodes)
    heard = broadcast_plain(episodes if is_first else None, table.get(pair))
    return {
        "heard": heard == [[pair[0], *episodes[0][1:]], None],
        "specs": len(table.specs()),
        "sums": sums,
        "reduced": (reduced.dtype == torch.float64, reduced.tolist(), given.tolist()),
        "alone": table.reducer((rank,))(given).tolist() == given.double().tolist(),
        "none": table.get_or_none(outside) is None and table.get_or_none((rank, 9)) is None,
        "said": said,
    }


def test_groups_are_made_once_found_by_ranks_and_refused_to_others(spawn_ranks) -> None:
    together = {*LAYOUT.axis_groups("tp"), *LAYOUT.axis_groups("pp"), LAYOUT.ranks}
    for rank, found in enumerate(spawn_ranks(on_each_rank, 4)):
        assert found["specs"] == len(together) + 1  # dp has one rank: its own, when asked for
        for total, expected in found["sums"].values():
            assert total == expected
        tenth = float(torch.tensor(0.1))  # of float32: summed in float64, the argument kept
        assert found["reduced"] == (True, [4 * tenth] * 2, [tenth] * 2)
        assert found["alone"] and found["none"]
        assert found["heard"]  # more than fits into a message
        assert f"expected a group that rank {rank} is in" in found["said"][0]
        assert "not made; expected one of" in found["said"][1]
