"""RUN_DIR: which folder a run uses, the settings it was started with, its checkpoints and exports.

One process seals checkpoints (the controller's); every rank writes into the folder that `begin`
made, on a file system they share. Order of the steps, and what a kill leaves: see the package.

RUN_DIR/export/<role> is always the Hugging Face folder of the newest checkpoint: a stable path for
another run's `actor.model.path`, an evaluation, a server. It is a relative symbolic link, so a
RUN_DIR may be moved as a whole. The link is replaced in one operation: it names the old or the new
folder, also after a kill. If the kill came between `latest` and the link, the next start mends it.
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
    Written,
    check_file_sizes,
    order_of,
    read_manifest,
    seen_files,
    write_manifest,
)
from spmdflow.checkpoint.reading import held_for_removal
from spmdflow.config.leaf import flat
from spmdflow.config.location import run_dir_of
from spmdflow.config.schema import RunConfig
from spmdflow.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

FINISHED_FILE = "finished"
"""In RUN_DIR from the last step on. A run that stopped or failed has none."""
_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints")
"""A folder that holds one of these is a used RUN_DIR."""


@dataclass(frozen=True)
class RunDir:
    """An opened RUN_DIR."""

    path: Path
    checkpoint: CheckpointInfo | None
    """What the run continues from; None: step 1 is the first."""
    lock: RunDirLock
    """Held until `lock.release()` or the end of the process."""

    def mark_finished(self, step: int) -> None:
        """Say durably that the run is done: RUN_DIR/finished tells finished from stopped."""
        with disk_errors("write", self.path / FINISHED_FILE, "run.dir"):
            write_atomically(self.path / FINISHED_FILE, f"step {step}\n".encode())

    def mark_unfinished(self) -> None:
        """Say durably that the run is not done (yet): it begins, or goes on to a later step."""
        with disk_errors("remove", self.path / FINISHED_FILE, "run.dir"):
            if (self.path / FINISHED_FILE).exists():
                (self.path / FINISHED_FILE).unlink()
                sync(self.path)

    @property
    def last_step(self) -> int:
        """Step up to which records are kept (`Tracker`); -1 if the run starts afresh."""
        if self.checkpoint:
            return self.checkpoint.step
        return -1


def path_of(run: RunConfig) -> Path:
    """RUN_DIR, absolute: run.dir, else runs/<run.name>."""
    return run_dir_of(run).absolute()


def open_run_dir(
    run: RunConfig,
    yaml_text: str,
    *,
    lock: RunDirLock | None = None,
    verify: Callable[[CheckpointInfo], None] = lambda _: None,
) -> RunDir:
    """Make or continue RUN_DIR and write config.yaml; only the controller's process calls it.

    yaml_text: every setting, resolved. With other settings than before, the differences are logged
    as a warning and the old file is kept beside the new one. lock: of the folder, if this process
    has claimed it already; it stays held after an error. verify: of `newest_whole`. ConfigError
    if the folder cannot be written, holds an earlier run while run.resume=never, had checkpoints
    that are gone, or is in use by a live run.
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
    held = lock or claim_run_dir(path)
    try:
        checkpoint = newest_whole(path, verify)
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
            held.release()
        if not isinstance(err, OSError):
            raise
        raise ConfigError(
            f"run.dir: cannot use {path}, expected a writable folder: "
            f"{describe_disk_error(err, path)}"
        ) from err
    return RunDir(path, checkpoint, held)


def differences(old_yaml: str, new_yaml: str) -> list[str]:
    """One "key: old -> new" for each setting that differs; "(absent)": that side lacks it."""
    old, new = (_flat_settings(text) for text in (old_yaml, new_yaml))
    absent = "(absent)"
    result = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key, absent) != new.get(key, absent):
            result.append(f"{key}: {old.get(key, absent)} -> {new.get(key, absent)}")
    return result


def _flat_settings(text: str) -> dict[str, Any]:
    """Every setting by its dotted key; ValueError if the YAML is no map."""
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"holds a {type(found).__name__}, no map of settings")
    return flat(found)


