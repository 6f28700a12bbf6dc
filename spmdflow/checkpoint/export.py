"""A saved model as a Hugging Face folder, out of the boxes that ranks wrote into a checkpoint.

Values are those that `forward` computes with, or rounded to another precision. Some rows of one
tensor are in memory at a time. Several processes may each write some of the files, as the ranks of
a run do while it trains. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdflow.checkpoint.state import StateFiles
from spmdflow.weights.file import Facts, write_file
from spmdflow.weights.folder import file_names, write_beside

_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 4 << 30


def plan_files(
    facts: Iterable[Facts],
    count: int,
    *,
    least_bytes: int = _LEAST_FILE_BYTES,
    most_bytes: int = _MOST_FILE_BYTES,
) -> list[list[Facts]]:
    """Tensors of each file: `count` files of about equal size or, within the limits, fewer or more.

    Wider dtypes come first, otherwise tensors are in the given order.
    """
    ordered = sorted(facts, key=lambda each: -each.dtype.itemsize)
    total = sum(each.num_bytes for each in ordered)
    number = max(1, min(count, total // least_bytes), -(-total // most_bytes))
    files: dict[int, list[Facts]] = {}
    done = 0
    for each in ordered:  # into the file in which its middle lies
        files.setdefault((2 * done + each.num_bytes) * number // (2 * total + 1), []).append(each)
        done += each.num_bytes
    return list(files.values())


class ModelExport:
    """Writes the model of a role whose `save_state` was that of `EngineWorker`."""

    def __init__(
        self,
        plain: dict[str, Any],
        dtype: torch.dtype | None = None,
        *,
        place: int = 0,
        count: int = 1,
    ) -> None:
        """plain: what was saved beside the boxes. dtype: other than the one of forward. place,
        count: of this process among those that write."""
        self._model, self._is_first = plain["model"], place == 0
        self._dtype = dtype or getattr(torch, self._model["dtype"])
        kept = {"score.weight": torch.float32}  # a scalar head, whatever the others are
        facts = [Facts(n, kept.get(n, self._dtype), x) for n, x in plain["shapes"].items()]
        files = plan_files(facts, count)
        self._files = dict(zip(file_names(len(files)), files, strict=True))
        shares = zip(self._files.items(), range(0, len(files) * count, count), strict=True)
        self.mine = dict(file for file, number in shares if number // len(files) == place)
        """Tensors by the name of the file, of those that this process writes."""

    def write(self, state: StateFiles, folder: Path, *, beside: Path | None = None) -> None:
        """Write this process's files; the first one also writes config.json, the index and the
        other files of the model's source, or of `beside`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.mine.items():
            write_file(folder / name, tensors, _rows(state, tensors), {"format": "pt"})
        if self._is_first:
            weights = {n: {x.name: x.num_bytes for x in facts} for n, facts in self._files.items()}
            config = {**self._model["config"], "dtype": str(self._dtype).removeprefix("torch.")}
            source = beside or Path(self._model["source"])
            write_beside(folder, weights, config=config, source=source)


def _rows(state: StateFiles, tensors: Sequence[Facts]) -> Iterator[Tensor]:
    """The values of each tensor, some rows at a time."""
    for name, dtype, shape in tensors:
        for box in state.slabs(name, shape):
            yield state.read(name, box).to(dtype)
