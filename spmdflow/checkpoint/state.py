"""A role's state in the files that its ranks wrote, read on any layout: planned, proved, then read.

`blocks.plan.plan_reads` says which part of which tensor in the files goes where: each element that
the rank needs comes from one file, once. A tensor in a file, a slab of at most 64 MiB, is read
whole, so that its hash can be compared, and only once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.plan import Boxes, plan_reads
from spmdflow.checkpoint.manifest import FileFacts, damaged, read_manifest
from spmdflow.checkpoint.tensors import open_tensors, read_tensor
from spmdflow.errors import CheckpointError
from spmdflow.weights.file import Stored
from spmdflow.weights.move import Block

_KEY = re.compile(r"(.+)\[([\d:,]*)\]")
_FILE = re.compile(r"rank-(\d+)\..*")


class _Held(NamedTuple):
    """A box of a whole tensor, and where its values are."""

    box: Box
    path: Path
    stored: Stored


class StateFiles:
    """The state that a role's ranks wrote into a sealed checkpoint, for one reading rank.

    Files are opened until the needed boxes are complete, nearest first: with the layout that
    saved, only this rank's own.
    """

    bytes_read = 0
    """Of tensors in the files."""

    def __init__(
        self, folder: Path, *, place: int = 0, count: int = 1, unsealed: Iterable[str] = ()
    ) -> None:
        """folder: of the role; place, count: of the reading rank among those that read.
        unsealed: names of the files, if there is no manifest yet: they were just written, so their
        values are not compared with the hashes.

        CheckpointError without files or with a damaged one.
        """
        self._folder = folder
        self._facts: dict[str, FileFacts | None] = dict.fromkeys(unsealed)
        self._is_unsealed = bool(self._facts)
        if not self._is_unsealed:
            files = read_manifest(folder.parent).files
            prefix = f"{folder.name}/"
            self._facts = {
                name.removeprefix(prefix): facts
                for name, facts in files.items()
                if name.startswith(prefix)
            }
        names = {int(match[1]): name for name in self._facts if (match := _FILE.fullmatch(name))}
        if not names:
            raise CheckpointError(
                f"checkpoint: {folder} has no state, expected files of ranks; resume with the "
                f"roles and settings that wrote it"
            )
        mine = len(names) * (2 * place + 1)
        nearest = sorted(names, key=lambda rank: abs(count * (2 * rank + 1) - mine))
        self._unopened = [names[rank] for rank in nearest]
        self._held: dict[str, list[_Held]] = {}
        self.plain = self._open_next()
        """JSON data of the nearest file."""

    def fill(self, blocks: Iterable[Block]) -> None:
        """Write into each view the values of its box. CheckpointError if no file has all of it."""
        wanted: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, view, box in blocks:
            if box.size:
                wanted.setdefault(name, []).append((view, box))
        for name, targets in wanted.items():
            self._fill(name, targets)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every whole tensor in the files, in their order."""
        while self._unopened:
            self._open_next()
        corners = {}
        for name, held in self._held.items():
            corners[name] = zip(
                *([stop for _, stop in each.box.bounds] for each in held), strict=True
            )
        result = {}
        for name, stops in corners.items():
            result[name] = tuple(map(max, stops))
        return result

    def slabs(self, name: str, shape: Sequence[int]) -> list[Box]:
        """A whole tensor as boxes of some rows, in order; no tensor in the files is in two."""
        whole = Box.of_shape(shape)
        if not whole.size or not whole.bounds:
            return [whole]
        starts = list[int]()
        stop = 0
        for low, high in sorted(each.box.bounds[0] for each in self._look(name, (whole,))):
            if low >= stop:
                starts.append(low)
            stop = max(stop, high)
        result = []
        for rows in pairwise([*starts, shape[0]]):
            result.append(Box((rows, *whole.bounds[1:])))
        return result

    def read(self, name: str, box: Box) -> Tensor:
        """The values of a box on the host; CheckpointError as `fill`."""
        result = torch.empty(box.shape, dtype=self._look(name, (box,))[0].stored.dtype)
        self.fill([(name, result, box)])
        return result

    def _fill(self, name: str, targets: list[tuple[Tensor, Box]]) -> None:
        needed = tuple(box for _, box in targets)
        held = self._look(name, needed)
        parts: dict[int, list[Box]] = {}
        for place, part in plan_reads(tuple(each.box for each in held), needed):
            parts.setdefault(place, []).append(part)
        for place, found in parts.items():
            box, path, stored = held[place]
            values = read_tensor(path, stored, is_verified=not self._is_unsealed)
            self.bytes_read += values.nbytes
            for view, target in targets:
                for part in found:
                    if (common := part.intersect(target)) is not None:
                        view[common.slices(target)].copy_(values[common.slices(box)])

    def _look(self, name: str, needed: Boxes) -> list[_Held]:
        """What the opened files have of a tensor, once that is all of the needed boxes."""
        while missing := subtract_all(needed, [each.box for each in self._held.get(name, ())]):
            if not self._unopened:
                raise CheckpointError(
                    f"checkpoint: {self._folder.parent} lacks {name}{list(missing[0].bounds)}, "
                    f"expected all of {[list(box.bounds) for box in needed]}; resume with the "
                    f"model and the optimizer that wrote it"
                )
            self._open_next()
        return self._held[name]

    def _open_next(self) -> dict[str, Any]:
        name = self._unopened.pop(0)
        path = self._folder / name
        facts = self._facts[name]
        head, plain = open_tensors(path)
        if facts is not None and head.sha256 != facts.sha256:
            raise damaged(path, f"has sha256 {head.sha256}", facts)
        for key, stored in head.tensors.items():
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(
                    f"checkpoint: {path} holds a tensor named {key!r}, expected the name of a "
                    f"tensor and its box, such as {key}[0:8]; write the file with write_state"
                )
            pairs = (pair.split(":") for pair in match[2].split(",") if pair)
            box = Box(tuple((int(start), int(stop)) for start, stop in pairs))
            self._held.setdefault(match[1], []).append(_Held(box, path, stored))
        return plain
