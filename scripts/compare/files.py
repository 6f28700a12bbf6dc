"""Files that the old commit wrote, read by the new one.

The old commit trains two steps of algos/ppo.py, saves a checkpoint and keeps the second step as a
capsule. Then

- each commit continues a copy of the run for a third step: metrics and checkpoint must be equal bit
  for bit;
- the new commit replays the capsule: all that the calls made, and the state after the step, must be
  what the old commit recorded. The old commit replays it too, as a control.

The layouts are some of those of `bits`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from compare.bits import (
    EQUAL,
    LAYOUTS,
    NOT_RUN,
    SECONDS,
    Layout,
    compare_runs,
    is_complete,
    is_installed,
    run_layouts,
)
from compare.checkout import Checkout, end_of_log, run_program, torchrun_words
from compare.equality import read_metrics

PASSED = (EQUAL, NOT_RUN)
DEFAULT = ("fsdp-d2", "megatron-t2", "standalone")
_BEFORE = 2
"""Steps that the old commit trains."""
_AFTER = 3
"""The step to which both continue."""
_SHOWN = 10
"""Differences of a layout that are printed."""

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which layouts."""
    names = [each.name for each in LAYOUTS]
    parser.add_argument("--layouts", nargs="+", choices=names, default=DEFAULT, metavar="NAME")


def compare(arguments: argparse.Namespace, old: Checkout, new: Checkout, folder: Path) -> list[Row]:
    """Two rows for each layout: the checkpoint and the capsule."""
    chosen = [each for each in LAYOUTS if each.name in arguments.layouts]
    runnable = [each for each in chosen if is_installed(each.needs)]
    print(f"old: {len(runnable)} runs of {_BEFORE} steps", flush=True)
    kept = (f"run.capture_step={_BEFORE}",)
    run_layouts(runnable, old, folder / "before", num_steps=_BEFORE, more=kept)
    for side, checkout in (("old", old), ("new", new)):
        for layout in runnable:
            copy_run(folder / "before" / layout.name, folder / side / layout.name)
        print(f"{side}: {len(runnable)} runs continue to step {_AFTER}", flush=True)
        run_layouts(runnable, checkout, folder / side, num_steps=_AFTER)
    rows = []
    for layout in chosen:
        if layout not in runnable:
            rows.append(_row(layout, "both", NOT_RUN, f"{layout.needs} is not installed"))
            continue
        rows.append(_compare_continued(layout, folder))
        rows.append(_replay(layout, old, new, folder))
    return rows


def copy_run(source: Path, target: Path) -> None:
    """A RUN_DIR without its capsules."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("capsules"))


def _compare_continued(layout: Layout, folder: Path) -> Row:
    """The third step of both commits after the old one's checkpoint."""
    old = folder / "old" / layout.name
    new = folder / "new" / layout.name
    for side in (old, new):
        if not is_complete(side, _AFTER):
            detail = f"the {side.parent.name} commit did not continue: see --keep FOLDER, file log"
            return _row(layout, "checkpoint", "failed", detail)
        if not has_continued(side, folder / "before" / layout.name):
            detail = f"the {side.parent.name} commit began from step 1 instead of the checkpoint"
            return _row(layout, "checkpoint", "failed", detail)
    differences = compare_runs(old, new, _AFTER)
    for difference in differences[:_SHOWN]:
        print(f"{layout.name}: {difference}")
    if differences:
        result = f"{len(differences)} differences"
        return _row(layout, "checkpoint", result, str(differences[0]))
    return _row(layout, "checkpoint", EQUAL, "")


def has_continued(run_dir: Path, before: Path) -> bool:
    """Whether a run kept the steps of the run before it, also the seconds that these took."""
    earlier = read_metrics(before)
    return read_metrics(run_dir)[: len(earlier)] == earlier


def _replay(layout: Layout, old: Checkout, new: Checkout, folder: Path) -> Row:
    """The capsule, replayed by each commit on the ranks of the run."""
    capsule = folder / "before" / layout.name / "capsules" / f"step-{_BEFORE}"
    lines = {}
    statuses = {}
    for side, checkout in (("old", old), ("new", new)):
        print(f"{side}: replay of {layout.name}", flush=True)
        log = folder / f"{side}-replay-{layout.name}.log"
        words = [*torchrun_words(layout.num_ranks), "-m", "spmdflow.replay", str(capsule)]
        statuses[side] = run_program(checkout, words, log, seconds=SECONDS)
        lines[side] = last_reported(end_of_log(log))
    if statuses["new"] == 0:
        return _row(layout, "capsule", EQUAL, lines["new"])
    detail = f"new: {lines['new']}; old: status {statuses['old']}, {lines['old']}"
    return _row(layout, "capsule", f"status {statuses['new']}", detail)


def last_reported(text: str) -> str:
    """What `spmdflow.replay` said last; the last line if it said nothing."""
    lines = text.strip().splitlines() or [""]
    reports = [line for line in lines if line.startswith("replay: ")]
    return (reports or lines)[-1].removeprefix("replay: ")


def _row(layout: Layout, file: str, result: str, detail: str) -> Row:
    return {
        "layout": layout.name,
        "ranks": layout.num_ranks,
        "file": file,
        "result": result,
        "detail": detail,
    }
