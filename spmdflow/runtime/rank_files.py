"""What a rank does with files: save and load its workers, verify checkpoints.

Saving has two parts: `save`, on the compute lane, copies; `write`, on the files lane, writes the
copies beside what follows.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

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


class RankFiles:
    """Operations on files of one rank, by the name that commands use."""

    def __init__(self, workers: Mapping[str, Worker], arrival: RowCondition, *, rank: int) -> None:
        """workers: of the rank, by name. arrival: is woken after each command."""
        self._workers = workers
        self._arrival = arrival
        self._rank = rank
        self._frozen: dict[str, tuple[str, str]] = {}
        self._unwritten: dict[str, Callable[[], None] | None] = {}

    def operations(self) -> dict[str, Callable[[Plain, int], dict[str, Any]]]:
        """As `RankState.operations`."""
        return {
            "save": self._save,
            "write": self._write,
            "verify": self._verify,
            "find_folders": self._find_folders,
            "load": self._load,
        }

    def hash_frozen(self, name: str) -> None:
        """Note folder and hash of a worker's model, if it is frozen."""
        folder = self._workers[name].frozen_folder
        if folder is not None:
            self._frozen[name] = (str(folder), model_hash(folder))

    def _save(self, plain: Plain, number: int) -> dict[str, Any]:
        name = plain["group"]
        own = make_rank_folder(Path(plain["folder"]), self._rank)
        self._unwritten[name] = self._workers[name].save_state(own)
        return {}

    def _write(self, plain: Plain, number: int) -> dict[str, Any]:
        """The reply is what this rank wrote: the checkpoint is sealed from it."""
        name = plain["group"]
        folder = Path(plain["folder"])
        self._arrival.wait(lambda: name in self._unwritten)
        write = self._unwritten.pop(name)
        if write is not None:
            write()
        facts = move_rank_files(folder, make_rank_folder(folder, self._rank))
        self._workers[name].export_state(
            folder, own := make_rank_folder(folder, self._rank), self._wait_for
        )
        facts |= move_rank_files(folder, own)
        files = {}
        for file, each in facts.items():
            files[file] = list(astuple(each))
        return {"node": socket.gethostname(), "files": files, "frozen": self._frozen.get(name)}

    def _wait_for(self, paths: list[Path]) -> None:
        """Return when all files are there; the limit of the command bounds the wait."""
        while not all(path.exists() for path in paths):
            self._arrival.wait_until(lambda: False, _LOOK_SECONDS)

    def _verify(self, plain: Plain, number: int) -> dict[str, Any]:
        """Read a share of a checkpoint's files: what of them has changed or cannot be read."""
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
        """The folders that this rank does not see."""
        return {"missing": [path for path in plain["folders"] if not Path(path).is_dir()]}

    def _load(self, plain: Plain, number: int) -> dict[str, Any]:
        worker = self._workers[plain["group"]]
        worker.load_state(Path(plain["folder"]))
        is_synced = getattr(worker, "is_synced", False)
        return {"frozen": self._frozen.get(plain["group"]), "is_synced": is_synced}
