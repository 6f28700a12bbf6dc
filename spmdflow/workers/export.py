"""A model as a Hugging Face folder, written by many ranks: each gathers some tensors, one by one.

A tensor is written by a rank that holds all of it, or else one of those that hold most; the others
send it their boxes, in the precision of the file. In each round every writer gets one tensor, so
that all write at the same time and none has more than one whole tensor in memory. Every rank makes
the same plan from what all of them hold; the first one writes config.json and the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.weights.file import Facts, write_file
from spmdflow.weights.folder import file_names, write_beside
from spmdflow.weights.move import Block, Blocks

_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 4 << 30
Held = Sequence[tuple[int, Box]]
"""(place of a rank in its pool, box of one tensor that it holds)."""


@dataclass(frozen=True)
class PlannedFile:
    """One file of the folder."""

    writer: int
    """Place in the pool of the rank that writes it."""
    tensors: tuple[Facts, ...]
    """Wider dtypes first, otherwise in the order of the model."""


def plan_files(
    facts: Sequence[Facts],
    held: Mapping[str, Held],
    num_ranks: int,
    *,
    least_bytes: int = _LEAST_FILE_BYTES,
    most_bytes: int = _MOST_FILE_BYTES,
) -> list[PlannedFile]:
    """Files of about equal size, each of at most most_bytes; as many writers as get least_bytes.

    A file with one tensor may be larger.
    """
    total = sum(each.num_bytes for each in facts)
    num_writers = max(1, min(num_ranks, total // least_bytes))
    loads = {number * num_ranks // num_writers: 0 for number in range(num_writers)}
    chosen: dict[str, int] = {}
    for each in sorted(facts, key=lambda each: -each.num_bytes):
        parts = dict.fromkeys(loads, 0)
        for place, box in held[each.name]:
            if place in parts:
                parts[place] += box.size
        most = max(parts.values())  # of uneven shares the smaller ones are as good
        writer = min((p for p in loads if 2 * parts[p] >= most), key=lambda p: (loads[p], p))
        chosen[each.name], loads[writer] = writer, loads[writer] + each.num_bytes
    files: list[PlannedFile] = []
    for writer in loads:
        part: list[Facts] = []
        for each in (each for each in facts if chosen[each.name] == writer):
            if part and sum(x.num_bytes for x in (*part, each)) > most_bytes:
                files.append(_file(writer, part))
                part = []
            part.append(each)
        if part:
            files.append(_file(writer, part))
    return files


def _file(writer: int, tensors: Iterable[Facts]) -> PlannedFile:
    return PlannedFile(writer, tuple(sorted(tensors, key=lambda each: -each.dtype.itemsize)))


def sources(facts: Facts, held: Held, writer: int) -> list[tuple[int, Box]]:
    """(place, box) that make up a whole tensor, each element once: the writer's own part first,
    then from the nearest ranks."""
    missing, found = [Box.of_shape(facts.shape)], []
    for place, box in sorted(held, key=lambda each: (abs(each[0] - writer), each[0])):
        if not missing:
            break
        found += [(place, part) for part in (box.intersect(each) for each in missing) if part]
        missing = subtract_all(missing, [box])
    assert not any(box.size for box in missing), f"nobody has {facts.name}{missing}"
    return found


class FolderExport:
    """The planned way of one model's weights into a folder, made once and gone each time."""

    def __init__(
        self,
        facts: Sequence[Facts],
        held: Mapping[str, Held],
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        **sizes: int,
    ) -> None:
        """held: by all ranks of the pool; group: over them, None for one rank; sizes: see
        `plan_files`."""
        self._ranks, self._place, self._group = ranks, ranks.index(rank), group
        self.files = plan_files(facts, held, len(ranks), **sizes)
        writers: dict[int, list[Facts]] = {}
        for file in self.files:
            writers.setdefault(file.writer, []).extend(file.tensors)
        self._rounds = [
            [
                (writer, each, sources(each, held[each.name], writer))
                for writer, each in zip(writers, some, strict=True)
                if each is not None
            ]
            for some in zip_longest(*writers.values())
        ]

    def write(
        self,
        folder: Path,
        blocks: Iterable[Block],
        device: torch.device,
        *,
        config: Mapping[str, Any],
        source: Path,
    ) -> None:
        """This rank's files; on the first rank also config.json, the index and source's other
        files. Collective. blocks: what this rank holds."""
        folder.mkdir(parents=True, exist_ok=True)
        names = file_names(len(self.files))
        arriving = self._tensors(Blocks(blocks), device)
        for name, file in zip(names, self.files, strict=True):
            if file.writer == self._place:
                mine = islice(arriving, len(file.tensors))
                write_file(folder / name, file.tensors, mine, {"format": "pt"})
        for _ in arriving:  # the rounds in which this rank only sends
            raise AssertionError("a tensor for no file")
        if self._place == 0:
            weights = {
                name: {each.name: each.num_bytes for each in file.tensors}
                for name, file in zip(names, self.files, strict=True)
            }
            write_beside(folder, weights, config=config, source=source)

    def _tensors(self, blocks: Blocks, device: torch.device) -> Iterator[Tensor]:
        """The tensors of this rank's files, one a round; sends what other writers lack."""
        for some in self._rounds:
            operations: list[dist.P2POp] = []
            whole = torch.empty(0)
            landing: list[tuple[Box, Tensor]] = []
            for writer, facts, parts in some:
                if writer == self._place:
                    whole = torch.empty(facts.shape, dtype=facts.dtype, device=device)
                for place, box in parts:
                    if place == writer == self._place:
                        whole[box.slices()] = blocks.read(facts.name, box)
                    elif place == self._place:
                        values = blocks.read(facts.name, box).to(facts.dtype).contiguous()
                        operations.append(self._operation(dist.isend, values, writer))
                    elif writer == self._place:
                        buffer = torch.empty(box.shape, dtype=facts.dtype, device=device)
                        landing.append((box, buffer))
                        operations.append(self._operation(dist.irecv, buffer, place))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for box, buffer in landing:
                whole[box.slices()] = buffer
            if any(writer == self._place for writer, *_ in some):
                yield whole

    def _operation(self, kind: Any, values: Tensor, place: int) -> dist.P2POp:
        flat = values.reshape(-1).view(torch.uint8)  # any dtype travels as bytes
        return dist.P2POp(kind, flat, self._ranks[place], self._group)
