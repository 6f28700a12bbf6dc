"""Runs every learning experiment of docs/LEARNING.md and writes its curves.

    python scripts/learn.py                      # everything that is not finished yet
    python scripts/learn.py bundled grpo         # a group of the table, or single entries
    python scripts/learn.py --list               # the table, and what is finished

The table is scripts/learn/table.py: name, script, settings, seeds, metric, target. Each run is a
process of its own (`python -m spmdflow.run --inproc`, one thread), --jobs at a time, or several
ranks of one thread each, which count as several jobs. A finished run
is not repeated as long as its settings are the same, and the commit it ran at is shown; one that
was interrupted continues from its last checkpoint. After each entry docs/learning/ gets its JSON
file (points of every seed, commit, seeds, settings, hardware, seconds, a few samples of the first
seed), the picture and text of its group, and docs/LEARNING.md its tables.

Real input needs SPMDFLOW_DATA (see scripts/prepare_stories.py). The group real_model needs 98 MB of
PyPI or the folder that scripts/make_smollm2.py writes, and an idle machine.

Exit code 1 if a run failed; a missed target is no failure but is said.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # scripts/ has a learn/ that would hide this file's parts

from scripts.learn import curves, runs  # noqa: E402
from scripts.learn.entry import Entry  # noqa: E402
from scripts.learn.samples import samples_of  # noqa: E402
from scripts.learn.table import ENTRIES  # noqa: E402


def main() -> None:
    """Run what is chosen, write what is finished, print the table."""
    options = parse_options()
    chosen = choose(options.names)
    if options.list:
        print(listing(chosen, options.runs))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes = runs.Processes()
    try:
        runs.prepare(chosen, options.runs, processes)
        failures = run_all(chosen, options, processes)
    except KeyboardInterrupt:
        sys.exit("learn: stopped; the same command continues")
    names = {entry.name for entry in chosen}
    done = [made for made in curves.read_all(options.docs) if made["name"] in names]
    print(curves.table(done))
    if failures:
        sys.exit("\n\n".join(failures))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="entries or groups (default: all)")
    parser.add_argument("--list", action="store_true", help="show the table and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learn", help="their folders")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "learning", help="the curves")
    return parser.parse_args()


def choose(names: Sequence[str]) -> list[Entry]:
    """The entries of these names or groups, in the table's order; all without a name."""
    known = {entry.name for entry in ENTRIES} | {entry.group for entry in ENTRIES}
    if unknown := sorted(set(names) - known):
        sys.exit(f"learn: got {', '.join(unknown)}, expected some of {', '.join(sorted(known))}")
    return [entry for entry in ENTRIES if not names or {entry.name, entry.group} & set(names)]


def listing(entries: Sequence[Entry], folder: Path) -> str:
    """One line a run: finished at which commit, or not."""
    lines = []
    for entry in entries:
        for seed in entry.seeds:
            done = runs.finished_or_none(entry, seed, folder)
            state = f"finished at {done.commit}" if done else "open"
            lines.append(f"{entry.group:<12} {entry.name:<20} seed {seed}  {state}")
    return "\n".join(lines)


def run_all(
    entries: Sequence[Entry], options: argparse.Namespace, processes: runs.Processes
) -> list[str]:
    """Run what is open; write each entry when its last seed is done. Returns the failures."""
    failures = []
    slots = runs.Slots(options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = []
        for entry in entries:
            futures = []
            for seed in entry.seeds:
                futures.append(pool.submit(one, entry, seed, options.runs, processes, slots))
            waiting.append((entry, futures))
        try:
            for entry, futures in waiting:
                try:
                    finished = [future.result() for future in futures]
                except SystemExit as failure:
                    failures.append(str(failure))
                    print(f"{entry.name}: failed, see below", flush=True)
                else:
                    write(entry, finished, options.docs)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise
    return failures


def one(
    entry: Entry, seed: int, folder: Path, processes: runs.Processes, slots: runs.Slots
) -> runs.Run:
    """A finished run as it is, or one that is run now, when there are processors for its ranks."""
    done = runs.finished_or_none(entry, seed, folder)
    if done is None:
        with slots.take(entry.num_ranks):
            print(f"{entry.name} seed {seed}: running", flush=True)
            return runs.perform(entry, seed, folder, processes)
    print(f"{entry.name} seed {seed}: finished at commit {done.commit}", flush=True)
    return done


def write(entry: Entry, finished: list[runs.Run], docs: Path) -> None:
    """The entry's file, its group's curves and its table in docs/LEARNING.md anew."""
    made = curves.write_entry(entry, finished, docs, samples=samples_of(finished[0]))
    order = [other.name for other in ENTRIES]
    group = [other for other in curves.read_all(docs) if other["group"] == entry.group]
    group.sort(key=lambda other: order.index(other["name"]))
    curves.write_group(entry.group, group, docs)
    page = docs.parent / "LEARNING.md"
    if page.is_file():
        judged = f"{entry.group} judged"
        tables = {entry.group: curves.table(group), judged: curves.judged_table(group)}
        curves.write_page(page, tables)
    verdict = "" if made["met"] else f"; target {entry.target:g} missed"
    print(f"{entry.name}: {entry.metric} {made['start']:.3f} -> {made['end']:.3f}{verdict}")


if __name__ == "__main__":
    main()
