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
        """Remove RUN_DIR/finished durably (fsync), if it exists.

        Called when the run starts or continues to a later step. SpmdflowError if the disk fails.
        """
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
    """Create or continue RUN_DIR, and write config.yaml; only in the controller's process.

    Also repairs the export links. yaml_text: all settings, resolved; differences from an older
    config.yaml are logged, and the old file is kept under another name. lock: of the folder, if
    this process has it already; otherwise it is taken. verify: as in `find_newest_undamaged`.
    ConfigError if the folder cannot be written, is used while run.resume=never, has lost its
    checkpoints (unless run.resume=afresh), or is in use by a live run. CheckpointError if all
    checkpoints are damaged.
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


def finished_step(run: RunConfig, yaml_text: str) -> int | None:
    """Return the last step if RUN_DIR has a finished run with exactly these settings.

    None otherwise: it did not finish, has no checkpoint of that step, other settings, or must not
    be continued (run.resume). Such a run would build its models and do nothing. Reads files only.
    """
    path = path_of(run)
    if run.resume != "auto":
        return None
    try:
        step = int((path / FINISHED_FILE).read_text(encoding="utf-8").split()[1])
        checkpoint = find_latest(path)
        changed = compare_settings((path / "config.yaml").read_text(encoding="utf-8"), yaml_text)
    except (OSError, ValueError, IndexError, yaml.YAMLError, CheckpointError):
        return None
    if checkpoint is None or checkpoint.step != step or changed:
        return None
    return step


def compare_settings(old_yaml: str, new_yaml: str) -> list[str]:
    """Return "key: old -> new" for each setting that differs between two YAML texts.

    Keys are dotted. A missing setting counts as "(absent)". ValueError if a text is not a mapping,
    yaml.YAMLError if it is not YAML.
    """
    old, new = (_flat_settings(text) for text in (old_yaml, new_yaml))
    absent = "(absent)"
    result = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key, absent) != new.get(key, absent):
            result.append(f"{key}: {old.get(key, absent)} -> {new.get(key, absent)}")
    return result


def _flat_settings(text: str) -> dict[str, Any]:
    """Return all settings of a YAML text by dotted key; ValueError if it is not a mapping."""
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        raise ValueError(f"has a {type(settings).__name__} instead of a mapping of settings")
    return flat(settings)


def _write_config(path: Path, text: str, checkpoint: CheckpointInfo | None) -> None:
    """Write config.yaml, and log the differences from the previous start.

    An old file with other settings is kept as config.until-step-N.yaml, where N is the step of the
    checkpoint or 0. An old file that cannot be read is renamed to config.yaml.damaged. An equal
    file is not written again.
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
    """Return the first of PATH, PATH.2, PATH.3, ... that does not exist.

    A broken symlink counts as existing.
    """
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
    """Return the checkpoint in `latest`, or the newest sealed one if there is no `latest`.

    Checks the sizes of its files, but not their hashes. None if nothing was ever sealed.
    CheckpointError if `latest` names a folder that does not exist, or if the checkpoint is damaged;
    an older one is not tried. Looks again if a live run changes `latest` meanwhile.
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
    """Return (settings, number of ranks) of the run that wrote the checkpoint to resume from.

    Reads the one in `latest`, otherwise the newest with a readable manifest that has settings.
    Damage is not reported: loading does that. None if there is none.
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
    """Return the checkpoint in `latest` or, if that is damaged, the newest undamaged older one.

    Without `latest`: the newest undamaged one. Checked are manifest, sizes and verify(info), which
    raises DamagedError if hashes have changed. Damaged ones are logged as errors and renamed to
    NAME.damaged, so that they are not counted any more. None if nothing is sealed. CheckpointError
    if all are damaged; then nothing is renamed.
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
    """Log each problem as an error, and rename the damaged checkpoints to NAME.damaged.

    problems: name -> text; the name "latest" is only logged. newest: the checkpoint from which the
    run continues. CheckpointError if a rename fails.
    """
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
        """Remove unfinished checkpoints (.tmp, .trash) of a killed run; return their names, sorted.

        Call it once, before `begin`. CheckpointError if one cannot be removed.
        """
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
        """Create an empty folder checkpoints/step-N.tmp, into which all ranks write; return it.

        What an earlier attempt left there is removed. Call `seal` when all ranks have written.
        CheckpointError if the disk fails, or if RUN_DIR is not this run's any more.
        """
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
        """Make the files written since `begin(step)` the latest checkpoint, and return it.

        Waits until all files of `written` are visible here. Then in this order: manifest, rename to
        step-N, `latest`, export links, removal of old checkpoints. If the step is sealed already
        (because `latest` was set back by hand), the new folder is step-N.2. meta: JSON data;
        `manifest.moved_groups` compares meta["layout"]. CheckpointError if writing fails, if a
        rank's file is not visible, or if RUN_DIR is not this run's any more. The unsealed folder is
        then removed; `latest` and the old checkpoints stay.
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
        """Return the name of the checkpoint with the best value of the metric `best`.

        The best is the highest value, or the lowest if the metric's name starts with "-"; on a tie
        the first in `names`. Checkpoints with a damaged manifest or another metric are skipped.
        None if none is left, or without a metric.
        """
        values: dict[str, float] = {}
        for name in names if self._best else ():
            with suppress(CheckpointError):
                metric, value = read_manifest(self.folder / name).meta.get("metric") or ("", 0.0)
                if metric == self._best:
                    values[name] = -value if metric.startswith("-") else value
        return max(values, key=values.__getitem__, default=None)

    def _remove_old(self, latest: str) -> None:
        """Remove the checkpoints up to `latest`, except the newest `keep` and the best.

        Skips those from which a run reads a model now. Does not touch later steps, which exist if
        the run was set back. A folder that cannot be removed is only logged, because the new
        checkpoint is complete.
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
        """Rename a checkpoint to NAME.trash, so that it does not count any more, then delete it.

        An OSError is only logged.
        """
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
    """Return the content of the file `latest`, without whitespace; None if there is no such file.

    A folder of that name is logged and counts as none. ReadError if the file cannot be read for 5
    s. It is not checked that the named checkpoint exists.
    """
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
    """Point the symlink export/<role> at <role>/hugging_face of a sealed checkpoint, for each role.

    Links are relative, and each is replaced atomically. Links of roles without that folder stay. An
    OSError is only logged, because the checkpoint is complete without the links.
    """
    folder = run_dir / EXPORT
    try:
        make_folders(folder)  # the folder also marks that a checkpoint has been sealed here
        for path in folder.glob("*.tmp"):
            if path.is_symlink():  # a killed run had not renamed it yet
                path.unlink()
        for source in sorted(sealed.glob(f"*/{FOLDER}")):
            link = folder / source.parent.name
            temporary = folder / f"{source.parent.name}.tmp"
            temporary.symlink_to(os.path.relpath(source, folder), target_is_directory=True)
            temporary.replace(link)
        sync(folder)
    except OSError as err:
        logger.warning("warning: checkpoint: cannot link %s to %s: %s", folder, sealed, err)
