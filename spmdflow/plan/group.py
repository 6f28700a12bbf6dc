"""The process groups that a run would make: keys, who makes them, what they are in a layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spmdflow.parallel.group import GroupSpec
from spmdflow.parallel.layout import Layout
from spmdflow.plan.record import Trace, TracedModel

_AXES = ("replica", "tp", "pp", "dp", "embedding", "gen_replica", "gen_tp", "gen_pp", "micro_dp")


@dataclass(frozen=True)
class PlannedGroup:
    """One group; models on the same ranks share it."""

    spec: GroupSpec
    """Its key: ranks, lane and backend."""
    made_by: str
    """The model that asked for it first; run: the transfer lane's."""


@dataclass(frozen=True)
class GroupKind:
    """Groups of one model that are alike."""

    made_by: str
    axis: str
    """Such as tp, or pool, single; several names where axes have the same groups."""
    lane: str
    backend: str
    size: int
    """Ranks of each, at most."""
    members: tuple[tuple[int, ...], ...]
    """The ranks of every one, in the order in which they are made."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.members)


def groups_of(trace: Trace) -> list[PlannedGroup]:
    """Every group, in the order in which the ranks make them; the first is the transfer lane's."""
    lane = GroupSpec(trace.world, "transfer", "gloo")
    found = {lane: PlannedGroup(lane, "run")}
    for order in trace.orders:
        if order.operation != "groups":
            continue
        maker = order.label.removesuffix(".groups")
        for ranks, name, backend in next(iter(order.commands.values()))["specs"]:
            spec = GroupSpec(tuple(ranks), name, backend)
            found.setdefault(spec, PlannedGroup(spec, maker))
    return list(found.values())


def kinds_of(groups: Iterable[PlannedGroup], models: dict[str, TracedModel]) -> list[GroupKind]:
    """The groups by model, axis, backend and size, in their order."""
    axes = {name: _axes_of(model.layout) for name, model in models.items()}
    members: dict[tuple[str, str, str, str], list[tuple[int, ...]]] = {}
    for group in groups:
        spec = group.spec
        axis = axes.get(group.made_by, {}).get(spec.ranks)
        axis = axis or ("all ranks" if group.made_by == "run" else "both pools")
        key = (group.made_by, axis, spec.lane, spec.backend)
        members.setdefault(key, []).append(spec.ranks)
    return [
        GroupKind(*key, size=max(map(len, ranks)), members=tuple(ranks))
        for key, ranks in members.items()
    ]


def _axes_of(layout: Layout) -> dict[tuple[int, ...], str]:
    """Names of every group of a layout; those of one axis or more."""
    names: dict[tuple[int, ...], list[str]] = {(rank,): ["single"] for rank in layout.ranks}
    for axis in _AXES:
        for ranks in layout.axis_groups(axis):
            if len(ranks) > 1:
                names.setdefault(ranks, []).append(axis)
    if len(layout.ranks) > 1:
        names[layout.ranks] = ["pool"]
    return {ranks: ", ".join(axes) for ranks, axes in names.items()}
