"""Measures one part of spmdflow: `python scripts/bench.py NAME [options] [--json FILE]`.

Every NAME is a file in scripts/bench/ with `add_arguments(parser)` and `measure(arguments)`,
which returns rows (dicts with the same keys) for the table and the JSON file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench._processor import processor_name

FOLDER = Path(__file__).parent / "bench"
ROOT = Path(__file__).parents[1]

Row = dict[str, Any]


def main() -> None:
    """Measure, print the table, write the JSON file."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: {Path(sys.argv[0]).name} {{{','.join(names)}}} [--help] [--json FILE]")
    name = sys.argv[1]
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(f"bench.{name}")
    parser = argparse.ArgumentParser(f"bench.py {name}", description=module.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    module.add_arguments(parser)
    arguments = parser.parse_args(sys.argv[2:])
    rows = module.measure(arguments)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(record(name, rows), indent=2) + "\n")


def table(rows: list[Row]) -> str:
    """Rows as text in columns."""
    names = list(rows[0])
    cells = [names] + [[text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def text(value: Any) -> str:
    """One cell."""
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def record(name: str, rows: list[Row]) -> dict[str, Any]:
    """What the JSON file holds: the rows, and where and when they were measured."""
    return {
        "bench": name,
        "command": " ".join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "cpu": processor_name(),
        "num_cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }


if __name__ == "__main__":
    main()
