"""RUN_DIR: which folder a run uses, whether it may, and the settings it was started with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spmdflow.checkpoint.disk import write_atomically
from spmdflow.checkpoint.folder import find_latest
from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.checkpoint.manifest import CheckpointInfo
from spmdflow.config.location import run_dir_of
from spmdflow.config.schema import RunConfig
from spmdflow.errors import ConfigError

logger = logging.getLogger(__name__)

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

    @property
    def last_step(self) -> int:
        """Step up to which records are kept (`Tracker.cut_back`); -1 if the run starts afresh."""
        return self.checkpoint.step if self.checkpoint else -1


def path_of(run: RunConfig) -> Path:
    """RUN_DIR, absolute: run.dir, else runs/<run.name>."""
    return run_dir_of(run).absolute()


def open_run_dir(run: RunConfig, yaml_text: str) -> RunDir:
    """Make or continue RUN_DIR and write config.yaml; only the controller's process calls it.

    yaml_text: every setting, resolved (`config.load.Loaded.yaml_text`). With other settings than
    before, the differences are logged as a warning and the old file is kept beside the new one.
    ConfigError if the folder cannot be used, is used and run.resume is never, or a live run has
    it.
    """
    path = path_of(run)
    used = [mark for mark in _MARKS if (path / mark).exists()]
    if used and run.resume == "never":
        raise ConfigError(
            f"run.resume: never, but {path} holds {', '.join(used)} of an earlier run, expected "
            f"an unused folder; set run.name or run.dir to another, or run.resume=auto"
        )
    with _usable(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = RunDirLock(path)
    try:
        with _usable(path):
            checkpoint = find_latest(path)
            _write_config(path / "config.yaml", yaml_text, checkpoint)
    except BaseException:
        lock.release()
        raise
    return RunDir(path, checkpoint, lock)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ConfigError(
            f"run.dir: cannot use {path}: {err.strerror} ({err.filename}), expected a writable "
            f"folder; mend its rights or set run.dir"
        ) from err


def differences(old_yaml: str, new_yaml: str) -> list[str]:
    """One "key: old -> new" for each setting that differs; a setting of one side only is absent."""
    old, new = (dict(_leaves("", yaml.safe_load(text))) for text in (old_yaml, new_yaml))
    absent = "(absent)"
    return [
        f"{key}: {old.get(key, absent)} -> {new.get(key, absent)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, absent) != new.get(key, absent)
    ]


def _write_config(path: Path, text: str, checkpoint: CheckpointInfo | None) -> None:
    old = path.read_text(encoding="utf-8") if path.exists() else None
    if old is not None and (changed := differences(old, text)):
        step = checkpoint.step if checkpoint else 0
        kept = path.with_name(f"config.until-step-{step}.yaml")
        logger.warning(
            "%s continues with other settings: %s; the old ones are in %s",
            path.parent,
            "; ".join(changed),
            kept.name,
        )
        write_atomically(kept, old.encode())
    if old != text:
        write_atomically(path, text.encode())


def _leaves(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting; Any: YAML data."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        yield prefix, tree
