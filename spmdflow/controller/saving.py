"""Checkpoints and resume as commands: every rank copies its state, then writes it in a thread.

When all ranks have written, a thread of the controller's process seals the folder. One checkpoint
is written at a time: the next one, and the end of the run, wait for it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from math import isfinite, nan
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    DamagedError,
    FileFacts,
    RankReport,
    moved_groups,
)
from spmdflow.checkpoint.run_dir import Checkpoints
from spmdflow.checkpoint.tensors import check_frozen
from spmdflow.config.schema import RunConfig
from spmdflow.controller.caller import Caller
from spmdflow.controller.ending import Ending
from spmdflow.controller.group import WorkerGroup
from spmdflow.errors import CheckpointError, ReadError, RunFailed
from spmdflow.failure.cause import error_context
from spmdflow.failure.launcher import launched_seconds, shutdown_seconds
from spmdflow.runtime.call import Call, Pending, Replies, Transport
from spmdflow.runtime.executor import COMPUTE, FILES
from spmdflow.tracking.tracker import sync_records
from spmdflow.worker_api.worker import loads_any_layout

logger = logging.getLogger(__name__)

_RANK_FILE = re.compile(r"/rank-(\d+)\.safetensors$")

Groups = Mapping[str, WorkerGroup]


class Saving:
    """The checkpoints of a run, seen from the script thread."""

    def __init__(
        self,
        run_dir: Path,
        checkpoint: CheckpointInfo | None,
        run: RunConfig,
        settings: str,
        *,
        models: Mapping[str, Sequence[str]] | None = None,
        lock: RunDirLock | None = None,
    ) -> None:
        """checkpoint: what the run continues from. settings: all of them, as YAML. models: the
        model folders that were given as links, as of `ModelFolders.resolved_links`. lock: of
        RUN_DIR: nothing is saved once the folder is not this run's any more."""
        self._settings = settings
        self._models = {key: list(pair) for key, pair in (models or {}).items()}
        self._checkpoints = Checkpoints(
            run_dir, keep=run.keep_checkpoints, best=run.keep_best, lock=lock
        )
        self._checkpoints.clean()
        age = launched_seconds(os.getpid())
        shutdown = shutdown_seconds(os.getpid())
        self.ending = Ending(run.max_seconds, age=age, shutdown=shutdown)
        self._metric = run.keep_best
        self.resumed_from = checkpoint
        self._reloads_frozen = run.resume == "reload_frozen"
        self.due = False
        """Whether the running step ends with a checkpoint."""
        self._sealing: Future[float] | None = None
        """Seals the checkpoint that is being written; returns how many seconds saving took."""
        self._seconds = run.call_seconds

    def resume(self, caller: Caller, groups: Groups) -> dict[str, Any] | None:
        """Load the checkpoint that the run continues from; return the flow's state, or None.

        Each rank loads the state of its workers and verifies what it reads; waits for all ranks.
        The state also has "synced", the groups whose generator has the current weights.
        CheckpointError if a group has moved to other ranks or sizes and its class cannot load that,
        if a group is missing, or if a frozen model has changed.
        """
        info = self.resumed_from
        if info is None:
            return None
        by_rank = {}
        for name, group in groups.items():
            worker_class = group.target.worker_class
            if not loads_any_layout(worker_class):
                by_rank[name] = worker_class.__name__
        if moved := moved_groups(info, _layout(groups), by_rank):
            logger.info("saved on another layout, loaded box by box: %s", ", ".join(moved))
        synced = []
        for name, pending in _on_every_rank("load", info.folder, caller, groups).items():
            self._check_frozen(info, name, replies := pending.result())
            synced += [name] if any(reply["is_synced"] for reply in replies.values()) else []
        logger.info("continuing after step %s from %s", info.step, info.folder)
        return {**info.meta["flow"], "synced": synced}

    def has(self, step: int) -> bool:
        """Whether the latest checkpoint is of this step."""
        return self._checkpoints.has(step)

    def save(
        self,
        step: int,
        caller: Caller,
        groups: Groups,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Begin a checkpoint; a thread seals it while the run goes on, at the latest in `finish`.

        First waits for the previous checkpoint and raises its error. Does nothing if the latest
        checkpoint is already of this step. Each rank copies its state as its next call, and then
        writes the copy alongside later calls.
        state: the flow's. metrics: of the step; run.keep_best compares one of them.
        """
        self.due = False
        self.finish()
        if self._checkpoints.has(step):
            return
        started = time.monotonic()
        folder = self._checkpoints.begin(step)
        pending = {}
        _on_every_rank("save", folder, caller, groups)
        for name, group in groups.items():
            command = {"operation": "write", "group": name, "folder": str(folder / name)}
            commands = dict.fromkeys(group.target.layout.ranks, command)
            call = Call(0, FILES, f"{name}.write", commands, self._seconds, step=step)
            pending[name] = caller.transport.submit(call)
        meta = {
            "layout": _layout(groups),
            "flow": dict(state),
            "metric": self._best(metrics),
            "settings": self._settings,
            "models": self._models,
            "num_ranks": len(caller.ranks),
        }
        thread = ThreadPoolExecutor(1, "sealing")
        self._sealing = thread.submit(self._seal, step, started, meta, pending)
        thread.shutdown(wait=False)

    def _best(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """Return run.keep_best and its value in this step, for the manifest.

        None if it is not set, or, with a warning, if the step has no finite value of this metric.
        """
        if self._metric is None:
            return None
        value = metrics.get(self._metric.removeprefix("-"), nan)
        if isfinite(value):
            return self._metric, value
        logger.warning(
            "run.keep_best: got no value of %s in this step, expected one in each step that is "
            "saved; save in steps that have it (save_every=, eval_every=), or correct the name: %s",
            self._metric,
            ", ".join(sorted(metrics)),
        )
        return None

    def finish(self, *, wait: bool = True) -> None:
        """Wait until the checkpoint that is being written is sealed; raise its error if it failed.

        Does nothing if there is none. wait=False: does nothing either while it is still being
        written. Notes the duration of the longest save for `ending`.
        """
        sealing = self._sealing
        if sealing is not None and (wait or sealing.done()):
            self._sealing = None
            seconds = sealing.result()
            self.ending.save_seconds = max(self.ending.save_seconds, seconds)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """On leaving the context, also by an error, wait for the checkpoint that is being written.

        If the context ends by an error, that one is raised, and an error of the checkpoint is only
        logged. Otherwise the checkpoint's error is raised.
        """
        try:
            yield
        except BaseException:
            try:
                self.finish()
            except (CheckpointError, RunFailed) as err:
                logger.warning("the checkpoint that was being written is lost: %s", err)
            raise
        self.finish()

    def _seal(
        self, step: int, started: float, meta: dict[str, Any], pending: Mapping[str, Pending]
    ) -> float:
        """Wait until every rank has written, then seal the checkpoint.

        Runs in a thread of its own. Returns the seconds since `started`. First makes the metrics
        and samples written so far survive a power cut. Adds the ranks' frozen models to meta.
        CheckpointError if sealing fails.
        """
        replies = {}
        for name, each in pending.items():
            replies[name] = each.result()
        written = []
        for name, of_ranks in replies.items():
            for rank, reply in of_ranks.items():
                written.append(
                    RankReport(
                        rank,
                        reply["node"],
                        {
                            f"{name}/{file}": FileFacts(*facts)
                            for file, facts in reply["files"].items()
                        },
                    )
                )
        meta["frozen"] = {name: _frozen(of_ranks) for name, of_ranks in replies.items()}
        with error_context(f"saving step {step}"):
            sync_records(self._checkpoints.folder.parent)
            info = self._checkpoints.seal(step, meta, written)
        seconds = time.monotonic() - started
        logger.info("saved step %s to %s in %.1f s", step, info.folder, seconds)
        return seconds

    def _check_frozen(self, info: CheckpointInfo, name: str, replies: Replies) -> None:
        """Compare the frozen model of a group with that in the checkpoint, by hash.

        CheckpointError if it has changed, or only a warning with run.resume=reload_frozen. Also
        warns if the checkpoint, written by an earlier version, has no hash. Does nothing if no
        model is frozen.
        """
        now = _frozen(replies)
        then = info.meta.get("frozen", {}).get(name)
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


class NoSaving(Saving):
    """Writes and loads nothing: for a dry run, which may continue from the state of a run."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """state: the flow's part of a checkpoint; None: begin with the first step."""
        self._state = state
        self.ending = Ending(None, age=0.0)
        self.resumed_from = None
        self.due = False

    def resume(self, caller: Caller, groups: Groups) -> dict[str, Any] | None:
        """The state; no weights are loaded."""
        if self._state is None:
            return None
        return dict(self._state)

    def has(self, step: int) -> bool:
        """Nothing is saved."""
        return False

    def save(
        self,
        step: int,
        caller: Caller,
        groups: Groups,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Write nothing."""
        self.due = False

    def finish(self, *, wait: bool = True) -> None:
        """Nothing is being written."""


def _on_every_rank(
    operation: str, folder: Path, caller: Caller, groups: Groups
) -> dict[str, Pending]:
    """Send an operation to every rank of each group; return the pending replies by group.

    Does not wait. Each group has its own folder inside `folder`.
    """
    pending = {}
    for name, group in groups.items():
        command = {"operation": operation, "group": name, "folder": str(folder / name)}
        commands = {}
        for rank in group.target.layout.ranks:
            commands[rank] = dict(command)
        pending[name] = caller.submit(f"{name}.{operation}", commands)
    return pending


def verify_on_ranks(
    transport: Transport, ranks: tuple[int, ...], info: CheckpointInfo, *, seconds: float | None
) -> None:
    """Have the ranks check all files of a checkpoint; each reads a share of them. Waits for all.

    DamagedError, with the file, if one has changed. Otherwise ReadError if one cannot be read: it
    may be undamaged, so no older checkpoint is taken.
    The K-th rank reads the files rank-K.safetensors, because it loads them next if the layout is
    the one that saved. The other files are dealt out in turn.
    """
    shares: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    for number, (name, facts) in enumerate(sorted(info.files.items())):
        match = _RANK_FILE.search(name)
        position = int(match[1]) if match else number
        shares[ranks[position % len(ranks)]][name] = list(astuple(facts))
    where = {"operation": "verify", "folder": str(info.folder)}
    commands = {}
    for rank, files in shares.items():
        commands[rank] = where | {"files": files}
    call = Call(0, COMPUTE, "verify", commands, seconds)
    replies = transport.submit(call).result().values()
    for reply in replies:
        if reply["damage"] is not None:
            raise DamagedError(reply["damage"])
    for reply in replies:
        if reply["unreadable"] is not None:
            raise ReadError(reply["unreadable"])


def find_unseen_folders(
    transport: Transport, ranks: tuple[int, ...], folders: Sequence[str], *, seconds: float | None
) -> dict[str, list[int]]:
    """Return the folders that do not exist on some ranks, and these ranks; waits for all ranks."""
    command = {"operation": "find_folders", "folders": list(folders)}
    call = Call(0, COMPUTE, "find_folders", dict.fromkeys(ranks, command), seconds)
    unseen: dict[str, list[int]] = {}
    for rank, reply in transport.submit(call).result().items():
        for folder in reply["missing"]:
            unseen.setdefault(folder, []).append(rank)
    return unseen


def _frozen(replies: Replies) -> tuple[str, str] | None:
    """Return (folder, hash) of a group's frozen model, from the first reply that has one.

    None if no reply has one.
    """
    frozen = []
    for reply in replies.values():
        if reply["frozen"] is not None:
            frozen.append(reply["frozen"])
    if frozen:
        return (frozen[0][0], frozen[0][1])
    return None


def _layout(groups: Groups) -> dict[str, Any]:
    """Return the ranks, engine and parallel sizes of every group, as JSON data for the manifest."""
    sizes = ("pp_size", "dp_size", "tp_size", "shard_size")
    facts_by_group = {}
    for name, group in groups.items():
        layout = group.target.layout
        engine = getattr(group.target.settings, "engine", None)
        facts_by_group[name] = {
            "ranks": list(layout.ranks),
            "engine": getattr(engine, "kind", None),
        }
        facts_by_group[name] |= {size: getattr(layout, size) for size in sizes}
        if layout.expert_size > 1:
            facts_by_group[name]["expert_size"] = layout.expert_size
    return facts_by_group
