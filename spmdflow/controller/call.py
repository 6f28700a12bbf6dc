"""One call on rows: which rows each rank gets, and the commands that say so.

Script thread only; sends nothing (caller.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdflow.controller.assignment import Assignment, assign, assign_mini_batches, by_share
from spmdflow.controller.batch import Batch
from spmdflow.controller.frame import Frame
from spmdflow.controller.inputs import ascending, inputs_of, positions_held, widest_frame
from spmdflow.controller.schedule import CutSettings, MicroLimit
from spmdflow.data.group import places_in_groups
from spmdflow.data.row_id import Ids
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.protocol import protocol
from spmdflow.transfer.register import MethodSpec

if TYPE_CHECKING:
    from spmdflow.controller.caller import Caller


@dataclass(frozen=True)
class Target:
    """What the caller knows of a worker group."""

    name: str
    worker_class: type
    layout: Layout
    limit: MicroLimit
    cut: CutSettings | None
    settings: Any = None
    """The settings that the model was spawned with."""


def assign_rows(
    caller: Caller,
    target: Target,
    spec: MethodSpec,
    batch: Batch,
    names: Sequence[str],
    *,
    seed: int,
) -> Assignment:
    """Rows of a method call by rank; waits for lengths if the call is cut by tokens."""
    rules = protocol(spec.transfer_mode)
    lengths = _token_lengths(caller, batch, target, spec)
    if not spec.minibatches:
        return assign(rules, target.layout, len(batch), limit=target.limit, lengths=lengths)
    if target.cut is None:
        raise ProtocolError(
            f"{target.name}: its method takes mini-batches, but its config has no `update`; "
            f"add an UpdateConfig"
        )
    frame = widest_frame(batch, names, target.layout.ranks)
    held = {} if frame is None else positions_held(batch, frame)
    return assign_mini_batches(
        rules,
        target.layout,
        batch.parents,
        held,
        cut=target.cut,
        limit=target.limit,
        lengths=lengths,
        seed=seed,
        step=caller.step,
    )


def commands_on_rows(
    head: Mapping[str, Any],
    batch: Batch,
    names: Sequence[str],
    assignment: Assignment,
    spec: MethodSpec,
    per_row: Mapping[str, np.ndarray],
    groups: np.ndarray | None = None,
) -> tuple[dict[int, dict[str, Any]], dict[int, Ids]]:
    """The command of each rank, and the rows that each holds afterwards.

    per_row: further numbers of each row (B,), by name. groups (B,): the group of each row, for map
    functions that ask for it.
    """
    rows = by_share(
        assignment.given,
        lambda positions: {
            "ids": batch.ids[positions],
            "inputs": inputs_of(batch, names, positions),
            "micro": assignment.num_micro_batches,
            **{name: numbers[positions] for name, numbers in per_row.items()},
            **_groups_of(groups, positions),
        },
    )
    held = by_share(assignment.holds, lambda positions: batch.ids[positions])
    minis = assignment.mini_batches or {}
    commands = {
        rank: {
            **head,
            **given,
            "holds": held.get(rank) if spec.writes else None,
            "mini": minis.get(rank, ()),
        }
        for rank, given in rows.items()
    }
    return commands, held


def frame_of(
    number: int,
    label: str,
    held: dict[int, Ids],
    assignment: Assignment,
    names: Sequence[str],
    on_free: Callable[[int], None],
) -> Frame:
    """The frame that a call makes."""
    answer = {rank: held[rank] for rank in assignment.answering}
    by_column = dict.fromkeys(names, held)
    ranks = tuple(sorted(assignment.given))
    return Frame(number, label, ranks, tuple(names), answer, by_column, on_free, held)


def ids_at(ids: Ids, positions: np.ndarray) -> Ids:
    """The ids at these positions, ascending, each once."""
    return ascending(ids[positions])


def _token_lengths(
    caller: Caller, batch: Batch, target: Target, spec: MethodSpec
) -> np.ndarray | None:
    """Prompt + response tokens, if this call is cut by tokens (waits for the lengths)."""
    balanced = spec.minibatches and target.cut is not None and target.cut.balance_tokens
    if target.limit.max_tokens is None and not balanced:
        return None
    known = [name for name in ("prompts", "responses") if name in batch.columns]
    if "responses" not in known:
        if balanced:
            raise ColumnError(
                f"{target.name}: the batch has {sorted(batch.columns)}, expected responses "
                f"too, as update.balance_tokens is set; turn that off or generate first"
            )
        return None
    return np.sum([caller.lengths(batch.column(name), name) for name in known], axis=0)


def _groups_of(groups: np.ndarray | None, positions: np.ndarray) -> dict[str, Any]:
    """Message data of row maths over groups: of each row its group and its place in there."""
    if groups is None:
        return {}
    places, largest = places_in_groups(groups)
    return {
        "groups": groups[positions],
        "num_groups": int(groups.max(initial=-1)) + 1,
        "places": places[positions],
        "largest_group": largest,
    }
