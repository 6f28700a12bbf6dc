"""Checkpoints of given files, written as ranks write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    Written,
    check_file_sizes,
    verify_files,
    write_part,
)


def write_as_rank(folder: Path, files: Mapping[str, bytes], *, rank: int = 0) -> Written:
    """What a rank says that wrote these files into an unsealed checkpoint."""

    def write(own: Path) -> None:
        for name, data in files.items():
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_bytes(data)

    return Written(rank, f"node-of-{rank}", write_part(folder, rank, write))


def verify_checkpoint(info: CheckpointInfo) -> None:
    """Sizes and hashes of all files, as resumed ranks check them together."""
    check_file_sizes(info)
    verify_files(info.folder, info.files)
