"""What one line of the table of learning runs says. Facts only."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, replace

MIXTURE = "runs/arithmetic_mixture"
"""Folder of the tiny mixture of experts (scripts/make_arithmetic.py --experts 8)."""
CALCULATOR = "runs/calculator_sft"
"""Run that teaches the real model to call a calculator (algos/sft_calculator.yaml)."""


@dataclass(frozen=True)
class Entry:
    """An algorithm with settings: run once for every seed, judged by one metric.

    `target` is what the median over seeds must reach at the last step, or at `target_step`;
    `at_least=False` turns it round, for losses and costs.
    """

    name: str
    group: str
    script: str
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    metric: str = "eval/accuracy"
    target: float | None = None
    target_step: int | None = None
    at_least: bool = True
    drawn: tuple[tuple[str, float | None], ...] = ()
    """Further metrics with a curve, each with a level to draw."""
    more_metrics: tuple[str, ...] = ()
    """Further metrics that are kept."""
    yaml: str | None = None
    """Settings file of algos/ instead of the script's own."""
    judged: bool = False
    """Whether stories_metrics.py judges the export of the last step."""
    problems: tuple[str, ...] = ()
    """Arguments of make_problems.py that write what it reads. $SPMDFLOW_DATA may be in them."""
    num_ranks: int = 1
    """CPU ranks of one thread each. Each of them counts as one of --jobs."""

    @property
    def key(self) -> str:
        """Eight hex digits of script and settings: other settings are another run."""
        text = "\n".join((self.script, *([self.yaml] if self.yaml else []), *self.settings))
        if self.num_ranks > 1:
            text += f"\n{self.num_ranks} ranks"
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def run_name(self, seed: int) -> str:
        """Folder of one run below the folder of all runs."""
        return f"{self.name}-{self.key}-seed{seed}"

    def words(self, seed: int, run_dir: str) -> list[str]:
        """Arguments of `spmdflow.run`."""
        files = [f"algos/{self.script}.py", *([f"algos/{self.yaml}.yaml"] if self.yaml else [])]
        return [*files, *self.settings, f"run.seed={seed}", f"run.dir={run_dir}"]

    def command(self, seed: int) -> str:
        """The same for a reader."""
        words = shlex.join(self.words(seed, f"runs/{self.name}"))
        if self.num_ranks > 1:
            return f"spmdflow run -n {self.num_ranks} {words}"
        return f"python -m spmdflow.run --inproc {words}"

    def with_settings(self, more: tuple[str, ...]) -> Entry:
        """The same with settings on top; later ones win."""
        return replace(self, settings=(*self.settings, *more))
