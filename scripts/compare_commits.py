"""Compares two commits: `python scripts/compare_commits.py {bits,plans,files,speed} [options]`.

    bits    three PPO steps on 12 layouts: every metric and every weight, bit for bit
    plans   the plan of every script and recipe in algos/, as JSON
    files   a checkpoint and a capsule of the old commit, continued and replayed by the new one
    speed   calls, transfers and training steps of both, alternately; needs an idle machine

The old commit (--old) is checked out into a temporary git worktree. The new one is this working
tree as it is, or the commit of --new. Both run with this Python and its packages. The comparison
needs no GPU and no network. It exits with 1 if anything differs, or if a ratio of `speed` is above
its limit, and otherwise with 0.

Each comparison is a file of scripts/compare/ with `add_arguments(parser)` and
`compare(arguments, old, new, folder)`, which prints progress and returns the rows of the table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from compare.checkout import ROOT, Checkout, check_out, check_package, describe_working_tree

NAMES = ("bits", "plans", "files", "speed")
BEFORE = "a7143a0e"
"""The last commit before calls became single values: the default of --old."""

Row = dict[str, Any]


def main() -> int:
    """Run a comparison, print its table, and return the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: compare_commits.py {{{','.join(NAMES)}}} [--help]")
    name = sys.argv[1]
    module = importlib.import_module(f"compare.{name}")
    parser = argparse.ArgumentParser(f"compare_commits.py {name}", description=module.__doc__)
    parser.add_argument("--old", default=BEFORE, metavar="COMMIT", help=f"default: {BEFORE}")
    parser.add_argument("--new", metavar="COMMIT", help="default: this working tree as it is")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep runs and logs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    module.add_arguments(parser)
    arguments = parser.parse_args(sys.argv[2:])
    signal.signal(signal.SIGTERM, _exit)  # so that worktrees and programs are removed
    with _working_folder(arguments.keep) as folder, check_out(arguments.old) as old:
        if arguments.new is None:
            rows = _compare(module, arguments, old, describe_working_tree(ROOT), folder)
        else:
            with check_out(arguments.new) as new:
                rows = _compare(module, arguments, old, new, folder)
    print(format_table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["result"] not in module.PASSED for row in rows))


def _compare(
    module: ModuleType, arguments: argparse.Namespace, old: Checkout, new: Checkout, folder: Path
) -> list[Row]:
    """The rows of a comparison, once it is certain that each side runs its own spmdflow."""
    print(f"old: {old.text}\nnew: {new.text}", flush=True)
    check_package(old)
    check_package(new)
    return module.compare(arguments, old, new, folder)


def format_table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as text in columns."""
    lines = [list(rows[0])]
    for row in rows:
        lines.append([format_cell(value) for value in row.values()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths)]
        texts.append("  ".join(cells).rstrip())
    texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)


def format_cell(value: Any) -> str:
    """A cell of the table."""
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


@contextmanager
def _working_folder(kept: Path | None) -> Iterator[Path]:
    """The folder of runs and logs: a temporary one, unless the user wants to keep it."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="spmdflow-compare-") as folder:
        yield Path(folder)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
