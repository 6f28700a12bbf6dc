"""Checkpoints and resume as numbered commands: every rank writes, then the folder is sealed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.folder import Checkpoints
from spmdflow.checkpoint.manifest import CheckpointInfo, check_layout, verify
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup

logger = logging.getLogger(__name__)

Groups = Mapping[str, WorkerGroup]


class Saving:
    """The checkpoints of a run, seen from the script thread."""

    def __init__(self, run_dir: Path, checkpoint: CheckpointInfo | None, *, keep: int) -> None:
        self._checkpoints = Checkpoints(run_dir, keep=keep)
        self._checkpoints.clean()
        self._resumed_from = checkpoint
        self.due = False
        """Whether the running step ends with a checkpoint."""

    def resume(self, caller: Caller, groups: Groups) -> dict[str, Any] | None:
        """Load the checkpoint that the run continues from; the flow's own part, or None."""
        info = self._resumed_from
        if info is None:
            return None
        check_layout(info, _layout(groups))
        verify(info)
        self._on_every_rank("load", info.folder, caller, groups)
        logger.info("continuing after step %s from %s", info.step, info.folder)
        state: dict[str, Any] = info.meta["flow"]
        return state

    def save(self, step: int, caller: Caller, groups: Groups, state: Mapping[str, Any]) -> None:
        """Write and seal a checkpoint; returns when it is the latest."""
        self.due = False
        if self._checkpoints.has(step):
            return
        folder = self._checkpoints.begin(step)
        self._on_every_rank("save", folder, caller, groups)
        info = self._checkpoints.seal(step, {"layout": _layout(groups), "flow": dict(state)})
        logger.info("saved step %s to %s", step, info.folder)

    def _on_every_rank(self, operation: str, folder: Path, caller: Caller, groups: Groups) -> None:
        pending = []
        for name, group in groups.items():
            command = {"operation": operation, "group": name, "folder": str(folder / name)}
            commands = {rank: dict(command) for rank in group.target.layout.ranks}
            pending.append(caller.submit(f"{name}.{operation}", commands))
        for order in pending:
            order.result()


def _layout(groups: Groups) -> dict[str, Any]:
    """Ranks and sizes of every group, as the manifest keeps them."""
    layouts = {name: group.target.layout for name, group in groups.items()}
    return {
        name: {
            "ranks": list(layout.ranks),
            "pp_size": layout.pp_size,
            "dp_size": layout.dp_size,
            "tp_size": layout.tp_size,
            "shard_size": layout.shard_size,
        }
        for name, layout in layouts.items()
    }
