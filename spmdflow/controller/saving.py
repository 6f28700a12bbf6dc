"""Checkpoints and resume as numbered commands: every rank writes, then the folder is sealed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.disk import shared_token
from spmdflow.checkpoint.manifest import CheckpointInfo, FileFacts, Written, moved_groups
from spmdflow.checkpoint.run_dir import Checkpoints
from spmdflow.checkpoint.tensors import check_frozen
from spmdflow.config.schema import RunConfig
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup
from spmdflow.errors import CheckpointError, ConfigError
from spmdflow.runtime.order import Order, Replies, Transport
from spmdflow.transfer.worker import loads_any_layout

logger = logging.getLogger(__name__)

_TOKEN_SECONDS = 5.0
"""What a network file system may take to show a new file on another node."""
_REPLY_SECONDS = 60.0

Groups = Mapping[str, WorkerGroup]


class Saving:
    """The checkpoints of a run, seen from the script thread."""

    def __init__(
        self, run_dir: Path, checkpoint: CheckpointInfo | None, run: RunConfig, settings: str
    ) -> None:
        """checkpoint: what the run continues from. settings: all of them, as YAML."""
        self._settings = settings
        self._checkpoints = Checkpoints(run_dir, keep=run.keep_checkpoints)
        self._checkpoints.clean()
        self._resumed_from, self._reloads_frozen = checkpoint, run.resume == "reload_frozen"
        self.due = False
        """Whether the running step ends with a checkpoint."""

    def resume(self, caller: Caller, groups: Groups) -> dict[str, Any] | None:
        """Load the checkpoint that the run continues from; returns the flow's state, or None.

        Each rank verifies what it reads.
        """
        info = self._resumed_from
        if info is None:
            return None
        classes = {name: group.target.worker_class for name, group in groups.items()}
        by_rank = {n: x.__name__ for n, x in classes.items() if not loads_any_layout(x)}
        if moved := moved_groups(info, _layout(groups), by_rank):
            logger.info("%s: saved on another layout, loaded box by box", ", ".join(moved))
        for reply in self._on_every_rank("load", info.folder, caller, groups).items():
            self._check_frozen(info, *reply)
        logger.info("continuing after step %s from %s", info.step, info.folder)
        state: dict[str, Any] = info.meta["flow"]
        return state

    def save(self, step: int, caller: Caller, groups: Groups, state: Mapping[str, Any]) -> None:
        """Write and seal a checkpoint; returns when it is the latest."""
        self.due = False
        if self._checkpoints.has(step):
            return
        folder = self._checkpoints.begin(step)
        replies = self._on_every_rank("save", folder, caller, groups)
        written = []
        for name, of_ranks in replies.items():
            for rank, reply in of_ranks.items():
                files = {f"{name}/{file}": FileFacts(*f) for file, f in reply["files"].items()}
                written.append(Written(rank, reply["node"], files))
        frozen = {name: _frozen(of_ranks) for name, of_ranks in replies.items()}
        meta = {
            "layout": _layout(groups),
            "flow": dict(state),
            "frozen": frozen,
            "settings": self._settings,
            "num_ranks": len(caller.ranks),
        }
        info = self._checkpoints.seal(step, meta, written)
        logger.info("saved step %s to %s", step, info.folder)

    def _check_frozen(self, info: CheckpointInfo, name: str, replies: Replies) -> None:
        """CheckpointError if a frozen model has changed; a warning with run.resume=reload_frozen.

        A checkpoint of an earlier version has no hash of it: also a warning.
        """
        now, then = _frozen(replies), info.meta.get("frozen", {}).get(name)
        if now is None:
            return
        if then is None:
            logger.warning(
                "%s does not say which %s model it had; using %s", info.folder, name, now[0]
            )
            return
        try:
            check_frozen(name, now, tuple(then), info.folder)
        except CheckpointError as err:
            if not self._reloads_frozen:
                raise
            logger.warning("run.resume=reload_frozen: %s", err)

    def _on_every_rank(
        self, operation: str, folder: Path, caller: Caller, groups: Groups
    ) -> dict[str, Replies]:
        """The replies of the ranks of each group."""
        pending = {}
        for name, group in groups.items():
            command = {"operation": operation, "group": name, "folder": str(folder / name)}
            commands = {rank: dict(command) for rank in group.target.layout.ranks}
            pending[name] = caller.submit(f"{name}.{operation}", commands)
        return {name: order.result() for name, order in pending.items()}


def check_shared(transport: Transport, ranks: tuple[int, ...], run_dir: Path) -> None:
    """ConfigError naming the ranks that do not see RUN_DIR as this process does."""
    with shared_token(run_dir) as token:
        where = {"run_dir": str(run_dir), "token": token, "seconds": _TOKEN_SECONDS}
        commands = {rank: {"operation": "run_dir", **where} for rank in ranks}
        order = Order(0, "compute", "run_dir", commands, _TOKEN_SECONDS + _REPLY_SECONDS)
        replies = transport.submit(order).result()
    blind = [f"rank {rank} on node {r['node']}" for rank, r in replies.items() if not r["sees"]]
    if blind:
        got = f"{run_dir}, where {', '.join(blind)} cannot read the file that rank "
        got += f"{ranks[0]} on node {replies[ranks[0]]['node']} wrote there"
        expected = "one folder that every node shares (checkpoints are written into it)"
        raise ConfigError.of("run.dir", got, expected, "set run.dir to a shared folder")


def _frozen(replies: Replies) -> tuple[str, str] | None:
    """Folder and hash of a group's frozen model, as its first rank says; None if it has none."""
    said = [reply["frozen"] for reply in replies.values() if reply["frozen"] is not None]
    return (said[0][0], said[0][1]) if said else None


def _layout(groups: Groups) -> dict[str, Any]:
    """Ranks and sizes of every group, as the manifest keeps them."""
    sizes = ("pp_size", "dp_size", "tp_size", "shard_size")
    layouts = {name: group.target.layout for name, group in groups.items()}
    return {
        name: {"ranks": list(layout.ranks)} | {size: getattr(layout, size) for size in sizes}
        for name, layout in layouts.items()
    }
