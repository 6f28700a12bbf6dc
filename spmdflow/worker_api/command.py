"""`Command`: one rank's part of a call (runtime/call.py), as the rank and its method get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MiniBatch:
    """The rows of this rank for one optimizer step."""

    index: Tensor
    """(rows,) int64: positions in the batch that the method gets. May be empty."""
    num_micro_batches: int
    """Number of forward passes on every rank of the dp group: the maximum that one of them
    needs."""


_NO_ROWS = torch.zeros(0, dtype=torch.int64)
"""One tensor for all commands without rows: making one takes 10 % of a call that does nothing."""


@dataclass(frozen=True)
class Command:
    """What one rank is told to do. A method finds the one that runs in `self.call`."""

    number: int
    """The call's."""
    step: int = 0
    row_ids: Tensor = _NO_ROWS
    """(B,) int64: ids of the rows received, unique in a run. Seeds derive from them."""
    num_micro_batches: int = 1
    """Number of forward passes on every rank of the dp group."""
    mini_batches: tuple[MiniBatch, ...] = ()
    """One entry per optimizer step, for methods that are marked with minibatches=True."""
    generation: Tensor | None = None
    """(B,) int64: number of earlier calls in this step that drew for each row. None: the method is
    not marked with draws=True."""
    parents: Tensor | None = None
    """(B,) int64: rows with the same parent are samples of one prompt. None: the method is not
    marked with parents=True."""
    total_steps: int = 0
    """Number of steps that the script takes (flow.steps), for updates. 0: outside of its steps."""
    ticket: int = 0
    """The controller's name of the call, for the reply."""
    lane: str = "compute"
    label: str = ""
    """The call's, such as "actor.generate_sequences"."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What was sent: "operation", and what that needs, as plain data."""

    @classmethod
    def from_message(
        cls, ticket: int, number: int, lane: str, label: str, payload: dict[str, Any]
    ) -> Command:
        """A command as it came; its rows are not looked at."""
        return cls(number, ticket=ticket, lane=lane, label=label, payload=payload)

    @classmethod
    def on_rows(cls, payload: Mapping[str, Any], number: int) -> Command:
        """Return the command of call `number` as its method sees it, from the payload of a message.

        Converts the payload's NumPy arrays to tensors: row ids, the rows of each mini-batch and, if
        the method is marked so, `generation` and `parents`.
        """
        mini_batches = []
        for index, num_micro_batches in payload["mini"]:
            mini_batches.append(MiniBatch(torch.from_numpy(index), num_micro_batches))
        command = cls(
            number,
            step=payload["step"],
            row_ids=torch.from_numpy(payload["ids"]),
            num_micro_batches=payload["micro"],
            mini_batches=tuple(mini_batches),
            total_steps=payload.get("total_steps", 0),
            payload=payload,
        )
        if "parents" in payload:
            command = replace(command, parents=torch.from_numpy(payload["parents"]))
        if "generation" in payload:
            return replace(command, generation=torch.from_numpy(payload["generation"]))
        return command
