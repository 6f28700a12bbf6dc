"""Evaluation between two steps: the held-out rows through the models of the script.

Script thread; one more node of the dataflow, whose calls are marked as the phase "eval".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from spmdflow.config.reward_terms import knows_right
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.judged import Judged, judged, write_judged
from spmdflow.controller.weight_link import WeightLink
from spmdflow.data.seed import seed_of
from spmdflow.errors import ConfigError
from spmdflow.tracking.estimate import as_metrics, estimates, per_prompt
from spmdflow.tracking.evaluation_table import evaluation_table

EVALUATION_FILE = "evaluation.jsonl"


class Evaluation:
    """Judges the held-out rows that a flow keeps, at most once a step."""

    def __init__(
        self,
        caller: Caller,
        groups: Mapping[str, WorkerGroup],
        kept: Mapping[str, Any],
        links: Sequence[WeightLink],
        config: Any,
    ) -> None:
        """groups, kept, links: the flow's own, which grow while its script begins."""
        self._caller, self._groups, self._kept, self._links = caller, groups, kept, links
        self._config, self._seed = config, seed_of(config.run.seed, "bootstrap")
        self._evaluated_at = -1

    def run(self, number: int, *, every: int) -> dict[str, float]:
        """See `Flow.evaluate`; number: of the step, 0 before the first. Estimates as metrics."""
        if not every or number % every or self._evaluated_at == number:
            return {}
        kept = [thing for thing in self._kept.values() if hasattr(thing, "eval_batch")]
        held_out = kept[0].eval_batch() if kept else None
        if held_out is None:
            raise ConfigError(
                "evaluate: no held-out prompts are kept, expected data.eval_path; "
                "set it, or eval_every to 0"
            )
        self._evaluated_at = number
        self._caller.phase = "eval"
        found = self._judge(held_out, kept[0])
        self._caller.phase = "train"
        return found

    def report(self, greedy: Batch, sampled: Batch, run_dir: Path) -> dict[str, float]:
        """See `Flow.report`."""
        by_prompt, samples = judged(greedy), judged(sampled)
        numbers = {"score": [row[0].score for row in by_prompt]}
        if knows_right(self._config.reward):
            numbers = {"accuracy": [row[0].right for row in by_prompt]} | numbers
        shares = _per_prompt(samples) if samples else {}
        write_judged(run_dir / EVALUATION_FILE, greedy, by_prompt, samples, shares)
        found = estimates(numbers | shares, seed=self._seed)
        lengths = [row[0].num_tokens for row in by_prompt]
        facts = {
            "prompts": len(by_prompt),
            "samples of each": len(samples[0]) if samples else 0,
            "mean tokens, greedy": mean(lengths),
        }
        if samples:
            facts["mean tokens, sampled"] = mean(s.num_tokens for row in samples for s in row)
        sys.stdout.write(evaluation_table("evaluation (accuracy and score: greedy)", found, facts))
        sys.stdout.flush()
        return as_metrics(found, "eval") | {"eval/response_length": facts["mean tokens, greedy"]}

    def _judge(self, held_out: Batch, stream: Any) -> dict[str, float]:
        for group in self._groups.values():
            method = getattr(group.target.worker_class, "evaluation", None)
            if method is not None:
                getattr(group, method)(self._prepared(held_out), prefix="eval")
                return {}
        for link in self._links:
            link.sync()
        generating = self._groups.get("generator", self._groups["actor"])
        batch = generating.generate_sequences(held_out, greedy=True)
        self._groups["reward"].compute_reward(batch)
        samples = stream.eval_samples() if hasattr(stream, "eval_samples") else None
        if samples is None or not len(samples):
            return {}
        sampled = generating.generate_sequences(samples)
        sampled |= self._groups["reward"].compute_reward(sampled, prefix="eval/sampled")
        return as_metrics(estimates(_per_prompt(judged(sampled)), seed=self._seed), "eval")

    def _prepared(self, held_out: Batch) -> Batch:
        """The held-out rows with the columns that other groups' `evaluation_columns` write."""
        for group in self._groups.values():
            method = getattr(group.target.worker_class, "evaluation_columns", None)
            if method is not None:
                held_out |= getattr(group, method)(held_out)
        return held_out


def _per_prompt(samples: Sequence[Sequence[Judged]]) -> dict[str, list[float]]:
    """pass@k and maj@n of each prompt."""
    return per_prompt(
        [[sample.answer for sample in row] for row in samples],
        [[sample.right for sample in row] for row in samples],
    )