def _write_config(path: Path, text: str, checkpoint: CheckpointInfo | None) -> None:
    """Write config.yaml, and tell what differs from the last start's.

    The file is only a record: one that cannot be read is kept under another name.
    """
    old = None
    if path.exists():
        try:
            old = path.read_text(encoding="utf-8")
            changed = differences(old, text)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as err:
            kept = _free_name(path.with_name("config.yaml.damaged"))
            path.rename(kept)
            logger.warning(
                "warning: %s cannot be read (%s); it is only a record, so the run goes on with the "
                "settings of this start, and the old file is kept as %s",
                path,
                _first_line(err),
                kept.name,
            )
            old = None
            changed = []
        if changed:
            step = checkpoint.step if checkpoint else 0
            before = path.with_name(f"config.until-step-{step}.yaml")
            if before.is_dir():
                before = _free_name(before)
            logger.warning(
                "%s continues with other settings: %s; the old ones are in %s",
                path.parent,
                "; ".join(changed),
                before.name,
            )
            write_atomically(before, (old or "").encode())
    if old != text:
        write_atomically(path, text.encode())


def _free_name(path: Path) -> Path:
    """The path, or the first of PATH.2, PATH.3, ... at which there is nothing yet."""
    found = path
    numbers = itertools.count(2)
    while os.path.lexists(found):
        found = path.with_name(f"{path.name}.{next(numbers)}")
    return found


def _first_line(err: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    lines = str(err).splitlines() or [""]
    return f"{type(err).__name__}: {lines[0]}"[:200]


_TMP = ".tmp"
_TRASH = ".trash"


def find_latest(run_dir: Path) -> CheckpointInfo | None:
    """The checkpoint that `latest` names, or the newest sealed one if there is no `latest`.

    Sizes are checked, hashes are not (`verify_files`). None if nothing was ever sealed;
    CheckpointError if what `latest` names is missing or damaged.
    """
    folder = run_dir / "checkpoints"
    latest = _latest_or_none(folder)
    sealed = _sealed(folder)
    if latest is None and not sealed:
        return None
    name = latest or sealed[-1]
    if name not in sealed:
        if latest != _latest_or_none(folder):  # a live run has sealed another one meanwhile
            return find_latest(run_dir)
        raise CheckpointError(
            f"checkpoint: {folder / 'latest'} names {name!r}, expected one of {sealed}; "
            f"write one of these into it, or delete it for the newest"
        )
    info = read_manifest(folder / name)
    check_file_sizes(info)
    return info


def settings_before(run_dir: Path) -> tuple[dict[str, Any], int] | None:
    """Settings and number of ranks of the run that wrote the checkpoint to resume from, else None.

    Of the newest one with a readable manifest: one that is damaged is named by who loads it.
    """
    folder = run_dir / "checkpoints"
    names = _sealed(folder)
    latest = _latest_or_none(folder)
    if latest in names:
        names.append(latest)
    for name in reversed(names):
        with suppress(CheckpointError):
            meta = read_manifest(folder / name).meta
            if "settings" in meta:  # of an older version: they have none
                return yaml.safe_load(meta["settings"]), meta["num_ranks"]
    return None


def newest_whole(run_dir: Path, verify: Callable[[CheckpointInfo], None]) -> CheckpointInfo | None:
    """The checkpoint that `latest` names or, if it is damaged, the newest older one that is whole.

    verify: raises DamagedError for a checkpoint whose hashes are not as sealed. A damaged one is
    logged as an error and renamed, so that nothing counts, continues from or removes it. None if
    nothing is sealed; CheckpointError if no whole one is left (then nothing is renamed).
    """
    folder = run_dir / "checkpoints"
    sealed = _sealed(folder)
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
        logger.warning("%s names %s, older than %s", folder / "latest", latest, sealed[-1])
    for name in reversed(older or sealed):
        try:
            info = read_manifest(folder / name)
            check_file_sizes(info)
            verify(info)
        except DamagedError as err:
            problems[name] = str(err)
            continue
        _set_aside(folder, problems, whole=name)
        return info
    if problems:
        found = "; ".join(problems.values())
        do = "restore one of them, or set run.name or run.dir to another"
        raise CheckpointError.of("checkpoint", f"no whole one in {folder} ({found})", "one", do)
    return None


def _set_aside(folder: Path, problems: Mapping[str, str], *, whole: str) -> None:
    """Rename damaged checkpoints to NAME.damaged, and say so."""
    for name, problem in problems.items():
        logger.error("%s; THE RUN CONTINUES FROM %s, the newest whole one", problem, whole)
        if name == "latest":
            continue
        kept = _free_name(folder / f"{name}.damaged")
        with disk_errors("rename", folder / name):
            (folder / name).rename(kept)
        logger.error(
            "%s is kept as %s: rename it back once it is repaired, or delete it", name, kept
        )


class Checkpoints:
    """The checkpoints of one run: keeps the newest, the latest and the best; counts and removes
    no damaged one."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        best: str | None = None,
        patience_seconds: float = 10.0,
        lock: RunDirLock | None = None,
    ) -> None:
        """keep: number of the newest. best: also the one with the highest value of a metric, of
        -NAME the lowest. patience_seconds: how long `seal` waits for files that ranks of other
        nodes wrote. lock: of RUN_DIR: `begin` and `seal` raise CheckpointError if it was deleted,
        renamed, or is another run's by then."""
        self._lock = lock
        assert keep >= 1, keep
        self.folder = run_dir / "checkpoints"
        self._keep = keep
        self._best = best
        self._patience_seconds = patience_seconds

    def clean(self) -> list[str]:
        """Remove unfinished checkpoints of a killed run; returns their names. Call once, first."""
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
        """Make an empty folder into which every rank writes its files; then call `seal`."""
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
        self, step: int, meta: Mapping[str, Any], written: Iterable[Written]
    ) -> CheckpointInfo:
        """Make what ranks wrote since `begin(step)` the latest checkpoint, then remove old ones.

        meta: JSON data; meta["layout"] is what `manifest.moved_groups` compares. A step that is
        sealed already (`latest` was set back by hand) gets a new folder, step-N.2. CheckpointError
        if writing fails or a file that a rank wrote is not seen here: the unsealed folder is
        removed, `latest` stays as it was and no old checkpoint is removed.
        """
        self._check_lock()
        unsealed = self.folder / f"step-{step}{_TMP}"
        try:
            with disk_errors("seal", unsealed):
                files = seen_files(unsealed, written, seconds=self._patience_seconds)
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
        """Whether the latest checkpoint is of this step: saving it again changes nothing."""
        latest = _latest_or_none(self.folder) or ""
        place = order_of(latest)
        return place is not None and place[0] == step and (self.folder / latest).is_dir()

    def _best_of(self, names: Iterable[str]) -> str | None:
        """The checkpoint with the best value of the metric; of equals the first."""
        values: dict[str, float] = {}
        for name in names if self._best else ():
            with suppress(CheckpointError):
                metric, value = read_manifest(self.folder / name).meta.get("metric") or ("", 0.0)
                if metric == self._best:
                    values[name] = -value if metric.startswith("-") else value
        return max(values, key=values.__getitem__, default=None)

    def _remove_old(self, latest: str) -> None:
        """Remove all but the newest up to `latest`; later steps (a run set back) are left alone.

        The run has its checkpoint already, so a folder that cannot be removed is only logged.
        """
        sealed = _sealed(self.folder)
        sealed = sealed[: sealed.index(latest) + 1]
        best = self._best_of(sealed)
        for name in sealed[: -self._keep]:
            if name == best:
                continue
            with held_for_removal(self.folder / name) as is_free:
                if is_free:
                    self._remove_sealed(name)
                else:
                    logger.info("%s stays for now: a run reads a model of it", self.folder / name)

    def _remove_sealed(self, name: str) -> None:
        trash = self.folder / (name + _TRASH)
        try:
            _remove(trash)
            (self.folder / name).rename(trash)
            _remove(trash)
        except OSError as err:
            logger.warning("checkpoint: cannot remove %s: %s", self.folder / name, err)


