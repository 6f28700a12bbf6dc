"""The tables of docs/FAMILIES.md, between its marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.learn.curves import write_page as write_between_marks
from scripts.records import Record


def write_page(page: Path, records: Sequence[Record]) -> None:
    """Write the table of families, and what is refused or fails and why."""
    write_between_marks(
        page, {"families": "\n".join(_table(records)), "refused": "\n".join(_refusals(records))}
    )


def _table(records: Sequence[Record]) -> list[str]:
    """A line for each family, a column for each engine with a generator."""
    ways = list(dict.fromkeys(record["name"].split("-", 1)[1] for record in records))
    heads = [way.replace("-", ", ") for way in ways]
    lines = [f"| family | rows | {' | '.join(heads)} |", "|---" * (len(ways) + 2) + "|"]
    by_name = {record["name"]: record for record in records}
    for family in dict.fromkeys(record["name"].split("-", 1)[0] for record in records):
        cells = []
        packed = False
        for way in ways:
            record = by_name.get(f"{family}-{way}", {"state": "-"})
            packed = packed or (record["state"] == "ran" and record["packed"])
            cells.append(_cell(record))
        rows = "packed" if packed else "padded"
        lines.append(f"| {family} | {rows} | {' | '.join(cells)} |")
    return lines


def _cell(record: Record) -> str:
    """The mismatch of a case that ran, otherwise its state."""
    if record["state"] == "ran":
        return f"{record['mismatch']:.0e}"
    return str(record["state"])


def _refusals(records: Sequence[Record]) -> list[str]:
    """A line for each case that did not run: the case, and the message."""
    lines = ["| case | message |", "|---|---|"]
    for record in records:
        if record["state"] != "ran":
            text = record["text"].replace("|", "/").replace("\n", " ")
            lines.append(f"| {record['name']} | {text[:400]} |")
    return lines
