"""The order in which rows are drawn: epochs of row numbers with a cursor. Integers only.

An epoch is a permutation of the good rows, derived from (seed, epoch), and from the stream's name
if it is a second one. A step takes the next prompts_per_step numbers and may span two epochs: no
row is lost, and none is repeated within an epoch. In a mixture the source of every prompt is drawn
by weight, derived from (seed, step). Each source has its own order of rows, derived from (seed,
epoch, its name), which does not depend on the other sources. Two sources of equal length are
permuted differently. This module does not know texts or tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from spmdflow.data.row_id import seed_of
from spmdflow.datasets.scan import ScanReport
from spmdflow.errors import CheckpointError, DataError


class PromptOrder:
    """Endless row numbers of one scanned file or mixture."""

    def __init__(
        self,
        report: ScanReport,
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        name: str = "",
    ) -> None:
        """name: name of a second stream; another name gives another order.

        Raises DataError if the file has fewer good rows than one step takes.
        """
        if len(report.rows) < prompts_per_step:
            got = f"{len(report.rows)} usable prompts of {report.num_rows} rows"
            expected = f"at least the {prompts_per_step} of one step"
            do = "lower data.prompts_per_step, or add rows"
            raise DataError.of(report.path, got, expected, do)
        self._report = report
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._step = 0
        cuts = np.searchsorted(report.rows, [file.first for file in report.files[1:]])
        files = np.split(report.rows, cuts)
        names = [name]
        if len(files) > 1:
            names = []
            for file in report.files:
                names.append(f"{name}/{file.name}" if name else file.name)
        self._epochs = [
            _Epochs(rows, seed, name=name, shuffle=shuffle)
            for name, rows in zip(names, files, strict=True)
        ]

    @property
    def epoch(self) -> int:
        """Number of complete passes over the file, or over every file of a mixture."""
        return min(epochs.number for epochs in self._epochs)

    def next_rows(self) -> list[int]:
        """Take the prompts_per_step row numbers of the next step and move on.

        One file is read in its order, across epochs. In a mixture, the source of each number is
        drawn by weight, seeded with (seed, step), and gives the next row of its own order.
        """
        if len(self._epochs) == 1:
            return self._epochs[0].take(self._prompts_per_step)
        self._step += 1
        drawn = random.Random(seed_of(self._seed, "mixture", self._step)).choices(
            self._epochs, [file.weight for file in self._report.files], k=self._prompts_per_step
        )
        return [epochs.take(1)[0] for epochs in drawn]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of the stream as plain data, for a checkpoint."""
        files = [epochs.state_dict() for epochs in self._epochs]
        state = self._identity() | {"has_own_orders": all(each.name for each in self._epochs)}
        if len(files) == 1:
            return state | files[0]
        return state | {"step": self._step, "files": files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position; CheckpointError if it belongs to another stream.

        The files' content, number of rows, seed, shuffle and weights must be the same; paths may
        differ. A state of an earlier version continues in that version's order, in which all
        sources and streams had the same permutation, so no row is lost or repeated within an epoch.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                got = f"a saved position of prompts with {key} {state.get(key)!r}"
                do = "resume with the file and the data settings of the first run, or "
                do += "start a new run directory"
                raise CheckpointError.of(self._report.path, got, repr(mine), do)
        self._step = int(state.get("step", 0))
        for epochs, saved in zip(self._epochs, state.get("files", [state]), strict=True):
            if not state.get("has_own_orders", False):
                epochs.name = ""
            epochs.load_state_dict(saved)

    def _identity(self) -> dict[str, Any]:
        """Return everything that the order depends on, as plain data.

        The path is not part of it, because files may be moved. Weights are there for a mixture
        only.
        """
        weights = {}
        for file in self._report.files:
            weights[file.name] = file.weight
        return {
            "num_rows": len(self._report.rows),
            "fingerprint": self._report.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        } | ({"weights": weights} if len(self._epochs) > 1 else {})


class _Epochs:
    """Endless row numbers of one file."""

    def __init__(self, rows: np.ndarray, seed: int, *, name: str, shuffle: bool) -> None:
        """name: the source in its mixture. If it is empty, the order does not depend on it."""
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self.name = name
        self.load_state_dict({"epoch": 0, "position": 0})

    def take(self, count: int) -> list[int]:
        """Take the next `count` row numbers and move on, across epochs if necessary.

        At the end of an epoch the rows are shuffled again for the next one.
        """
        rows: list[int] = []
        while len(rows) < count:
            next_rows = self._order[self._position : self._position + count - len(rows)]
            rows += next_rows
            self._position += len(next_rows)
            if self._position == len(self._order):
                self.load_state_dict({"epoch": self.number + 1, "position": 0})
        return rows

    def state_dict(self) -> dict[str, int]:
        """Epoch and position in it."""
        return {"epoch": self.number, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved epoch and position, and make the order of that epoch.

        With shuffle it is a permutation seeded with (seed, epoch, name), otherwise the order of the
        file.
        """
        self.number = int(state["epoch"])
        self._position = int(state["position"])
        self._order: list[int] = self._rows.tolist()
        if self._shuffle:
            random.Random(seed_of(self._seed, "shuffle", self.number, name=self.name)).shuffle(
                self._order
            )


def eval_rows(report: ScanReport, num_prompts: int | None) -> list[int]:
    """Return the numbers of the first num_prompts good rows of a held-out file; None: of all.

    DataError if there are fewer.
    """
    if num_prompts is not None and num_prompts > len(report.rows):
        got = f"{len(report.rows)} usable prompts"
        expected = f"at least {num_prompts} (data.eval_prompts)"
        do = "lower it, or set it to null for all prompts"
        raise DataError.of(report.path, got, expected, do)
    rows: list[int] = report.rows[:num_prompts].tolist()
    return rows
