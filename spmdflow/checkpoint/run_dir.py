"""RUN_DIR: its path, the settings of the run, its checkpoints and exports.

The controller's process seals checkpoints. All ranks write into the folder that `begin` created, on
a file system that they share. The package's docstring has the order of the steps, and what remains
after a kill.

RUN_DIR/export/<role> always links to the Hugging Face folder of the newest checkpoint. It is a
stable path for another run's `actor.model.path`, an evaluation or a server. The link is relative,
so a RUN_DIR may be moved as a whole. It is replaced atomically, so after a kill it leads to the old
or the new folder. If a kill came between `latest` and the link, the next start repairs the link.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spmdflow.checkpoint.disk import (
    describe_disk_error,
    disk_errors,
    make_folders,
    read_patiently,
    sync,
    write_atomically,
)
from spmdflow.checkpoint.lock import RunDirLock, claim_run_dir
from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    DamagedError,
    RankReport,
    await_files,
    check_file_sizes,
    order_of,
    read_manifest,
    write_manifest,
)
from spmdflow.checkpoint.reading import lock_for_removal
from spmdflow.config.leaf import flat
from spmdflow.config.location import run_dir_of
from spmdflow.config.schema import RunConfig
from spmdflow.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

FINISHED_FILE = "finished"
"""In RUN_DIR after the last step. A run that stopped or failed has no such file."""
_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints")
"""A folder with one of these is a used RUN_DIR."""


@dataclass(frozen=True)
class RunDir:
    """An opened RUN_DIR."""

    path: Path
    checkpoint: CheckpointInfo | None
    """The run continues from it; None: the run starts at step 1."""
    lock: RunDirLock
    """Held until `lock.release()` or the end of the process."""

    def mark_finished(self, step: int) -> None:
        """Write RUN_DIR/finished durably, which distinguishes a finished run from a stopped one."""
        with disk_errors("write", self.path / FINISHED_FILE, "run.dir"):
            write_atomically(self.path / FINISHED_FILE, f"step {step}\n".encode())

    def mark_unfinished(self) -> None:
        """Remove RUN_DIR/finished durably, as the run starts or continues to a later step."""
        with disk_errors("remove", self.path / FINISHED_FILE, "run.dir"):
            if (self.path / FINISHED_FILE).exists():
                (self.path / FINISHED_FILE).unlink()
                sync(self.path)

    @property
    def last_step(self) -> int:
        """Step up to which records are kept (`Tracker`); -1 if the run starts from scratch."""
        if self.checkpoint:
            return self.checkpoint.step
        return -1


def path_of(run: RunConfig) -> Path:
    """The absolute path of RUN_DIR: run.dir, or else runs/<run.name>."""
    return run_dir_of(run).absolute()


def open_run_dir(
    run: RunConfig,
    yaml_text: str,
    *,
    lock: RunDirLock | None = None,
    verify: Callable[[CheckpointInfo], None] = lambda _: None,
) -> RunDir:
    """Create or continue RUN_DIR and write config.yaml; only for the controller's process.

    yaml_text: all settings, resolved. If they have changed, a warning lists the differences, and
    the old file is kept under another name. lock: of the folder, if this process has claimed it
    already; an error does not release it. verify: of `find_newest_undamaged`. ConfigError if the
    folder cannot be written, has an earlier run while run.resume=never, has lost its checkpoints,
    or is in use by a live run.
    """
    path = path_of(run)
    used = []
    for mark in _MARKS:
        if (path / mark).exists():
            used.append(mark)
    if used and run.resume == "never":
        raise ConfigError(
            f"run.resume: never, but {path} holds {', '.join(used)} of an earlier run, expected "
            f"an unused folder; set run.name or run.dir to another, or run.resume=auto"
        )
    run_lock = lock or claim_run_dir(path)
    try:
        checkpoint = find_newest_undamaged(path, verify)
        if checkpoint is not None:
            _link_exports(path, checkpoint.folder)
        elif (path / EXPORT).exists() and run.resume != "afresh":
            raise ConfigError(
                f"run.dir: got {path}, where an earlier run saved checkpoints that are gone, "
                f"expected them in {path / 'checkpoints'}; restore that folder, set run.resume="
                f"afresh to begin again at step 1, or set run.name or run.dir to another"
            )
        _write_config(path / "config.yaml", yaml_text, checkpoint)
    except BaseException as err:
        if lock is None:
            run_lock.release()
        if not isinstance(err, OSError):
            raise
        raise ConfigError(
            f"run.dir: cannot use {path}, expected a writable folder: "
            f"{describe_disk_error(err, path)}"
        ) from err
    return RunDir(path, checkpoint, run_lock)


def compare_settings(old_yaml: str, new_yaml: str) -> list[str]:
    """One "key: old -> new" for each setting that differs, with "(absent)" for a missing one."""
    old, new = (_flat_settings(text) for text in (old_yaml, new_yaml))
    absent = "(absent)"
    result = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key, absent) != new.get(key, absent):
            result.append(f"{key}: {old.get(key, absent)} -> {new.get(key, absent)}")
    return result


def _flat_settings(text: str) -> dict[str, Any]:
    """All settings by dotted key; ValueError if the YAML is not a mapping."""
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        raise ValueError(f"has a {type(settings).__name__} instead of a mapping of settings")
    return flat(settings)


def _write_config(path: Path, text: str, checkpoint: CheckpointInfo | None) -> None:
    """Write config.yaml, and log the differences from the previous start.

    Keeps an old file with other settings, or one that cannot be read, under another name.
    """
    old = None
    if path.exists():
        try:
            old = path.read_text(encoding="utf-8")
            changed = compare_settings(old, text)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as err:
            renamed = _free_name(path.with_name("config.yaml.damaged"))
            path.rename(renamed)
            logger.warning(
                "warning: %s cannot be read (%s); it is only a record, so the run continues with "
                "the settings of this start, and the old file is kept as %s",
                path,
                _first_line(err),
                renamed.name,
            )
            old = None
            changed = []
        if changed:
            step = checkpoint.step if checkpoint else 0
            before = path.with_name(f"config.until-step-{step}.yaml")
            if before.is_dir():
                before = _free_name(before)
            logger.warning(
                "warning: %s continues with changed settings: %s; the old ones are in %s",
                path.parent,
                "; ".join(changed),
                before.name,
            )
            write_atomically(before, (old or "").encode())
    if old != text:
        write_atomically(path, text.encode())


def _free_name(path: Path) -> Path:
    """The first of PATH, PATH.2, PATH.3, ... that does not exist."""
    candidate = path
    numbers = itertools.count(2)
    while os.path.lexists(candidate):
        candidate = path.with_name(f"{path.name}.{next(numbers)}")
    return candidate


def _first_line(err: BaseException) -> str:
    """The type of an error, and the first line of its message."""
    lines = str(err).splitlines() or [""]
    return f"{type(err).__name__}: {lines[0]}"[:200]


_TMP = ".tmp"
_TRASH = ".trash"


def find_latest(run_dir: Path) -> CheckpointInfo | None:
    """The checkpoint in `latest`, or the newest sealed one if there is no `latest`.

    Checks sizes, but not hashes (see `verify_files`). None if nothing was ever sealed.
    CheckpointError if the checkpoint in `latest` is missing or damaged.
    """
    folder = run_dir / "checkpoints"
    latest = _latest_or_none(folder)
    sealed = _sealed_names(folder)
    if latest is None and not sealed:
        return None
    name = latest or sealed[-1]
    if name not in sealed:
        if latest != _latest_or_none(folder):  # a live run has sealed another one in the meantime
            return find_latest(run_dir)
        raise CheckpointError(
            f"checkpoint: {folder / 'latest'} names {name!r}, expected one of {sealed}; "
            f"write one of these into it, or delete it for the newest"
        )
    info = read_manifest(folder / name)
    check_file_sizes(info)
    return info


def load_previous_settings(run_dir: Path) -> tuple[dict[str, Any], int] | None:
    """Settings and number of ranks of the run that wrote the checkpoint to resume from.

    Uses the newest checkpoint with a readable manifest; loading reports a damaged one. None if
    there is none, or if an older version wrote it.
    """
    folder = run_dir / "checkpoints"
    names = _sealed_names(folder)
    latest = _latest_or_none(folder)
    if latest in names:
        names.append(latest)
    for name in reversed(names):
        with suppress(CheckpointError):
            meta = read_manifest(folder / name).meta
            if "settings" in meta:  # older versions did not write them
                return yaml.safe_load(meta["settings"]), meta["num_ranks"]
    return None


def find_newest_undamaged(
    run_dir: Path, verify: Callable[[CheckpointInfo], None]
) -> CheckpointInfo | None:
    """The checkpoint in `latest` or, if that is damaged, the newest undamaged older one.

    verify: raises DamagedError for a checkpoint whose hashes have changed. Damaged checkpoints are
    logged as errors and renamed, so that they are not counted, loaded or removed any more. None if
    nothing is sealed. CheckpointError if all are damaged; then nothing is renamed.
    """
    folder = run_dir / "checkpoints"
    sealed = _sealed_names(folder)
    latest = _latest_or_none(folder)
    problems: dict[str, str] = {}
    if sealed and latest is not None and latest not in sealed:
        problems["latest"] = f"{folder / 'latest'} names {latest!r}, expected one of {sealed}"
    until = order_of(latest or "")
    older = []
    for name in sealed:
        if until is None or (order_of(name) or until) <= until:
            older.append(name)
    if older and len(older) < len(sealed):
        logger.warning(
            "warning: %s has %s, which is older than %s", folder / "latest", latest, sealed[-1]
        )
    for name in reversed(older or sealed):
        try:
            info = read_manifest(folder / name)
            check_file_sizes(info)
            verify(info)
        except DamagedError as err:
            problems[name] = str(err)
            continue
        _rename_damaged(folder, problems, newest=name)
        return info
    if problems:
        descriptions = "; ".join(problems.values())
        do = "restore one of them, or set run.name or run.dir to another"
        raise CheckpointError.of(
            "checkpoint", f"no undamaged checkpoint in {folder} ({descriptions})", "one", do
        )
    return None


def _rename_damaged(folder: Path, problems: Mapping[str, str], *, newest: str) -> None:
    """Rename damaged checkpoints to NAME.damaged, and log the problems."""
    for name, problem in problems.items():
        logger.error(
            "%s; THE RUN CONTINUES FROM %s, the newest undamaged checkpoint", problem, newest
        )
        if name == "latest":
            continue
        renamed = _free_name(folder / f"{name}.damaged")
        with disk_errors("rename", folder / name):
            (folder / name).rename(renamed)
        logger.error(
            "%s is kept as %s: rename it back once it is repaired, or delete it", name, renamed
        )


class Checkpoints:
    """The checkpoints of one run. Keeps the newest, the latest and the best, and ignores damaged
    ones."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        best: str | None = None,
        patience_seconds: float = 10.0,
        lock: RunDirLock | None = None,
    ) -> None:
        """keep: how many of the newest to keep. best: a metric; also keep the checkpoint with its
        highest value, or with the lowest for -NAME. patience_seconds: how long `seal` waits for the
        files of ranks on other nodes. lock: of RUN_DIR; `begin` and `seal` raise CheckpointError if
        RUN_DIR was deleted, renamed, or taken over by another run.
        """
        self._lock = lock
        assert keep >= 1, keep
        self.folder = run_dir / "checkpoints"
        self._keep = keep
        self._best = best
        self._patience_seconds = patience_seconds

    def clean(self) -> list[str]:
        """Remove unfinished checkpoints of a killed run; returns their names. Call it first,
        once."""
        left = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.endswith((_TMP, _TRASH)):
                left.append(path.name)
        for name in left:
            with disk_errors("remove", self.folder / name):
                _remove(self.folder / name)
        if left:
            logger.info("removed unfinished checkpoints of an earlier run: %s", sorted(left))
        return sorted(left)

    def begin(self, step: int) -> Path:
        """Create an empty folder into which all ranks write their files; call `seal` after that."""
        self._check_lock()
        unsealed = self.folder / f"step-{step}{_TMP}"
        with disk_errors("make", unsealed):
            _remove(unsealed)
            make_folders(unsealed)
        return unsealed

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check_held()

    def seal(
        self, step: int, meta: Mapping[str, Any], written: Iterable[RankReport]
    ) -> CheckpointInfo:
        """Make the files written since `begin(step)` the latest checkpoint, and remove old ones.

        meta: JSON data; `manifest.moved_groups` compares meta["layout"]. If the step is sealed
        already (because `latest` was set back by hand), the new folder is step-N.2. CheckpointError
        if writing fails, or if a rank's file is not visible here. The unsealed folder is then
        removed; `latest` and the old checkpoints stay.
        """
        self._check_lock()
        unsealed = self.folder / f"step-{step}{_TMP}"
        try:
            with disk_errors("seal", unsealed):
                files = await_files(unsealed, written, seconds=self._patience_seconds)
                write_manifest(unsealed, step, meta, files)
                for folder in (unsealed, *filter(Path.is_dir, unsealed.rglob("*"))):
                    sync(folder)
                sealed = self.folder / f"step-{step}"
                attempts = itertools.count(2)
                while sealed.exists():
                    sealed = self.folder / f"step-{step}.{next(attempts)}"
                unsealed.rename(sealed)
                sync(self.folder)
                sync(self.folder.parent)  # checkpoints/ itself may be new
                write_atomically(self.folder / "latest", sealed.name.encode() + b"\n")
        except CheckpointError:
            shutil.rmtree(unsealed, ignore_errors=True)
            raise
        _link_exports(self.folder.parent, sealed)
        self._remove_old(sealed.name)
        return read_manifest(sealed)

    def has(self, step: int) -> bool:
        """Whether the latest checkpoint is of this step, so that saving it again is useless."""
        latest = _latest_or_none(self.folder) or ""
        order = order_of(latest)
        return order is not None and order[0] == step and (self.folder / latest).is_dir()

    def _best_of(self, names: Iterable[str]) -> str | None:
        """Name of the checkpoint with the best value of the metric, the first if several have
        it."""
        values: dict[str, float] = {}
        for name in names if self._best else ():
            with suppress(CheckpointError):
                metric, value = read_manifest(self.folder / name).meta.get("metric") or ("", 0.0)
                if metric == self._best:
                    values[name] = -value if metric.startswith("-") else value
        return max(values, key=values.__getitem__, default=None)

    def _remove_old(self, latest: str) -> None:
        """Remove old checkpoints up to `latest`, except the newest and the best.

        Does not touch later steps, which exist if the run was set back. A folder that cannot be
        removed is only logged, because the new checkpoint is complete.
        """
        sealed = _sealed_names(self.folder)
        sealed = sealed[: sealed.index(latest) + 1]
        best = self._best_of(sealed)
        for name in sealed[: -self._keep]:
            if name == best:
                continue
            with lock_for_removal(self.folder / name) as is_free:
                if is_free:
                    self._remove_sealed(name)
                else:
                    logger.info(
                        "%s is not removed yet: a run reads a model from it", self.folder / name
                    )

    def _remove_sealed(self, name: str) -> None:
        """Rename a checkpoint, so that it does not count any more, and delete it."""
        trash = self.folder / (name + _TRASH)
        try:
            _remove(trash)
            (self.folder / name).rename(trash)
            _remove(trash)
        except OSError as err:
            logger.warning("warning: checkpoint: cannot remove %s: %s", self.folder / name, err)