def _sealed(folder: Path) -> list[str]:
    """Names of the sealed checkpoints, oldest step first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [(order, name) for name in names if (order := order_of(name)) is not None]
    return [name for _, name in sorted(found)]


def _latest_or_none(folder: Path) -> str | None:
    """The content of `latest`; None if there is no such file (a folder of that name is none)."""
    path = folder / "latest"
    try:
        return read_patiently(path, path.read_bytes).decode(errors="replace").strip()
    except OSError:  # there is none (`is_absent`)
        if path.is_dir():
            logger.warning("warning: %s is a folder, expected a file with a name: ignored", path)
        return None


def _remove(path: Path) -> None:
    """Remove a file or a folder with all it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


EXPORT = "export"
FOLDER = "hugging_face"


def _link_exports(run_dir: Path, sealed: Path) -> None:
    """Point export/<role> at every <role>/hugging_face of a sealed checkpoint.

    The checkpoint is complete without them, so an error is only logged. A killed save may have
    left older links: the next start mends them.
    """
    folder = run_dir / EXPORT
    try:
        make_folders(folder)  # also says that a checkpoint has been sealed here
        for source in sorted(sealed.glob(f"*/{FOLDER}")):
            link = folder / source.parent.name
            beside = folder / f"{source.parent.name}.tmp"
            beside.unlink(missing_ok=True)
            beside.symlink_to(os.path.relpath(source, folder), target_is_directory=True)
            beside.replace(link)
        sync(folder)
    except OSError as err:
        logger.warning("checkpoint: cannot link %s to %s: %s", folder, sealed, err)
