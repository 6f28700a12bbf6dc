"""`spmdflow clean`: removes from RUN_DIRs what only helped to look at something.

Weights, metrics, samples, settings and the report stay: a run resumes as before, and its curves can
still be drawn.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdflow.errors import ConfigError
from spmdflow.tracking.reading import RunFiles, RunState

KINDS = {
    "capsules": ("capsules/*", "replays/*"),
    "batches of guards": ("guards/*",),
    "operator profiles": ("profile/*",),
    "records of earlier starts": (
        "metrics.[0-9]*.jsonl",
        "samples.[0-9]*.jsonl",
        "calls.[0-9]*.jsonl",
        "throughput.[0-9]*.jsonl",
        "launches.[0-9]*.jsonl",
        "config.until-step-*.yaml",
        "config.yaml.damaged*",
    ),
    "stacks": ("stacks-rank*",),
}
"""Kind -> patterns of what is removed, in RUN_DIR."""
FINISHED = 0
REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove the files of `KINDS` from each RUN_DIR and print what was removed; return 0 or 2.

    Nothing is removed with --dry-run, or if a folder is no RUN_DIR or a run is live in it (2).
    arguments: default: sys.argv.
    """
    parser = argparse.ArgumentParser(
        prog="spmdflow clean",
        description="Remove capsules, saved batches, profiles, records of earlier starts and "
        "stacks from RUN_DIRs. Checkpoints, exports, metrics, samples and settings stay.",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    options = parser.parse_args(arguments)
    try:
        for run_dir in options.run_dirs:
            check_run_dir(run_dir)
    except ConfigError as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED
    for run_dir in options.run_dirs:
        sys.stdout.write(clean(run_dir, dry_run=options.dry_run))
    return FINISHED


def check_run_dir(run_dir: Path) -> None:
    """ConfigError unless the folder has a run that is not live."""
    state = RunFiles(run_dir).run_state
    if state is RunState.NONE:
        raise ConfigError.of("clean", str(run_dir), "a RUN_DIR", "correct the path")
    if state is RunState.LIVE:
        got = f"{run_dir}, where a run is live"
        raise ConfigError.of("clean", got, "a run that has ended", "wait for its end or stop it")


def clean(run_dir: Path, *, dry_run: bool) -> str:
    """Remove the files of `KINDS`; return a line for each kind that was there, and a total."""
    lines = []
    total = 0
    for kind, patterns in KINDS.items():
        paths = sorted(path for pattern in patterns for path in run_dir.glob(pattern))
        if not paths:
            continue
        size = sum(size_of(path) for path in paths)
        total += size
        lines.append(f"  {kind}: {len(paths)}, {size / 1e6:.1f} MB")
        if not dry_run:
            for path in paths:
                remove(path)
            _remove_empty_folders(run_dir, patterns)
    verb = "would remove" if dry_run else "removed"
    return "\n".join([f"{run_dir}: {verb} {total / 1e6:.1f} MB", *lines]) + "\n"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(size_of(each) for each in path.iterdir())


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_empty_folders(run_dir: Path, patterns: Sequence[str]) -> None:
    """Remove the folders of patterns such as capsules/* that are empty now."""
    for pattern in patterns:
        folder, slash, _ = pattern.partition("/")
        if slash and (run_dir / folder).is_dir() and not any((run_dir / folder).iterdir()):
            (run_dir / folder).rmdir()


if __name__ == "__main__":
    sys.exit(main())
