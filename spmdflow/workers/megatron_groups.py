"""Process groups of one Megatron model, from our own layout: no global parallel state.

Several models with different layouts live in one process, each with its own collection. All
groups exist already (the worker's needed_groups); nothing is created here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout


def process_groups(layout: Layout, rank: int, groups: GroupTable) -> ProcessGroupCollection:
    """The collection that Megatron takes in place of its global state."""
    axis = {name: groups.get(layout.axis_group(rank, name)) for name in ("tp", "pp", "dp")}
    replica, alone = groups.get(layout.axis_group(rank, "replica")), groups.get((rank,))
    ends = [group for group in layout.axis_groups("embedding") if rank in group]
    return ProcessGroupCollection(
        **axis,
        mp=replica,
        # first and last stage, where tied embeddings are; None on the stages between
        embd=groups.get(ends[0]) if ends and layout.pp_size > 1 else None,
        pos_embd=None,
        # axes that our layouts do not have: context and expert parallelism of size 1
        cp=alone,
        ep=alone,
        tp_cp=axis["tp"],
        expt_tp=axis["tp"],
        tp_ep=axis["tp"],
        tp_ep_pp=replica,
        dp_cp=axis["dp"],
        expt_dp=axis["dp"],
        intra_dp_cp=axis["dp"],
        intra_expt_dp=axis["dp"],
        tp_dp_cp=groups.get(layout.ranks),
        intra_dist_opt=groups.get(layout.ranks),
        inter_dist_opt=None,
    )


@contextmanager
def only_among(group: dist.ProcessGroup) -> Iterator[None]:
    """Object gathers without a group stay inside this one.

    get_megatron_optimizer compares parameter groups over the whole world (0.16.1,
    optimizer/__init__.py), which would wait for ranks that have no part in this model.
    """
    gather, size = dist.all_gather_object, dist.get_world_size

    def gather_here(out: list[Any], value: Any, group: dist.ProcessGroup = group) -> None:
        gather(out, value, group=group)

    def size_here(group: dist.ProcessGroup = group) -> int:
        return size(group)

    dist.all_gather_object = gather_here  # type: ignore[assignment]
    dist.get_world_size = size_here  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size = gather, size
