"""Runs the tests against deliberate bugs (mutants): each must make a test fail.

Usage: .venv/bin/python tests/mutants/run.py [NAME ...]      by default all of them; some minutes

A mutant is a file NAME.patch in this folder: a sentence that says what is wrong, lines `Tests: ...`
with the tests that have to notice it, and the change. They are applied one at a time to a copy of
the working tree. Prints a line for each; the exit code is 1 if one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Mutant:
    """A deliberate bug."""

    name: str
    path: Path
    sentence: str
    """What is wrong."""
    tests: tuple[str, ...]
    """Files of tests, or single tests, of which at least one must fail."""


def mutants(names: list[str] | None = None) -> list[Mutant]:
    """The mutants of this folder, by name; names: only these."""
    found = [_read(path) for path in sorted(FOLDER.glob("*.patch"))]
    unknown = set(names or ()) - {mutant.name for mutant in found}
    if unknown:
        raise SystemExit(f"no mutant {sorted(unknown)}; there are {[m.name for m in found]}")
    return [mutant for mutant in found if not names or mutant.name in names]


def _read(path: Path) -> Mutant:
    head = path.read_text(encoding="utf-8").split("diff --git", maxsplit=1)[0].splitlines()
    prefix = "Tests: "
    tests = [line.removeprefix(prefix) for line in head if line.startswith(prefix)]
    sentence = " ".join(line for line in head if line and not line.startswith(prefix))
    assert tests and sentence, path
    return Mutant(path.stem, path, sentence, tuple(tests))


def copy_of_tree(to: Path) -> Path:
    """The files that git knows, as they are now, copied into the folder `to`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = REPOSITORY / name
        target = to / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return to


def tests_fail(tree: Path, tests: tuple[str, ...]) -> bool:
    """Whether a test fails in the tree. AssertionError if none can be run."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    chosen = ["-m", "not slow and not gpu"]  # drills may be what kills a mutant
    options = ["-q", "-x", "-p", "no:cacheprovider", *chosen]
    words = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(
        words, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode in (0, 1), f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.returncode == 1


def apply(tree: Path, mutant: Mutant, *options: str) -> None:
    """Apply the change, or with --reverse undo it."""
    subprocess.run(["git", "apply", *options, str(mutant.path)], cwd=tree, check=True)


def main(names: list[str]) -> int:
    """Run the tests against each mutant. Exit code: 1 if a mutant survives, otherwise 0."""
    survivors = []
    chosen = mutants(names)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder))
        needed = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        if tests_fail(tree, needed):
            print("a test fails without any mutant: nothing can be said of them")
            return 1
        for mutant in chosen:
            apply(tree, mutant)
            is_killed = tests_fail(tree, mutant.tests)
            apply(tree, mutant, "--reverse")
            print(f"{'killed  ' if is_killed else 'SURVIVED'} {mutant.name}: {mutant.sentence}")
            survivors += [] if is_killed else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
