"""A simulated power cut: what of a folder is left if only what was synced is on the disk.

`RecordedDisk` watches the calls that change a folder (open, write, fsync, rename, mkdir, unlink,
symlink) while the real calls go on. It knows what the disk holds for certain, by the rules of
POSIX:

- a file's bytes are on the disk once that file was fsynced, as they were then;
- a name in a folder is on the disk once that folder was fsynced, as the folder was then;
- a rename, a new file or a removal is nothing but names: the folder has to be fsynced.

What was not synced may be on the disk or not, each piece by itself: a file system may write any of
it early. `Moment.build` makes one of the folders that a cut could leave.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CALLS = (
    *("open", "write", "fsync", "fdatasync", "rename", "replace", "link", "symlink"),
    *("mkdir", "rmdir", "unlink", "remove", "truncate", "ftruncate"),
)
"""Functions of os that change a folder, or make a change last."""


Piece = tuple[int, str | None]
"""A name in the folder of an inode, or (None) the bytes of the file of an inode."""


@dataclass(frozen=True)
class Entry:
    """What a name in a folder stands for."""

    kind: str
    """"file", "folder" or "link"."""
    inode: int
    target: str = ""
    """Of a link."""


@dataclass(frozen=True)
class Snapshot:
    """Everything below a folder: names of each folder and bytes of each file, by inode."""

    folders: dict[int, dict[str, Entry]]
    files: dict[int, bytes]


@dataclass(frozen=True)
class Moment:
    """A moment at which the power may be cut."""

    root: int
    """Inode of the folder that is watched."""
    seen: Snapshot
    """What programs see."""
    certain: Snapshot
    """What is on the disk for certain."""

    def unsynced(self) -> list[Piece]:
        """The pieces of which a cut may leave any: names in folders, and bytes of files."""
        pieces: list[Piece] = []
        for inode, seen in self.seen.folders.items():
            certain = self.certain.folders.get(inode, {})
            names = sorted({*certain, *seen})
            pieces += [(inode, name) for name in names if certain.get(name) != seen.get(name)]
        for inode, data in self.seen.files.items():
            if self.certain.files.get(inode, b"") != data:
                pieces.append((inode, None))
        return pieces

    def build(self, to: Path, kept: Collection[Piece]) -> None:
        """Make the folder `to` as a cut may leave it. kept: pieces that were not synced and are
        there all the same."""
        self._build_folder(self.root, to, kept)

    def _build_folder(self, inode: int, folder: Path, kept: Collection[Piece]) -> None:
        folder.mkdir()
        certain = self.certain.folders.get(inode, {})
        seen = self.seen.folders.get(inode, certain)
        for name in sorted({*certain, *seen}):
            entry = seen.get(name) if (inode, name) in kept else certain.get(name)
            if entry is None:
                continue
            if entry.kind == "folder":
                self._build_folder(entry.inode, folder / name, kept)
            elif entry.kind == "link":
                (folder / name).symlink_to(entry.target)
            else:
                (folder / name).write_bytes(self._bytes_of(entry.inode, kept))

    def _bytes_of(self, inode: int, kept: Collection[Piece]) -> bytes:
        if (inode, None) in kept:
            return self.seen.files[inode]
        return self.certain.files.get(inode, b"")


class RecordedDisk:
    """The folder `root` and what of it is on the disk for certain. `record` starts watching."""

    def __init__(self, root: Path) -> None:
        """root: what is below it now counts as on the disk."""
        self.root = root
        self.calls: list[tuple[str, str]] = []
        """(function, last part of its path) of each call that was watched, in order."""
        self._lock = threading.RLock()
        self._pins: dict[int, int] = {}
        before = self._snapshot()
        self._folders = dict(before.folders)
        self._files = dict(before.files)

    @contextmanager
    def record(self, before_call: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Watch this process's calls; before_call runs before each of them and starts no thread."""
        depth = threading.local()

        def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def watch(*args: Any, **kwargs: Any) -> Any:
                if getattr(depth, "inside", False):
                    return call(*args, **kwargs)
                depth.inside = True
                try:
                    with self._lock:
                        before_call()
                        result = call(*args, **kwargs)
                        self.calls.append((name, _name_of(args[0])))
                        if name in ("fsync", "fdatasync"):
                            self._note_sync(args[0])
                    return result
                finally:
                    depth.inside = False

            return watch

        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, watched(name, getattr(os, name)))
            opened = watched("open", io.open)
            patch.setattr(io, "open", opened)
            patch.setattr("builtins.open", opened)
            yield

    def moment(self) -> Moment:
        """What a cut now would find."""
        with self._lock:
            certain = Snapshot(dict(self._folders), dict(self._files))
            return Moment(self.root.stat().st_ino, self._snapshot(), certain)

    def _snapshot(self) -> Snapshot:
        """Everything below root as programs see it now."""
        folders: dict[int, dict[str, Entry]] = {}
        files: dict[int, bytes] = {}
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            inode = self._pin(folder)
            folders[inode] = self._entries(folder)
            for name, entry in folders[inode].items():
                if entry.kind == "folder":
                    waiting.append(folder / name)
                elif entry.kind == "file":
                    files[entry.inode] = (folder / name).read_bytes()
        return Snapshot(folders, files)

    def close(self) -> None:
        """Let go of what was watched."""
        for descriptor in self._pins.values():
            os.close(descriptor)
        self._pins.clear()

    def _note_sync(self, descriptor: int) -> None:
        facts = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(facts.st_mode):
            self._pin(path)
            self._folders[facts.st_ino] = self._entries(path)
        else:
            self._pin(path)
            self._files[facts.st_ino] = path.read_bytes()

    def _entries(self, folder: Path) -> dict[str, Entry]:
        entries = {}
        for item in os.scandir(folder):
            path = folder / item.name
            if item.is_symlink():
                entries[item.name] = Entry(
                    "link", self._pin(path, os.O_NOFOLLOW), os.readlink(path)
                )
            elif item.is_dir():
                entries[item.name] = Entry("folder", self._pin(path))
            else:
                entries[item.name] = Entry("file", self._pin(path))
        return entries

    def _pin(self, path: Path, flags: int = 0) -> int:
        """The inode of a path, which no other file gets as long as it is watched."""
        descriptor = os.open(path, os.O_PATH | flags)
        inode = os.fstat(descriptor).st_ino
        if inode in self._pins:
            os.close(descriptor)
        else:
            self._pins[inode] = descriptor
        return inode


def _name_of(path: Any) -> str:
    if isinstance(path, int):
        try:
            path = os.readlink(f"/proc/self/fd/{path}")
        except OSError:
            return str(path)
    return os.path.basename(os.fspath(path)) if isinstance(path, str | os.PathLike) else str(path)
