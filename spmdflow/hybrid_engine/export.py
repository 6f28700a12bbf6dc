"""A model as a Hugging Face folder, written by many ranks: each gathers some tensors.

A tensor is written by one of the ranks that hold most of it; the others send it their boxes, in the
precision of the file (`whole`). All write at the same time, and none has more than a chunk of whole
tensors in memory. Every rank makes the same plan from what all of them hold; the first one writes
config.json and the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from spmdflow.hybrid_engine.reshard import BoxesByRank, boxes_by_name
from spmdflow.hybrid_engine.stream import GroupWire, Shape, WholeTensors
from spmdflow.parallel.group import GroupTable
from spmdflow.weights.file import Facts, write_file
from spmdflow.weights.folder import file_names, write_beside
from spmdflow.weights.move import Block
from spmdflow.workers.engine import TrainEngine

_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 4 << 30


@dataclass(frozen=True)
class PlannedFile:
    """One file of the folder."""

    writer: int
    """The rank that writes it."""
    tensors: tuple[Facts, ...]
    """Wider dtypes first, otherwise in the order of the model."""


def plan_files(
    facts: Iterable[Facts],
    have: BoxesByRank,
    *,
    least_bytes: int = _LEAST_FILE_BYTES,
    most_bytes: int = _MOST_FILE_BYTES,
) -> list[PlannedFile]:
    """Files of about equal size, each of at most most_bytes; as many writers as get least_bytes.

    A file with one tensor may be larger. have: the boxes that each rank holds.
    """
    facts, ranks = sorted(facts, key=lambda each: -each.dtype.itemsize), sorted(have)
    total = sum(each.num_bytes for each in facts)
    num_writers = max(1, min(len(ranks), total // least_bytes))
    loads = {ranks[number * len(ranks) // num_writers]: 0 for number in range(num_writers)}
    chosen: dict[str, int] = {}
    for each in sorted(facts, key=lambda each: -each.num_bytes):
        parts = {rank: sum(box.size for box in have[rank].get(each.name, ())) for rank in loads}
        most = max(parts.values())  # any rank with half of the largest share will do
        writer = min((r for r in loads if 2 * parts[r] >= most), key=lambda r: (loads[r], r))
        chosen[each.name], loads[writer] = writer, loads[writer] + each.num_bytes
    files: list[PlannedFile] = []
    for writer in loads:
        part: list[Facts] = []
        for each in (each for each in facts if chosen[each.name] == writer):
            if part and sum(x.num_bytes for x in (*part, each)) > most_bytes:
                files.append(PlannedFile(writer, tuple(part)))
                part = []
            part.append(each)
        if part:
            files.append(PlannedFile(writer, tuple(part)))
    return files


def export_of(engine: TrainEngine, *, seconds: float) -> Callable[[Path], None]:
    """A function that writes the engine's model into a folder, in forward's compute precision.

    Collective, as each call of the result is; the folder is whole when every rank has returned.
    seconds: limit of one message.
    """
    have = dict(zip(engine.layout.ranks, engine.from_all(boxes_by_name(engine.blocks()))))
    # what forward computes with; a scalar head is float32 whatever the others are
    dtypes = {"score.weight": torch.float32}
    facts = [Facts(name, dtypes.get(name, engine.dtype), x) for name, x in engine.shapes.items()]
    export = FolderExport(
        facts, have, engine.groups, rank=engine.rank, device=engine.device, seconds=seconds
    )
    config = {**engine.model.config, "dtype": str(engine.dtype).removeprefix("torch.")}
    source = engine.model.source
    return lambda folder: export.write(folder, engine.blocks(), config=config, source=source)


class FolderExport:
    """Writes one model's weights into a folder, by a plan that is made once for all exports."""

    def __init__(
        self,
        facts: Sequence[Facts],
        have: BoxesByRank,
        groups: GroupTable,
        *,
        rank: int,
        device: torch.device,
        seconds: float,
        **sizes: int,
    ) -> None:
        """have: by rank, for the whole pool, whose process group is in groups; sizes: limits of
        `plan_files`."""
        self._rank, self._is_first = rank, rank == min(have)
        self.files = plan_files(facts, have, **sizes)
        wanted: dict[torch.dtype, dict[int, list[Shape]]] = {}
        for file in self.files:
            for name, dtype, shape in file.tensors:
                wanted.setdefault(dtype, {}).setdefault(file.writer, []).append((name, shape))
        self._ways = [
            WholeTensors(
                have,
                tensors,
                lambda plan: GroupWire(groups, plan, rank=rank),
                rank=rank,
                dtype=dtype,
                device=device,
                seconds=seconds,
            )
            for dtype, tensors in sorted(wanted.items(), key=lambda item: -item[0].itemsize)
        ]

    def write(
        self, folder: Path, blocks: Iterable[Block], *, config: Mapping[str, Any], source: Path
    ) -> None:
        """This rank's files; on the first rank also config.json, the index and source's other
        files. Collective. blocks: what this rank holds."""
        folder.mkdir(parents=True, exist_ok=True)
        names, held = file_names(len(self.files)), list(blocks)
        arriving = chain.from_iterable(way.run(held) for way in self._ways)
        for name, file in zip(names, self.files, strict=True):
            if file.writer == self._rank:
                mine = (values for _, values in islice(arriving, len(file.tensors)))
                write_file(folder / name, file.tensors, mine, {"format": "pt"})
        for _ in arriving:  # goes on sending while others still receive
            raise AssertionError("a tensor for no file")
        if self._is_first:
            weights = {
                name: {each.name: each.num_bytes for each in file.tensors}
                for name, file in zip(names, self.files, strict=True)
            }
            write_beside(folder, weights, config=config, source=source)
