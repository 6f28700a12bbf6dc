"""The command line of the doctor: `spmdflow doctor [--run-dir FOLDER] [--json]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from spmdflow.doctor import ABSENT, BAD, Check
from spmdflow.doctor.node import (
    check_addresses,
    check_devices,
    check_environment,
    check_limits,
    check_run_dir,
    check_system,
)
from spmdflow.doctor.packages import check_packages

CAN_RUN = 0
CANNOT_RUN = 1


def main(words: Sequence[str] | None = None) -> int:
    """Run all checks and print their report. Return 0 if a run on the CPU can work, otherwise 1.

    A run can work if no check is in state `bad`; warnings and absent extras do not count.
    """
    parser = argparse.ArgumentParser(
        prog="spmdflow doctor", description="What works here, and what is missing for what."
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="where runs are written (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(words)
    checks = find_checks(options.run_dir)
    if options.json:
        plain = {"can_run": can_run(checks), "checks": [check_to_plain(check) for check in checks]}
        sys.stdout.write(json.dumps(plain) + "\n")
    else:
        sys.stdout.write(checks_text(checks))
    if can_run(checks):
        return CAN_RUN
    return CANNOT_RUN


def find_checks(run_dir: Path) -> list[Check]:
    """Runs all checks; their results in the order in which they are shown."""
    return [
        check_system(),
        *check_packages(),
        *check_devices(Path("/"), os.environ.get("PATH", "")),
        *check_addresses(),
        *check_run_dir(run_dir),
        *check_limits(),
        *check_environment(os.environ),
    ]


def check_to_plain(check: Check) -> dict[str, str]:
    """The line as data for JSON."""
    plain = asdict(check)
    plain["found"] = plain.pop("result")
    return plain


def can_run(checks: Sequence[Check]) -> bool:
    """Whether no check found a reason why a run cannot work."""
    return all(check.state != BAD for check in checks)


def checks_text(checks: Sequence[Check]) -> str:
    """Return the report: state, name, result and advice of each check, and a verdict.

    A check is one line, and its advice another. Checks are grouped under their topic. The verdict
    names all `bad` checks or, if there are none, the absent extras.
    """
    lines = []
    for topic, members in groupby(checks, lambda check: check.topic):
        lines.append(topic)
        for check in members:
            lines.append(f"  {check.state:<6} {check.name:<20} {check.result}")
            lines += [f"  {'':<27} {check.advice}"] if check.advice else []
    bad = []
    for check in checks:
        if check.state == BAD:
            bad.append(check.name)
    absent = []
    for check in checks:
        if check.state == ABSENT:
            absent.append(check.name)
    if bad:
        lines.append(f"\na run cannot work here: see {', '.join(bad)}")
    else:
        without = f", without the extras {', '.join(absent)}" if absent else ""
        lines.append(f"\na run on the CPU can work here{without}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
