"""What scripts share that run the cases of a table: command line, records on disk, causes.

A record is what one case measured: a dict of JSON values with a "name".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""Any: JSON values."""


def table_parser(description: str | None, runs: Path) -> argparse.ArgumentParser:
    """The options that all such scripts have. runs: default folder of the runs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="groups, or patterns of names (default: all)")
    parser.add_argument("--again", action="store_true", help="run what is done, too")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--runs", type=Path, default=runs)
    return parser


def read_records(file: Path) -> dict[str, Record]:
    """The records in a file, by name; none if there is no file."""
    records = {}
    if file.is_file():
        for record in json.loads(file.read_text(encoding="utf-8")):
            records[record["name"]] = record
    return records


def write_records(file: Path, records: dict[str, Record], names: Iterable[str]) -> None:
    """Write the records of these names, a line each, in their order."""
    lines = []
    for name in names:
        if name in records:
            lines.append(json.dumps(records[name]))
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def cause_in(log: str) -> str:
    """The line of a run's output that says what failed or was refused; else the last lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("spmdflow: ", "RUN FAILED")):
            return line
    return "\n".join(lines[-5:])
