"""Model folders that a run reads: resolves links once, and protects the folders from removal.

`RUN_DIR/export/<role>` of a live run links to another checkpoint after each save. A run that reads
a model through such a link resolves it once, on its first rank, and all ranks read that folder. A
resumed run reads the folder with which it began.

Until it ends, a run holds a shared lock on the manifest of each checkpoint from which it reads a
model. The run that wrote the checkpoint removes it only if it gets an exclusive lock. The kernel
releases the locks of a process that ends. On a file system without locks there is no protection.
"""

from __future__ import annotations

import copy
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.manifest import NAME, order_of
from spmdflow.config.leaf import parts_of
from spmdflow.config.location import name_cached_folders
from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError

logger = logging.getLogger(__name__)

_ATTEMPTS = 20
"""How often to resolve a link again whose target is just being removed."""

Missing = Callable[[Sequence[str]], Mapping[str, Sequence[int]]]
"""Function from folders to those that some ranks do not see -> these ranks."""


class ModelFolders:
    """The model and tokenizer folders of a run's settings."""

    def __init__(self) -> None:
        """No links are resolved and no checkpoints are locked yet."""
        self.resolved_links: dict[str, list[str]] = {}
        """Setting -> [its value, the folder to which it led], of the values that were links."""
        self._locks = ExitStack()
        self._locked_checkpoints: set[Path] = set()

    def resolve_links(self, cfg: Any, before: Mapping[str, Sequence[str]], missing: Missing) -> Any:
        """Return a copy of cfg with links to models and tokenizers replaced by their folders.

        Returns cfg itself if there is no link. Locks the checkpoints of the folders, and records
        the links in `resolved_links`. The same link gives the same folder in all settings. before:
        `resolved_links` of the run that continues; an unchanged link leads to the same folder as
        then if that still exists. missing: asks all ranks; a link to a folder that some ranks do
        not see is logged and not replaced. ConfigError for a link to a checkpoint that is removed
        again and again.
        """
        folder_of_path: dict[str, str] = {}
        for key, part, field in _folder_settings(cfg):
            path = getattr(part, field)
            if path not in folder_of_path:
                folder_of_path[path] = self._resolve_and_lock(key, path, before.get(key))
        changed = [folder for path, folder in folder_of_path.items() if folder != path]
        if not changed:
            return cfg
        unseen = missing(changed)
        for folder, ranks in unseen.items():
            logger.warning(
                "warning: a model's link leads to %s here, which ranks %s do not see: every node "
                "resolves the link itself, so do not change it while the run starts",
                folder,
                ", ".join(map(str, ranks)),
            )
        cfg = copy.deepcopy(cfg)
        for key, part, field in _folder_settings(cfg):
            path = getattr(part, field)
            folder = folder_of_path[path]
            if folder == path or folder in unseen:
                continue
            setattr(part, field, folder)
            self.resolved_links[key] = [path, folder]
        for path, folder in folder_of_path.items():
            if folder != path and folder not in unseen:
                logger.info("reading %s from %s", path, folder)
        return cfg

    def hold(self, folder: Path) -> bool:
        """Lock the checkpoint that contains a folder, until `release`; False if it is gone."""
        return folder.is_dir() and self._lock_checkpoint(folder)

    def release(self) -> None:
        """Release the locks, so that the checkpoints may be removed."""
        self._locks.close()

    def _resolve_and_lock(self, key: str, path: str, before: Sequence[str] | None) -> str:
        """Return the folder to which a path leads; lock the checkpoint that contains it, if any.

        before: (path, folder) of the run that continues; that folder is returned if the path is the
        same and the folder still exists, otherwise a warning is logged. ConfigError after 20
        attempts that each found a checkpoint that is being removed. key: the setting, for messages.
        """
        if before is not None and before[0] == path:
            if Path(before[1]).is_dir() and self._lock_checkpoint(Path(before[1])):
                return before[1]
            logger.warning(
                "warning: %s: this run began with %s, which is gone; it continues with the folder "
                "to which %s leads now",
                key,
                before[1],
                path,
            )
        for _ in range(_ATTEMPTS):
            folder = _resolve_link(path)
            if self._lock_checkpoint(Path(folder)):
                return folder
        raise ConfigError(
            f"{key}: {path} leads to a checkpoint that is removed whenever this run begins to "
            f"read it; give a checkpoint that stays, or raise run.keep_checkpoints of the run that "
            f"writes it"
        )

    def _lock_checkpoint(self, folder: Path) -> bool:
        """Lock the checkpoint that contains a folder; return False if it is being removed.

        The lock is shared with other readers, and `release` unlocks it. Returns True without a lock
        if folder is not in a checkpoint, if it is locked already, or if the file system has no
        locks (logged). Without a manifest it returns whether folder exists.
        """
        checkpoint = _checkpoint_of(folder)
        if checkpoint is None or checkpoint in self._locked_checkpoints:
            return True
        try:
            manifest = os.open(checkpoint / NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return folder.is_dir()  # a copy of the model without the checkpoint
        self._locks.callback(os.close, manifest)
        try:
            fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as err:
            logger.warning("warning: %s cannot be locked (%s): do not remove it", checkpoint, err)
        if not _is_at(manifest, checkpoint / NAME):
            return False
        self._locked_checkpoints.add(checkpoint)
        return True


@contextmanager
def hold_checkpoint(folder: Path) -> Iterator[bool]:
    """Keep the checkpoint that contains a folder while the context lasts.

    Yields False if it has been removed, or is being removed. On a file system without locks it is
    not protected.
    """
    folders = ModelFolders()
    try:
        yield folders.hold(folder)
    finally:
        folders.release()


@contextmanager
def lock_for_removal(checkpoint: Path) -> Iterator[bool]:
    """Yield whether a checkpoint may be removed: False if a run reads a model from it now.

    If it may, an exclusive lock on its manifest prevents that a run begins to read it within the
    context. Without a manifest or without locks in the file system: True.
    """
    try:
        manifest = os.open(checkpoint / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no run can read it, or nobody can lock it
        yield True
        return
    try:
        is_free = True
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:  # a file system without locks
            pass
        yield is_free
    finally:
        os.close(manifest)


def _folder_settings(cfg: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, section, field) of each setting with a model or tokenizer folder.

    These are `path` of each `ModelConfig`, then each tokenizer_path that is set.
    """
    for key, part in parts_of(cfg, ModelConfig):
        yield f"{key}.path", part, "path"
    for key, section in parts_of(cfg, object):
        if getattr(section, "tokenizer_path", None):
            yield f"{key}.tokenizer_path", section, "tokenizer_path"


def _resolve_link(path: str) -> str:
    """Return the real path of a folder whose path contains a symlink; any other path unchanged.

    Also unchanged if it leads to no folder, or is in the hub's cache, whose links do not change.
    """
    absolute = os.path.abspath(path)
    target = os.path.realpath(path)
    if target == absolute or not os.path.isdir(target) or name_cached_folders(path) != path:
        return path
    return target


def _checkpoint_of(folder: Path) -> Path | None:
    """Return the sealed checkpoint that contains a model's folder; None if none does.

    Recognised by the form .../checkpoints/step-N/<group>/<folder>. Symlinks are not resolved.
    """
    checkpoint = folder.absolute().parent.parent
    if order_of(checkpoint.name) is None or checkpoint.parent.name != "checkpoints":
        return None
    return checkpoint


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
