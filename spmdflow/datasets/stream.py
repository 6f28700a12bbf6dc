"""The order in which prompts are drawn: epochs of row numbers with a cursor. Integers only.

An epoch is a permutation of the good rows, derived from (seed, epoch). A step takes the next
prompts_per_step numbers and may span two epochs: no row is lost, none repeated within an epoch.
Knows no texts and no tokens.
"""

from __future__ import annotations

import random
from typing import Any

from spmdflow.config.schema import DataConfig
from spmdflow.data.seed import seed_of
from spmdflow.datasets.scan import ScanReport
from spmdflow.errors import CheckpointError, DataError


class PromptStream:
    """Endless row numbers of one scanned file."""

    def __init__(
        self, report: ScanReport, *, prompts_per_step: int, seed: int, shuffle: bool = True
    ) -> None:
        """DataError if the file has fewer good rows than one step takes."""
        if len(report.rows) < prompts_per_step:
            raise DataError(
                f"{report.path}: got {len(report.rows)} usable prompts of {report.num_rows} rows, "
                f"expected at least the {prompts_per_step} of one step; lower "
                f"data.prompts_per_step, or add rows"
            )
        self._report, self._prompts_per_step = report, prompts_per_step
        self._seed, self._shuffle = seed, shuffle
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    @classmethod
    def from_config(cls, cfg: DataConfig, report: ScanReport, *, seed: int) -> PromptStream:
        """A stream with the settings of the data section."""
        return cls(report, prompts_per_step=cfg.prompts_per_step, seed=seed, shuffle=cfg.shuffle)

    @property
    def epoch(self) -> int:
        """Passes over the file that are complete."""
        return self._epoch

    def next_rows(self) -> list[int]:
        """Row numbers of the next step, prompts_per_step of them."""
        rows: list[int] = []
        while len(rows) < self._prompts_per_step:
            end = self._position + self._prompts_per_step - len(rows)
            taken = self._order[self._position : end]
            rows += taken
            self._position += len(taken)
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, and of what; plain data."""
        return self._identity() | {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the state was taken; CheckpointError if it is another stream's."""
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise CheckpointError(
                    f"{self._report.path}: got a saved position of prompts with {key} "
                    f"{state.get(key)!r}, expected {mine!r}; resume with the file and the data "
                    f"settings of the first run, or start a new run directory"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        """All that the order depends on; not the path, which may move."""
        return {
            "num_rows": len(self._report.rows),
            "fingerprint": self._report.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order_of(self, epoch: int) -> list[int]:
        order = list(self._report.rows)
        if self._shuffle:
            random.Random(seed_of(self._seed, "shuffle", epoch)).shuffle(order)
        return order


def eval_rows(report: ScanReport, num_prompts: int | None) -> list[int]:
    """The first num_prompts good rows of a file of held-out prompts; None: all of them."""
    if num_prompts is not None and num_prompts > len(report.rows):
        raise DataError(
            f"{report.path}: got {len(report.rows)} usable prompts, expected at least "
            f"{num_prompts} (data.eval_prompts); lower it, or write all"
        )
    return report.rows[:num_prompts]
