"""Evaluation between two steps: the held-out rows through the models of the script.

Script thread; one more node of the dataflow, whose calls are marked as the phase "eval".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.weight_link import WeightLink
from spmdflow.errors import ConfigError


class Evaluation:
    """Judges the held-out rows that a flow keeps, at most once a step."""

    def __init__(
        self,
        caller: Caller,
        groups: Mapping[str, WorkerGroup],
        kept: Mapping[str, Any],
        links: Sequence[WeightLink],
    ) -> None:
        """groups, kept, links: the flow's own, which grow while its script begins."""
        self._caller, self._groups, self._kept, self._links = caller, groups, kept, links
        self._evaluated_at = -1

    def run(self, number: int, *, every: int) -> None:
        """See `Flow.evaluate`; number: of the step, 0 before the first."""
        if not every or number % every or self._evaluated_at == number:
            return
        kept = [thing for thing in self._kept.values() if hasattr(thing, "eval_batch")]
        held_out = kept[0].eval_batch() if kept else None
        if held_out is None:
            raise ConfigError(
                "evaluate: no held-out prompts are kept, expected data.eval_path; "
                "set it, or eval_every to 0"
            )
        self._evaluated_at = number
        self._caller.phase = "eval"
        self._judge(held_out)
        self._caller.phase = "train"

    def _judge(self, held_out: Batch) -> None:
        for group in self._groups.values():
            method = getattr(group.target.worker_class, "evaluation", None)
            if method is not None:
                getattr(group, method)(self._prepared(held_out), prefix="eval")
                return
        for link in self._links:
            link.sync()
        generating = self._groups.get("generator", self._groups["actor"])
        batch = generating.generate_sequences(held_out, greedy=True)
        self._groups["reward"].compute_reward(batch)

    def _prepared(self, held_out: Batch) -> Batch:
        """The held-out rows with the columns that other groups' `evaluation_columns` write."""
        for group in self._groups.values():
            method = getattr(group.target.worker_class, "evaluation_columns", None)
            if method is not None:
                held_out |= getattr(group, method)(held_out)
        return held_out
