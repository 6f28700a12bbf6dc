"""Trains every family of models with every engine and generator, and writes docs/FAMILIES.md.

    python scripts/family_table.py                       # everything that is not done yet
    python scripts/family_table.py qwen3_moe*            # cases by name
    python scripts/family_table.py --again gemma*        # also what is done
    python scripts/family_table.py --page                # only the page

A case is two GRPO steps of a tiny random model on two ranks (scripts/families). docs/lab/
families.json has what is done, a line each. Two cases run at a time. Exit code 1 if one failed;
settings that are refused are no failure: the page says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # scripts/ has packages that would hide this project's

from scripts.families.page import write_page  # noqa: E402
from scripts.families.run import Case, Record, perform  # noqa: E402
from scripts.families.tiny import FAMILIES  # noqa: E402

STATE = ROOT / "docs" / "lab" / "families.json"
PAGE = ROOT / "docs" / "FAMILIES.md"
WAYS = (
    ("fsdp", "builtin"),
    ("fsdp", "vllm"),
    ("zero1", "builtin"),
    ("zero2", "builtin"),
    ("zero3", "builtin"),
)
CASES = tuple(Case(family, *way) for family in FAMILIES for way in WAYS)


def main() -> None:
    """Run what is chosen and open, keep each record at once, write the page."""
    options = parse_options()
    records = read_records()
    chosen = []
    for case in CASES:
        named = not options.names or any(fnmatch(case.name, name) for name in options.names)
        done = records.get(case.name, {}).get("state") in ("ran", "refused")
        if named and (options.again or not done) and not options.page:
            chosen.append(case)
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(lambda case: perform(case, options.runs / case.name), chosen):
            records[record["name"]] = record
            write_records(records)
            print(f"{record['name']}: {record['state']} {record.get('text', '')}", flush=True)
            if record["state"] == "failed":
                failed.append(record["name"])
    write_page(PAGE, [records[case.name] for case in CASES if case.name in records])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="patterns of names (default: all)")
    parser.add_argument("--again", action="store_true", help="run what is done, too")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "families")
    return parser.parse_args()


def read_records() -> dict[str, Record]:
    """What is done, by name."""
    if not STATE.is_file():
        return {}
    return {record["name"]: record for record in json.loads(STATE.read_text(encoding="utf-8"))}


def write_records(records: dict[str, Record]) -> None:
    """Write all records, a line each, in the order of the cases."""
    known: Sequence[str] = [case.name for case in CASES]
    lines = [json.dumps(records[name]) for name in known if name in records]
    STATE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
