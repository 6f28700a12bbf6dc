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
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # scripts/ has packages that would hide this project's

from scripts.families.page import write_page  # noqa: E402
from scripts.families.run import perform  # noqa: E402
from scripts.families.table import CASES, STATE  # noqa: E402
from scripts.records import read_records, table_parser, write_records  # noqa: E402

PAGE = ROOT / "docs" / "FAMILIES.md"


def main() -> None:
    """Run what is chosen and open, keep each record at once, write the page."""
    options = parse_options()
    records = read_records(STATE)
    chosen = []
    for case in CASES:
        named = not options.names or any(fnmatch(case.name, name) for name in options.names)
        done = records.get(case.name, {}).get("state") in ("ran", "refused")
        if named and (options.again or not done) and not options.page:
            chosen.append(case)
    if chosen:
        import_module("transformers")  # its first import fails in two threads at once
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(lambda case: perform(case, options.runs / case.name), chosen):
            records[record["name"]] = record
            write_records(STATE, records, [case.name for case in CASES])
            print(f"{record['name']}: {record['state']} {record.get('text', '')}", flush=True)
            if record["state"] == "failed":
                failed.append(record["name"])
    write_page(PAGE, [records[case.name] for case in CASES if case.name in records])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = table_parser(__doc__, ROOT / "runs" / "families")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
