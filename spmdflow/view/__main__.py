"""`python -m spmdflow.view RUN_DIR [RUN_DIR ...]`: write an HTML report of one or more runs.

The report is one file, RUN_DIR/view.html of the first run unless --out gives another path. It shows
the curves of all runs in the same plots, samples with their tokens, the timeline, predicted and
measured seconds, failures and settings. It needs no server and no network, and can be sent to
others. The page lists the files that a run lacks. With --follow the report is written again and
again until no run is live.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spmdflow.errors import ConfigError, SpmdflowError
from spmdflow.tracking.reading import FILES, RunFiles
from spmdflow.view.html import PAGE_FILE, write_page

FINE = 0
REFUSED = 2


def main(words: Sequence[str] | None = None) -> int:
    """Write the page and return the exit code: 0, or 2 if a folder has nothing to show.

    2 is also returned if the page cannot be written or plotly is missing. The error goes to stderr.
    With --follow, it returns when no run is live any more.
    """
    options = _parser().parse_args(words)
    path: Path = options.out or options.run_dirs[0] / PAGE_FILE
    try:
        for run_dir in options.run_dirs:
            _check_run_dir(run_dir)
        _write(options.run_dirs, path, every=options.every if options.follow else 0.0)
    except (SpmdflowError, OSError) as err:
        sys.stderr.write(f"{err}\n")
        return REFUSED
    return FINE


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Its help is the docstring of this module."""
    parser = argparse.ArgumentParser(prog="python -m spmdflow.view", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the page")
    parser.add_argument(
        "--follow", action="store_true", help="rewrite the page while a run is live"
    )
    parser.add_argument(
        "--every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="with --follow: seconds between two rewrites (10)",
    )
    return parser


def _check_run_dir(run_dir: Path) -> None:
    """Raise ConfigError if the folder has none of the files (or failures) that the page shows."""
    files = RunFiles(run_dir)
    if len(files.missing) == len(FILES) and not files.failures:
        if not run_dir.is_dir():
            got = "no folder"
        else:
            got = f"none of {', '.join(FILES)}"
        do = "give the folder that a run printed at its start"
        raise ConfigError.of(f"view: {run_dir}", got, "the files of a run", do)


def _write(run_dirs: Sequence[Path], path: Path, *, every: float) -> None:
    """Write the page every `every` seconds while any of the runs is live, then once more.

    every: 0 writes it once. Only pages written while a run is live reload themselves.
    """
    while every > 0 and any(RunFiles(run_dir).is_live for run_dir in run_dirs):
        _write_once(run_dirs, path, every)
        time.sleep(every)
    _write_once(run_dirs, path, 0.0)


def _write_once(run_dirs: Sequence[Path], path: Path, refresh_seconds: float) -> None:
    """Write the page, and print its path and size."""
    size = write_page(run_dirs, path, refresh_seconds=refresh_seconds)
    sys.stdout.write(f"view: {path} ({size / 1e6:.1f} MB)\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
