"""Runs every algorithm, engine and generator with a real model, and writes docs/lab/REAL_MODEL.md.

    python scripts/real_matrix.py                        # everything that is not done yet
    python scripts/real_matrix.py algorithms fsdp-*      # groups, or cases by name
    python scripts/real_matrix.py --list                 # the cases, and what is done
    python scripts/real_matrix.py --again grpo-fsdp      # also what is done
    python scripts/real_matrix.py --page                 # only the page

The cases are in scripts/matrix/table.py, three steps each. docs/lab/real_model.json has what is
done, a line each: seconds and memory, measured and as the plan predicts them. A case counts as done
as long as its settings are the same. The machine must be idle, or seconds mean nothing. First make
the model (scripts/make_smollm2.py), problems (scripts/make_problems.py sums, products;
scripts/make_dialogues.py), and, for each number of ranks N, runs/matrix/cpu_N.yaml:

    python scripts/calibrate.py --name cpu_N --processes N --vllm --out runs/matrix/cpu_N.yaml

Exit code 1 if a case failed. Settings that are refused are no failure: the page says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # scripts/ has packages that would hide this project's

from scripts.matrix.case import Case  # noqa: E402
from scripts.matrix.page import write_page  # noqa: E402
from scripts.matrix.start import perform  # noqa: E402
from scripts.matrix.table import CASES  # noqa: E402
from scripts.records import Record, read_records, table_parser, write_records  # noqa: E402

STATE = ROOT / "docs" / "lab" / "real_model.json"
PAGE = ROOT / "docs" / "lab" / "REAL_MODEL.md"


def main() -> None:
    """Run what is chosen and open, keep each record at once, write the page."""
    options = parse_options()
    chosen = choose(options.names)
    records = read_records(STATE)
    if options.list:
        for case in CASES:
            print(f"{case.group:<12} {case.name:<28} {state_of(case, records)}")
        return
    failed = []
    for case in chosen if not options.page else ():
        if state_of(case, records) not in ("open", "failed") and not options.again:
            continue
        hardware = options.runs / f"cpu_{case.num_ranks}.yaml"
        record = perform(case, options.runs, hardware if hardware.is_file() else None)
        records = read_records(STATE) | {case.name: record}  # another process may have written
        write_records(STATE, records, [each.name for each in CASES])
        print(f"{case.name}: {record['state']} in {record['wall_seconds']} s", flush=True)
        if record["state"] == "failed":
            failed.append(case.name)
            print(record["text"], flush=True)
    write_page(PAGE, [records[case.name] for case in CASES if case.name in records])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = table_parser(__doc__, ROOT / "runs" / "matrix")
    parser.add_argument("--list", action="store_true", help="show the cases and run nothing")
    return parser.parse_args()


def choose(names: Sequence[str]) -> list[Case]:
    """The cases of these groups or name patterns, in the table's order; all without a name."""
    chosen = []
    for case in CASES:
        if not names or any(name == case.group or fnmatch(case.name, name) for name in names):
            chosen.append(case)
    if not chosen:
        sys.exit(f"real_matrix: got {' '.join(names)}, expected groups or names of --list")
    return chosen


def state_of(case: Case, records: dict[str, Record]) -> str:
    """ran, refused or failed; open if it has not run with these settings."""
    record = records.get(case.name)
    if record is None or record["key"] != case.key:
        return "open"
    return str(record["state"])


if __name__ == "__main__":
    main()
