"""Model folders that a run reads: links are followed once, and what is read is not removed.

`RUN_DIR/export/<role>` of a live run names another checkpoint after each save. A run that reads a
model through such a link follows it once, on its first rank, and every rank reads the folder that
was found. A resumed run reads the folder that it began with.

A run holds a shared lock on the manifest of each checkpoint that it reads a model from, until it
ends. The run that wrote the checkpoint takes an exclusive lock before it removes it, and leaves it
alone if it cannot have one. The kernel drops the locks of a process that ends. On a file system
without locks nothing is held.
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
from spmdflow.config.location import named
from spmdflow.config.schema import ModelConfig
from spmdflow.errors import ConfigError

logger = logging.getLogger(__name__)

_ATTEMPTS = 20
"""How often a link is followed again, if what it names is just being removed."""

Missing = Callable[[Sequence[str]], Mapping[str, Sequence[int]]]
"""Folders -> those that some ranks do not see, and these ranks."""


class ModelFolders:
    """The model and tokenizer folders of a run's settings."""

    def __init__(self) -> None:
        self.followed: dict[str, list[str]] = {}
        """Setting -> [what was given, the folder that it led to], of those that were links."""
        self._held = ExitStack()
        self._locked: set[Path] = set()

    def follow(self, cfg: Any, before: Mapping[str, Sequence[str]], missing: Missing) -> Any:
        """Settings in which every link is replaced by the folder that it leads to now.

        Settings that give the same link get the same folder. cfg: of a script's settings class (Any
        for that); it is not changed. before: `followed` of the run that continues: a link that is
        given again leads to the same folder as then, if that is still there. missing: asks all
        ranks. ConfigError for a link to a checkpoint that is removed again and again.
        """
        found: dict[str, str] = {}
        for key, part, field in _places(cfg):
            given = getattr(part, field)
            if given not in found:
                found[given] = self._follow(key, given, before.get(key))
        changed = [folder for given, folder in found.items() if folder != given]
        if not changed:
            return cfg
        unseen = missing(changed)
        for folder, ranks in unseen.items():
            logger.warning(
                "warning: a model's link leads to %s here, which ranks %s do not see: every node "
                "follows the link itself, so do not change it while the run starts",
                folder,
                ", ".join(map(str, ranks)),
            )
        cfg = copy.deepcopy(cfg)
        for key, part, field in _places(cfg):
            given = getattr(part, field)
            folder = found[given]
            if folder == given or folder in unseen:
                continue
            setattr(part, field, folder)
            self.followed[key] = [given, folder]
        for given, folder in found.items():
            if folder != given and folder not in unseen:
                logger.info("%s is read from %s", given, folder)
        return cfg

    def release(self) -> None:
        """Let the checkpoints that were read be removed."""
        self._held.close()

    def _follow(self, key: str, given: str, before: Sequence[str] | None) -> str:
        """The folder that a path leads to; if it lies in a checkpoint, that is held."""
        if before is not None and before[0] == given:
            if Path(before[1]).is_dir() and self._hold(Path(before[1])):
                return before[1]
            logger.warning(
                "warning: %s: this run began with %s, which is gone; it goes on with what %s "
                "leads to now",
                key,
                before[1],
                given,
            )
        for _ in range(_ATTEMPTS):
            folder = _target(given)
            if self._hold(Path(folder)):
                return folder
        raise ConfigError(
            f"{key}: {given} leads to a checkpoint that is removed whenever this run begins to "
            f"read it; give a checkpoint that stays, or raise run.keep_checkpoints of the run that "
            f"writes it"
        )

    def _hold(self, folder: Path) -> bool:
        """Keep the checkpoint that a folder lies in, if it lies in one. False: it is removed."""
        checkpoint = _checkpoint_of(folder)
        if checkpoint is None or checkpoint in self._locked:
            return True
        try:
            manifest = os.open(checkpoint / NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return folder.is_dir()  # a copy of the model alone
        self._held.callback(os.close, manifest)
        try:
            fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as err:
            logger.warning("%s cannot be locked (%s): do not remove it", checkpoint, err)
        if not _is_at(manifest, checkpoint / NAME):
            return False
        self._locked.add(checkpoint)
        return True


@contextmanager
def held_for_removal(checkpoint: Path) -> Iterator[bool]:
    """Within the context no run begins to read a model of the checkpoint.

    Yields False if one reads it now.
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


def _places(cfg: Any) -> Iterator[tuple[str, Any, str]]:
    """(setting, its section, its field) of every model and tokenizer folder."""
    for key, part in parts_of(cfg, ModelConfig):
        yield f"{key}.path", part, "path"
    for key, section in parts_of(cfg, object):
        if getattr(section, "tokenizer_path", None):
            yield f"{key}.tokenizer_path", section, "tokenizer_path"


def _target(given: str) -> str:
    """Where a path leads, if a link is in it; a folder of the hub's cache stays as it is."""
    path = os.path.abspath(given)
    target = os.path.realpath(given)
    if target == path or not os.path.isdir(target) or named(given) != given:
        return given
    return target


def _checkpoint_of(folder: Path) -> Path | None:
    """The sealed checkpoint that a model's folder lies in; None: it lies in none."""
    checkpoint = folder.absolute().parent.parent
    if order_of(checkpoint.name) is None or checkpoint.parent.name != "checkpoints":
        return None
    return checkpoint


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
