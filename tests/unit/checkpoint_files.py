"""Checkpoints of given files, written as ranks write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spmdflow.checkpoint.manifest import (
    CheckpointInfo,
    RankReport,
    check_file_sizes,
    make_rank_folder,
    move_rank_files,
    verify_files,
)
from spmdflow.checkpoint.run_dir import Checkpoints


def write_as_rank(folder: Path, files: Mapping[str, bytes], *, rank: int = 0) -> RankReport:
    """What a rank says that wrote these files into an unsealed checkpoint."""
    own = make_rank_folder(folder, rank)
    for name, data in files.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(data)
    return RankReport(rank, f"node-of-{rank}", move_rank_files(folder, own))


def seal_settings(run_dir: Path, settings: str, *, num_ranks: int) -> None:
    """A sealed checkpoint that a run with these settings wrote; `latest` is lost."""
    checkpoints = Checkpoints(run_dir, keep=1)
    meta = {"settings": settings, "num_ranks": num_ranks}
    written = write_as_rank(checkpoints.begin(1), {"flow.json": b"{}"})
    checkpoints.seal(1, meta, [written])
    (checkpoints.folder / "latest").unlink()


def verify_checkpoint(info: CheckpointInfo) -> None:
    """Sizes and hashes of all files, as resumed ranks check them together."""
    check_file_sizes(info)
    verify_files(info.folder, info.files)
