"""Train engines with the weights of SmolLM2-135M-Instruct: log-probabilities of responses.

Usage: torchrun --nproc-per-node N smollm2_engine.py FOLDER CASE ...
A case is KIND:LAYOUT:RANKS, such as megatron:t3p2:6. FOLDER/scored.json has the rows and the
log-probabilities of plain transformers in float32 (`tests.smollm2.write_scored`). Writes
FOLDER/results.json: for each case the largest difference of each row, packed and padded.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import EngineConfig, ModelConfig, ReferenceConfig
from spmdflow.data.ragged import rows_of, select_rows
from spmdflow.models.base import EngineWorker
from spmdflow.objectives.log_prob import CausalOutput
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import engine_of
from spmdflow.workers.micro_batch import MicroBatch
from tests.smollm2 import SMOLLM2, read_scored

FORMS: dict[str, list[str]] = {"packed": [], "padded": ["padded"]}
"""Options of an engine, by how it lays out the rows of a micro-batch."""
ROWS = 2
"""Of a micro-batch."""


@dataclass(frozen=True)
class Case:
    """An engine on the first ranks of the world."""

    kind: str
    sizes: str
    num_ranks: int

    @classmethod
    def of(cls, word: str) -> Case:
        """The case that a word of the command line says."""
        kind, sizes, num_ranks = word.split(":")
        return cls(kind, sizes, int(num_ranks))

    def settings(self, options: list[str]) -> ReferenceConfig:
        """Those of a model that is never trained, so that there is no optimizer."""
        engine = EngineConfig(
            kind=self.kind, layout=self.sizes, options=options, micro_batch_rows=ROWS
        )
        return ReferenceConfig(
            model=ModelConfig(path=str(SMOLLM2), dtype="float32"),
            engine=engine,
        )

    @property
    def layout(self) -> Layout:
        """Which of its ranks is where."""
        return EngineWorker.layout_of(self.settings([]), tuple(range(self.num_ranks)))


def main(folder: Path, words: list[str]) -> None:
    """Run all cases, one after the other."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = GroupTable(dist.get_rank(), timeout_seconds=600)
    cases = {word: Case.of(word) for word in words}
    for case in cases.values():
        needed = EngineWorker.needed_groups(case.settings([]), case.layout)
        groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in needed])
    rows = read_scored(folder / "scored.json")
    results = {}
    for word, case in cases.items():
        found = {}
        for form, options in FORMS.items():
            found[form] = over_ranks(gaps_of(groups, case, options, rows), len(rows))
        results[word] = found
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def gaps_of(
    groups: GroupTable, case: Case, options: list[str], rows: TensorDict
) -> dict[int, float]:
    """Row -> the largest difference of its log-probabilities, of this rank's rows.

    {} outside of the case's ranks, and before the last pipeline stage.
    """
    rank = dist.get_rank()
    layout = case.layout
    if rank not in layout.ranks:
        return {}
    context = WorkerContext("reference", layout, rank, groups, torch.device("cpu"), seed=0)
    engine = engine_of(case.settings(options), context, head="causal_lm")
    assert engine.packs == (not options)
    dp = layout.coordinate(rank).dp
    index = torch.arange(len(rows)).chunk(layout.dp_size)[dp]
    share = select_rows(rows, index)
    parts = engine.count_micro_batches(share)
    found = engine.forward(share, log_probs, num_micro_batches=parts)
    if found is None:
        return {}
    gaps = {}
    pairs = zip(rows_of(found["found"]), rows_of(share["log_probs"]), strict=True)
    for row, (ours, plain) in zip(index.tolist(), pairs, strict=True):
        gaps[row] = float((ours - plain).abs().nan_to_num(nan=math.inf).max())
    return gaps


def log_probs(output: CausalOutput, micro: MicroBatch) -> dict[str, Tensor]:
    """Of each response token."""
    return {"found": micro.spread(output.log_probs(1.0))}


def over_ranks(gaps: dict[int, float], num_rows: int) -> list[float]:
    """The largest gap of each row on any rank. KeyError if no rank has computed a row."""
    everyone: list[dict[int, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, gaps)
    largest: dict[int, float] = {}
    for found in everyone:
        for row, gap in found.items():
            largest[row] = max(gap, largest.get(row, 0.0))
    return [largest[row] for row in range(num_rows)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
