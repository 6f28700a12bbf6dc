"""What a run recorded: its orders, and the lengths and values that its ranks reported."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmdflow.controller.transcript import TRANSCRIPT_FILE, read_transcript
from spmdflow.data.column import Column, ColumnSpec, join, read_message
from spmdflow.datasets.scan import ScanReport

Columns = Mapping[str, tuple[ColumnSpec, np.ndarray | None]]
"""Column -> kind, and items by row where it is not dense; rows in the order of their ids."""

_NOTHING: Mapping[str, Any] = {"orders": [], "steps": [], "ranks": [], "nodes": [], "start": None}


class Replay:
    """Answers of a run by label, each label's in the order of the script; without a file: none."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self._content = content or _NOTHING
        self._answers: dict[str, deque[Mapping[str, Any]]] = {}
        for order in self.orders:
            if "answer" in order:
                self._answers.setdefault(order["label"], deque()).append(order["answer"])
        self._entry: Mapping[str, Any] = {}

    @classmethod
    def of_run(cls, run_dir: str | Path) -> Replay:
        """The transcript of a run; DataError if it has none."""
        return cls(read_transcript(Path(run_dir) / TRANSCRIPT_FILE))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the run."""
        return tuple(self._content["ranks"])

    @property
    def nodes(self) -> dict[int, int]:
        """The machine of each rank of the run."""
        return dict(zip(self.ranks, self._content["nodes"], strict=True))

    @property
    def start(self) -> Mapping[str, Any] | None:
        """The flow's part of the checkpoint that the steps follow; None: they are the first."""
        start: Mapping[str, Any] | None = self._content["start"]
        return start

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps that were kept; 0 is the evaluation before the first."""
        return tuple(int(step["step"]) for step in self._content["steps"])

    @property
    def orders(self) -> Sequence[Mapping[str, Any]]:
        """Every order of these steps and before them, as `Transcript` writes it."""
        orders: list[Mapping[str, Any]] = self._content["orders"]
        return orders

    def edges(self, step: int) -> dict[tuple[int, int], int]:
        """Row bytes that the run counted in a step, by (source, destination)."""
        kept = next(s for s in self._content["steps"] if s["step"] == step)
        return {(source, to): size for source, to, size in kept["edges"]}

    def metrics(self, step: int) -> dict[str, float]:
        """What the run measured in a step."""
        return dict(next(s for s in self._content["steps"] if s["step"] == step)["metrics"])

    # Answers

    def go_to(self, label: str) -> None:
        """The next order of that label is answered now."""
        left = self._answers.get(label)
        self._entry = left.popleft() if left else {}

    @property
    def report(self) -> ScanReport | None:
        """Facts of the data file that the order scanned."""
        return self._entry.get("report")

    @property
    def columns(self) -> Columns:
        """What the order made; empty: not known."""
        plain = self._entry.get("columns", {})
        return {name: (ColumnSpec.from_plain(spec), n) for name, (spec, n) in plain.items()}

    @property
    def values(self) -> Mapping[int, Any]:
        """Plain answers by rank (Any: the script's); empty: not known."""
        return self._entry.get("values", {})

    @property
    def fetched(self) -> Column | None:
        """The column that the order fetched, rows in the order of their ids."""
        parts = self._entry.get("fetched")
        if not parts:
            return None
        ids = np.concatenate([ids for ids, _ in parts])
        whole = join([read_message(plain) for _, plain in parts])
        return whole.take(torch.from_numpy(np.argsort(ids, kind="stable")))
