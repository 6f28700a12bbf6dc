"""How long each file of tests takes, which decides the order in which they begin.

tests/seconds.json holds the seconds of every file that takes longer than a second. Files that
take longest begin first, so that no worker begins a long one when the others have nothing left.
A file that is new or has changed is in a wrong place until the table is written anew, which does
no harm:

    scripts/test.sh --junitxml default.xml
    scripts/test.sh -m "drill and not slow" --junitxml drills.xml
    .venv/bin/python tests/seconds.py default.xml drills.xml
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

TABLE = Path(__file__).with_suffix(".json")
SHORTEST = 1.0
"""Seconds of a file that is worth a line."""


def read_table() -> dict[str, float]:
    """Path of a file, from the root of the checkout -> its seconds."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def seconds_of(report: Path) -> Counter[str]:
    """Path of a file -> the seconds of its tests and fixtures in a report in JUnit's format."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[path] += float(case.attrib["time"])
    return seconds


def main(reports: Sequence[str]) -> None:
    """Write the table: what the reports say together."""
    total: Counter[str] = Counter()
    for report in reports:
        total += seconds_of(Path(report))
    table = {path: round(total[path], 1) for path in sorted(total) if total[path] > SHORTEST}
    TABLE.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
