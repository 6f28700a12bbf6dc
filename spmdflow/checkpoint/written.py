"""What a rank wrote into a checkpoint, by its own word, and whether the sealing process sees it.

A rank writes below a folder of its own first, so that what lies there is what it wrote, whatever
its role writes. Nodes that do not share RUN_DIR each have files that the others lack: a checkpoint
is made of what the ranks say, and is refused if one of these files cannot be seen.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spmdflow.checkpoint.disk import disk_errors
from spmdflow.checkpoint.manifest import FileFacts, facts_of, file_names
from spmdflow.errors import CheckpointError

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Written:
    """The files that one rank says it wrote."""

    rank: int
    node: str
    """Host name of the rank."""
    files: Mapping[str, FileFacts]
    """By name relative to the checkpoint's folder."""


def write_part(folder: Path, rank: int, write: Callable[[Path], None]) -> dict[str, FileFacts]:
    """Have write(empty folder) write this rank's files, then move them into folder.

    Returns size and hash of each, by name relative to folder; they are synced. CheckpointError if
    the disk refuses.
    """
    own = folder / f".rank-{rank}"
    with disk_errors("make", own):
        own.mkdir(parents=True)
    write(own)
    with disk_errors("write", folder):
        files = facts_of(own)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (own / name).replace(folder / name)
        for emptied in sorted((own, *own.rglob("*")), reverse=True):
            emptied.rmdir()
    return files


def seen_files(folder: Path, written: Iterable[Written], *, seconds: float) -> dict[str, FileFacts]:
    """All files that ranks wrote into folder, once they are seen here with their sizes.

    Waits at most `seconds` for a network file system to show them. CheckpointError naming rank,
    node and file if one cannot be seen, if two ranks wrote one, or if nobody wrote one.
    """
    owners: dict[str, Written] = {}
    for part in written:
        for name in part.files:
            if name in owners:
                raise CheckpointError(
                    f"checkpoint: got {folder / name} from rank {owners[name].rank} and from rank "
                    f"{part.rank}, expected each file from one rank; put the rank into the names "
                    f"of the files that save_state writes"
                )
            owners[name] = part
    files = {name: owner.files[name] for name, owner in owners.items()}
    limit = time.monotonic() + seconds
    while (unseen := _unseen(folder, files)) and time.monotonic() < limit:
        time.sleep(_LOOK_SECONDS)
    if unseen:
        raise _not_shared(folder, unseen, owners)
    for name in sorted(set(file_names(folder)) - set(files)):
        raise CheckpointError(
            f"checkpoint: got {folder / name}, which no rank says it wrote, expected only the "
            f"files of the ranks; let nothing but save_state write there"
        )
    return files


def _unseen(folder: Path, files: Mapping[str, FileFacts]) -> dict[str, int | None]:
    """Files that are not there with their size -> the size they have; None: not there."""
    for place in {(folder / name).parent for name in files}:
        if place.is_dir():
            os.listdir(place)  # NFS: asks the server again
    sizes = {name: _size(folder / name) for name in files}
    return {name: size for name, size in sizes.items() if size != files[name].num_bytes}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _not_shared(
    folder: Path, unseen: Mapping[str, int | None], owners: Mapping[str, Written]
) -> CheckpointError:
    name, size = next(iter(unseen.items()))
    owner = owners[name]
    there = "no such file" if size is None else f"{size} bytes"
    return CheckpointError(
        f"checkpoint: got {there} at {folder / name} as seen from node {socket.gethostname()}, "
        f"expected the {owner.files[name].num_bytes} bytes that rank {owner.rank} wrote there on "
        f"node {owner.node} ({len(unseen)} of {len(owners)} files are not seen): RUN_DIR is not "
        f"one folder that every node shares; set run.dir to a shared folder"
    )
