"""`python -m spmdflow.view RUN_DIR [RUN_DIR ...]`: a page to look at runs, for a browser.

One HTML file, RUN_DIR/view.html (of the first run) unless --out names another: curves of all runs
over each other, samples with their tokens, timeline, predicted and measured seconds, failures,
settings. It needs no server and no network, and can be sent to others. Files that a run lacks are
named on the page. With --follow the page is written again until no run is live.
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
    """Write the page; exit code 2 if there is nothing to show."""
    options = _parser().parse_args(words)
    path: Path = options.out or options.run_dirs[0] / PAGE_FILE
    try:
        for run_dir in options.run_dirs:
            _check(run_dir)
        _write(options.run_dirs, path, every=options.every if options.follow else 0.0)
    except (SpmdflowError, OSError) as err:
        sys.stderr.write(f"{err}\n")
        return REFUSED
    return FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spmdflow.view", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page")
    parser.add_argument("--follow", action="store_true", help="write it again while a run is live")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="(10)")
    return parser


def _check(run_dir: Path) -> None:
    files = RunFiles(run_dir)
    if len(files.missing) == len(FILES) and not files.failures:
        if not run_dir.is_dir():
            got = "no folder"
        else:
            got = f"none of {', '.join(FILES)}"
        do = "give the folder that a run printed at its start"
        raise ConfigError.of(f"view: {run_dir}", got, "the files of a run", do)


def _write(run_dirs: Sequence[Path], path: Path, *, every: float) -> None:
    """Every so many seconds while a run is live (0: not at all), and once more at the end."""
    while every > 0 and any(RunFiles(run_dir).is_live for run_dir in run_dirs):
        _write_once(run_dirs, path, every)
        time.sleep(every)
    _write_once(run_dirs, path, 0.0)


def _write_once(run_dirs: Sequence[Path], path: Path, refresh_seconds: float) -> None:
    size = write_page(run_dirs, path, refresh_seconds=refresh_seconds)
    sys.stdout.write(f"view: {path} ({size / 1e6:.1f} MB)\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
