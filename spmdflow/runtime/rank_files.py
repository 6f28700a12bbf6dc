"""File operations of a rank: save and load its workers, verify checkpoints.

Saving has two parts. `save`, on the compute lane, copies the state. `write`, on the files lane,
writes the copies while the compute lane continues.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

from spmdflow.checkpoint.manifest import (
    DamagedError,
    FileFacts,
    make_rank_folder,
    move_rank_files,
    verify_files,
)
from spmdflow.checkpoint.tensors import model_hash
from spmdflow.data.store import RowCondition
from spmdflow.errors import ReadError
from spmdflow.worker_api.worker import Worker

Plain = Mapping[str, Any]
_LOOK_SECONDS = 0.05


class MakeRoom(Protocol):
    """Lets all workers of the rank but `name` free device memory (`Worker.make_room`)."""

    def __call__(self, name: str, *, trains: bool) -> None: ...


class RankFiles:
    """File operations of one rank."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        arrival: RowCondition,
        *,
        rank: int,
        make_room: MakeRoom,
    ) -> None:
        """workers: those of the rank, by name. arrival: notified after each command.

        make_room: called before a worker's state is copied or loaded.
        """
        self._workers = workers
        self._arrival = arrival
        self._rank = rank
        self._make_room = make_room
        self._frozen: dict[str, tuple[str, str]] = {}
        self._unwritten: dict[str, Callable[[], None] | None] = {}

    def operations(self) -> dict[str, Callable[[Plain, int], dict[str, Any]]]:
        """The operations by the name that commands use, as in `RankState.operations`."""
        return {
            "save": self._save,
            "write": self._write,
            "verify": self._verify,
            "find_folders": self._find_folders,
            "load": self._load,
        }

    def hash_frozen(self, name: str) -> None:
        """Remember the folder and hash of a worker's model if it is frozen."""
        folder = self._workers[name].frozen_folder
        if folder is not None:
            self._frozen[name] = (str(folder), model_hash(folder))

    def _save(self, plain: Plain, number: int) -> dict[str, Any]:
        """Copy the state of worker plain["group"], for `_write` to write while training continues.

        Creates the rank's folder in plain["folder"]. A worker may also write its state here at
        once. Empty reply.
        """
        name = plain["group"]
        self._make_room(name, trains=False)
        rank_folder = make_rank_folder(Path(plain["folder"]), self._rank)
        self._unwritten[name] = self._workers[name].save_state(rank_folder)
        return {}

    def _write(self, plain: Plain, number: int) -> dict[str, Any]:
        """Write what `_save` copied, and export the worker's model, into a checkpoint's folder.

        Waits for `_save`. Files are written to the rank's own folder, then fsynced and moved into
        plain["folder"]. Replies with the host name, each file's size and hash (for the manifest),
        and (folder, hash) of the frozen model or None. CheckpointError if the disk fails.
        """
        name = plain["group"]
        folder = Path(plain["folder"])
        self._arrival.wait(lambda: name in self._unwritten)
        write = self._unwritten.pop(name)
        if write is not None:
            write()
        facts = move_rank_files(folder, make_rank_folder(folder, self._rank))
        rank_folder = make_rank_folder(folder, self._rank)
        self._workers[name].export_state(folder, rank_folder, self._wait_for)
        facts |= move_rank_files(folder, rank_folder)
        files = {}
        for file, each in facts.items():
            files[file] = list(astuple(each))
        return {"node": socket.gethostname(), "files": files, "frozen": self._frozen.get(name)}

    def _wait_for(self, paths: list[Path]) -> None:
        """Wait until all files exist. The command's time limit bounds the wait."""
        while not all(path.exists() for path in paths):
            self._arrival.wait_until(lambda: False, _LOOK_SECONDS)

    def _verify(self, plain: Plain, number: int) -> dict[str, Any]:
        """Read files of a checkpoint completely, and compare them with their sizes and hashes.

        plain["files"]: name -> fields of `FileFacts`. Replies with the error text under "damage"
        (contents differ) or "unreadable" (the file system fails); both are None if all is well.
        Raises neither error.
        """
        files = {}
        for name, facts in plain["files"].items():
            files[name] = FileFacts(*facts)
        try:
            verify_files(Path(plain["folder"]), files)
        except DamagedError as err:
            return {"damage": str(err), "unreadable": None}
        except ReadError as err:
            return {"damage": None, "unreadable": str(err)}
        return {"damage": None, "unreadable": None}

    def _find_folders(self, plain: Plain, number: int) -> dict[str, Any]:
        """Reply with the folders that do not exist on this rank."""
        return {"missing": [path for path in plain["folders"] if not Path(path).is_dir()]}

    def _load(self, plain: Plain, number: int) -> dict[str, Any]:
        """Load a worker's state from a checkpoint's folder.

        Replies with (folder, hash) of its frozen model, or None, and with whether its generator has
        the trained weights ("is_synced", False for workers without that attribute).
        """
        worker = self._workers[plain["group"]]
        self._make_room(plain["group"], trains=False)
        worker.load_state(Path(plain["folder"]))
        is_synced = getattr(worker, "is_synced", False)
        return {"frozen": self._frozen.get(plain["group"]), "is_synced": is_synced}
