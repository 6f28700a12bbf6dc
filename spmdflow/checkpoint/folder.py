"""`Checkpoints`: RUN_DIR/checkpoints, where a folder appears whole or not at all.

One process seals (the controller's); every rank writes into the folder that `begin` made, on a
file system they share. Order of the steps and what a kill leaves: the room's docstring.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.disk import disk_errors, sync, write_atomically
from spmdflow.checkpoint.export import link_exports
from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    FileFacts,
    check_sizes,
    order_of,
    read_manifest,
    write_manifest,
)
from spmdflow.checkpoint.written import Written, seen_files
from spmdflow.errors import CheckpointError

logger = logging.getLogger(__name__)

_TMP, _TRASH = ".tmp", ".trash"


def find_latest(run_dir: Path) -> CheckpointInfo | None:
    """The checkpoint that `latest` names, or the newest sealed one if there is no `latest`.

    Sizes are checked, hashes are not (`manifest.verify`). None if nothing was ever sealed;
    CheckpointError if what `latest` names is missing or damaged.
    """
    folder = run_dir / "checkpoints"
    sealed, name = _sealed(folder), _latest_or_none(folder)
    if name is None and not sealed:
        return None
    name = name or sealed[-1]
    if name not in sealed:
        raise CheckpointError(
            f"checkpoint: {folder / 'latest'} names {name!r}, expected one of {sealed}; "
            f"write one of these into it, or delete it for the newest"
        )
    info = read_manifest(folder / name)
    check_sizes(info)
    return info


class Checkpoints:
    """The checkpoints of one run; keeps the newest `keep` and never removes the latest."""

    def __init__(self, run_dir: Path, *, keep: int, patience_seconds: float = 10.0) -> None:
        """patience_seconds: how long `seal` waits for files that ranks of other nodes wrote."""
        assert keep >= 1, keep
        self.folder = run_dir / "checkpoints"
        self._keep, self._patience_seconds = keep, patience_seconds

    def clean(self) -> list[str]:
        """Remove what a killed run left half done; returns the names. Call once, at start."""
        left = [
            path.name
            for path in (self.folder.iterdir() if self.folder.is_dir() else ())
            if path.name.endswith((_TMP, _TRASH))
        ]
        for name in left:
            with disk_errors("remove", self.folder / name):
                _remove(self.folder / name)
        if left:
            logger.info("removed unfinished checkpoints of an earlier run: %s", sorted(left))
        return sorted(left)

    def begin(self, step: int) -> Path:
        """An empty folder into which every rank writes its files; then `seal` or `discard`."""
        unsealed = self._unsealed(step)
        with disk_errors("make", unsealed):
            _remove(unsealed)
            unsealed.mkdir(parents=True)
        return unsealed

    def seal(
        self, step: int, meta: Mapping[str, Any], written: Iterable[Written]
    ) -> CheckpointInfo:
        """Make what ranks wrote since `begin(step)` the latest checkpoint, then remove old ones.

        meta: JSON data; meta["layout"] is what `manifest.check_layout` compares. A step that is
        sealed already (a run set back by hand) gets a new folder, step-N.2. CheckpointError if
        the disk refuses or a file that a rank wrote is not seen here: the unsealed folder is
        removed, `latest` stays as it was and no old checkpoint is removed.
        """
        unsealed = self._unsealed(step)
        try:
            with disk_errors("seal", unsealed):
                files = seen_files(unsealed, written, seconds=self._patience_seconds)
                sealed = self._seal(unsealed, step, meta, files)
        except CheckpointError:
            shutil.rmtree(unsealed, ignore_errors=True)
            raise
        link_exports(self.folder.parent, sealed)
        self._remove_old(sealed.name)
        return read_manifest(sealed)

    def discard(self, step: int) -> None:
        """Remove the unsealed folder of a checkpoint that failed."""
        with disk_errors("remove", self._unsealed(step)):
            _remove(self._unsealed(step))

    def has(self, step: int) -> bool:
        """Whether the latest checkpoint is of this step: saving it again changes nothing."""
        place = order_of(_latest_or_none(self.folder) or "")
        return place is not None and place[0] == step

    def _unsealed(self, step: int) -> Path:
        return self.folder / f"step-{step}{_TMP}"

    def _seal(
        self, unsealed: Path, step: int, meta: Mapping[str, Any], files: Mapping[str, FileFacts]
    ) -> Path:
        write_manifest(unsealed, step, meta, files)
        for folder in (unsealed, *filter(Path.is_dir, unsealed.rglob("*"))):
            sync(folder)
        sealed = self.folder / _free_name(self.folder, step)
        unsealed.rename(sealed)
        sync(self.folder)
        write_atomically(self.folder / "latest", sealed.name.encode() + b"\n")
        return sealed

    def _remove_old(self, latest: str) -> None:
        """Remove all but the newest up to `latest`; later steps (a run set back) are left alone.

        The run has its checkpoint already, so a folder that resists is only reported.
        """
        sealed = _sealed(self.folder)
        for name in sealed[: max(0, sealed.index(latest) + 1 - self._keep)]:
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
    path = folder / "latest"
    with disk_errors("read", path):
        return path.read_bytes().decode(errors="replace").strip() if path.exists() else None


def _free_name(folder: Path, step: int) -> str:
    attempt, name = 1, f"step-{step}"
    while (folder / name).exists():
        attempt += 1
        name = f"step-{step}.{attempt}"
    return name


def _remove(path: Path) -> None:
    """Remove a file or a folder with all it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