def _sealed_names(folder: Path) -> list[str]:
    """Names of the sealed checkpoints, oldest step first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    ordered_names = [(order, name) for name in names if (order := order_of(name)) is not None]
    return [name for _, name in sorted(ordered_names)]


def _latest_or_none(folder: Path) -> str | None:
    """The content of `latest`; None if there is no such file, or a folder instead."""
    path = folder / "latest"
    try:
        return read_patiently(path, path.read_bytes).decode(errors="replace").strip()
    except OSError:  # it does not exist (`is_absent`)
        if path.is_dir():
            logger.warning("warning: %s is a folder instead of a file: ignored", path)
        return None


def _remove(path: Path) -> None:
    """Remove a file or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


EXPORT = "export"
FOLDER = "hugging_face"


def _link_exports(run_dir: Path, sealed: Path) -> None:
    """Point export/<role> at every <role>/hugging_face of a sealed checkpoint.

    An error is only logged, because the checkpoint is complete without the links. If a kill leaves
    older links, the next start repairs them.
    """
    folder = run_dir / EXPORT
    try:
        make_folders(folder)  # the folder also marks that a checkpoint has been sealed here
        for source in sorted(sealed.glob(f"*/{FOLDER}")):
            link = folder / source.parent.name
            temporary = folder / f"{source.parent.name}.tmp"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(os.path.relpath(source, folder), target_is_directory=True)
            temporary.replace(link)
        sync(folder)
    except OSError as err:
        logger.warning("warning: checkpoint: cannot link %s to %s: %s", folder, sealed, err)
