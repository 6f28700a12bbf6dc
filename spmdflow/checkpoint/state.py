"""Reads a role's state, on any layout, from the files that its ranks wrote.

`blocks.plan.plan_reads` plans which part of which stored tensor goes where, so that each needed
element comes from exactly one file. A stored tensor is a slab of at most 64 MiB. It is read once
and completely, so that its hash can be compared.
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
from spmdflow.checkpoint.manifest import FileFacts, damage_error, read_manifest
from spmdflow.checkpoint.tensors import open_tensors, read_tensor
from spmdflow.errors import CheckpointError
from spmdflow.weights.file import Stored
from spmdflow.weights.move import Block

_KEY = re.compile(r"(.+)\[([\d:,]*)\]")
_FILE = re.compile(r"rank-(\d+)\..*")


class _StoredBox(NamedTuple):
    """A box of a tensor, and where its values are stored."""

    box: Box
    path: Path
    stored: Stored


class StateFiles:
    """The state that a role's ranks wrote into a sealed checkpoint, for one reading rank.

    Opens files, nearest first, until the needed boxes are complete. If the layout has not changed,
    that is only this rank's own file.
    """

    bytes_read = 0
    """Bytes of stored tensors that were read so far."""

    def __init__(
        self, folder: Path, *, index: int = 0, count: int = 1, unsealed: Iterable[str] = ()
    ) -> None:
        """Open the nearest file.

        folder: of the role. index, count: of this rank among those that read. unsealed: names of
        the files if there is no manifest yet; values are then not compared with the hashes, because
        the files were just written. CheckpointError if there is no file, or a damaged one.
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
        mine = len(names) * (2 * index + 1)
        nearest = sorted(names, key=lambda rank: abs(count * (2 * rank + 1) - mine))
        self._unopened = [names[rank] for rank in nearest]
        self._stored_boxes: dict[str, list[_StoredBox]] = {}
        self.plain = self._open_next()
        """JSON data of the nearest file."""

    def fill(self, blocks: Iterable[Block]) -> None:
        """Copy the saved values of each box into its view, in place. Empty boxes are skipped.

        blocks: (tensor name, view, box). CheckpointError if the files lack a part of a box, or if
        stored bytes do not match their hash.
        """
        wanted: dict[str, list[tuple[Tensor, Box]]] = {}
        for name, view, box in blocks:
            if box.size:
                wanted.setdefault(name, []).append((view, box))
        for name, targets in wanted.items():
            self._fill_targets(name, targets)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> full shape of each tensor, in the order of the files; opens all of them.

        A dimension's size is the largest end of a stored box.
        """
        while self._unopened:
            self._open_next()
        shapes = {}
        for name, boxes in self._stored_boxes.items():
            ends = [[stop for _, stop in each.box.bounds] for each in boxes]
            shapes[name] = tuple(max(of_axis) for of_axis in zip(*ends, strict=True))
        return shapes

    def slabs(self, name: str, shape: Sequence[int]) -> list[Box]:
        """Return boxes of consecutive rows, in order, that cover a tensor; none cuts a stored slab.

        So reading box after box reads each stored slab once. A tensor of shape () or without
        elements is one box. CheckpointError if the files do not cover the tensor.
        """
        full_box = Box.of_shape(shape)
        if not full_box.size or not full_box.bounds:
            return [full_box]
        starts = list[int]()
        stop = 0
        for low, high in sorted(each.box.bounds[0] for each in self._find_boxes(name, (full_box,))):
            if low >= stop:
                starts.append(low)
            stop = max(stop, high)
        result = []
        for rows in pairwise([*starts, shape[0]]):
            result.append(Box((rows, *full_box.bounds[1:])))
        return result

    def read(self, name: str, box: Box) -> Tensor:
        """The values of a box on the host; CheckpointError as in `fill`."""
        result = torch.empty(box.shape, dtype=self._find_boxes(name, (box,))[0].stored.dtype)
        self.fill([(name, result, box)])
        return result

    def _fill_targets(self, name: str, targets: list[tuple[Tensor, Box]]) -> None:
        """Copy values into the views of one tensor, reading each stored box at most once.

        targets: (view, box), not empty; views may overlap in what they need. Adds to bytes_read.
        Values are compared with their hashes unless the checkpoint is unsealed (CheckpointError).
        """
        needed = tuple(box for _, box in targets)
        stored_boxes = self._find_boxes(name, needed)
        parts: dict[int, list[Box]] = {}
        for number, part in plan_reads(tuple(each.box for each in stored_boxes), needed):
            parts.setdefault(number, []).append(part)
        for number, needed_parts in parts.items():
            box, path, stored = stored_boxes[number]
            values = read_tensor(path, stored, is_verified=not self._is_unsealed)
            self.bytes_read += values.nbytes
            for view, target in targets:
                for part in needed_parts:
                    if (common := part.intersect(target)) is not None:
                        view[common.slices(target)].copy_(values[common.slices(box)])

    def _find_boxes(self, name: str, needed: Boxes) -> list[_StoredBox]:
        """Return the known stored boxes of a tensor; open files until these cover `needed`.

        CheckpointError if all files together lack a part.
        """
        while missing := subtract_all(
            needed, [each.box for each in self._stored_boxes.get(name, ())]
        ):
            if not self._unopened:
                raise CheckpointError(
                    f"checkpoint: {self._folder.parent} lacks {name}{list(missing[0].bounds)}, "
                    f"expected all of {[list(box.bounds) for box in needed]}; resume with the "
                    f"model and the optimizer that wrote it"
                )
            self._open_next()
        return self._stored_boxes[name]

    def _open_next(self) -> dict[str, Any]:
        """Open the nearest unopened file and record its boxes; return its JSON data.

        Keys are like "model.norm.weight[0:64]". CheckpointError if its header does not match the
        sha256 in the manifest, or if a key has no box. IndexError if no file is left.
        """
        name = self._unopened.pop(0)
        path = self._folder / name
        facts = self._facts[name]
        head, plain = open_tensors(path)
        if facts is not None and head.sha256 != facts.sha256:
            raise damage_error(path, f"has sha256 {head.sha256}", facts)
        for key, stored in head.tensors.items():
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(
                    f"checkpoint: {path} has a tensor named {key!r}, expected the name of a "
                    f"tensor and its box, such as {key}[0:8]; write the file with write_state"
                )
            pairs = (pair.split(":") for pair in match[2].split(",") if pair)
            box = Box(tuple((int(start), int(stop)) for start, stop in pairs))
            self._stored_boxes.setdefault(match[1], []).append(_StoredBox(box, path, stored))
        return plain
