"""An actor whose responses are those of the first run, so that losses of runs can be compared."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.models.policy import ActorWorker
from spmdflow.worker_api.register import register

COLUMNS = ("responses", "response_mask", "rollout_log_probs")
Rows = list[dict[str, Tensor]]


class RecordedActor(ActorWorker):
    """Keeps its responses by row id beside RUN_DIR if nobody has (one rank), else replays them."""

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=COLUMNS,
        extends=True,
        draws=True,
    )
    def generate_sequences(self, batch: TensorDict, *, greedy: bool = False) -> TensorDict:
        made = super().generate_sequences(batch, greedy=greedy)
        if greedy:
            return made
        run_dir = self.context.run_dir
        ids = self.call.row_ids.tolist()
        assert run_dir is not None
        path = run_dir.parent / f"rollouts-{self.kind_of(run_dir)}{self.call.step}.pt"
        columns = {name: rows_of(made[name]) for name in COLUMNS}
        rows = [{name: columns[name][place] for name in COLUMNS} for place in range(len(ids))]
        if not path.exists():
            torch.save(dict(zip(ids, rows, strict=True)), path)
            return made
        recorded = torch.load(path)
        kept = [recorded[row] for row in ids]
        self.compare(rows, kept)
        replayed = TensorDict({}, batch_size=batch.batch_size)
        for name in COLUMNS:
            replayed[name] = ragged_from_rows([row[name] for row in kept], dtype=made[name].dtype)
        return replayed

    def kind_of(self, run_dir: Path) -> str:
        """Runs of one kind share their responses."""
        return ""

    def compare(self, made: Rows, recorded: Rows) -> None:
        """Look at what was generated beside what is replayed."""
