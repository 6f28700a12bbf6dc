"""Counts the files that a reader enters who follows the settings of a run through `prepare`.

Usage: .venv/bin/python scripts/settings_trace.py [SCRIPT] [key=value ...]

Settings are loaded (by default of ppo with placement=auto), prepared once to warm up, and prepared
again under `sys.setprofile`. A function of the package counts if one of its arguments holds the
settings: the whole object, an object with all of it, or (second count) one section of it. A stay is
a run of calls in one file; returns are the stays after a file's first one.

Prints a line per count:

    whole            functions that get all settings, the planner's dry run included
    whole, no dry run   the same without what the dry run of the script calls
    sections, no dry run   functions that get all settings or a section
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from _stays import stays_of

from spmdflow import program
from spmdflow.config.load import Loaded, load

PACKAGE = f"{os.sep}spmdflow{os.sep}"
DRY_RUN = ("plan/trace.py", "trace")
"""File and function that run the script on no device."""
DEFAULTS = ("placement=auto", "run.hardware=h100", "run.resume=never")


@dataclass
class Profile:
    """Calls of the package's functions that get settings, in order."""

    settings_class: type
    sections: tuple[type, ...]
    calls: list[tuple[str, bool, bool]] = field(default_factory=list)
    """(file, whether it gets all settings, whether it is called by the dry run)."""
    dry_runs: int = 0
    """Dry runs that are going on."""

    def record(self, frame: FrameType, event: str, _: object) -> None:
        """The function for `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or PACKAGE not in code.co_filename:
            return
        file = code.co_filename.split(PACKAGE)[-1]
        is_dry_run = (file, code.co_name) == DRY_RUN
        if event == "return":
            self.dry_runs -= is_dry_run
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in arguments]
        is_whole = any(self._holds_all(value) for value in values)
        if is_whole or any(type(value) in self.sections for value in values):
            self.calls.append((file, is_whole, self.dry_runs > 0))
        self.dry_runs += is_dry_run

    def _holds_all(self, value: object) -> bool:
        """Whether a value is the settings or an object such as `Loaded` around them.

        Runs no code of the value: its attributes may not be there yet.
        """
        inner = inspect.getattr_static(value, "cfg", None)
        return isinstance(value, self.settings_class) or isinstance(inner, self.settings_class)


def classes_of(tree: Any) -> Iterator[type]:
    """Classes of all sections of a settings object."""
    for each in dataclasses.fields(tree):
        value = getattr(tree, each.name)
        if dataclasses.is_dataclass(value):
            yield type(value)
            yield from classes_of(value)


def count_text(name: str, files: list[str]) -> str:
    """One line: how many files are entered, how often, and which."""
    stays = stays_of(files)
    order = list(dict.fromkeys(files))
    returns = len(stays) - len(order)
    return f"{name:<22} {len(order):>3} files, {returns:>4} returns: {', '.join(order)}"


def main() -> None:
    """Prepare the settings of the command line twice; print the counts of the second time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="SCRIPT key=value")
    words = parser.parse_args().words
    script = "ppo"
    if words and "=" not in words[0]:
        script = words.pop(0)
    loaded: Loaded = load(script, None, [*DEFAULTS, *words])
    profile = Profile(type(loaded.cfg), tuple(set(classes_of(loaded.cfg))))
    program.prepare(loaded, 2)
    sys.setprofile(profile.record)
    program.prepare(loaded, 2)
    sys.setprofile(None)
    whole = []
    without_dry_run = []
    sections = []
    for file, is_whole, is_dry_run in profile.calls:
        if is_whole:
            whole.append(file)
        if is_whole and not is_dry_run:
            without_dry_run.append(file)
        if not is_dry_run:
            sections.append(file)
    print(count_text("whole", whole))
    print(count_text("whole, no dry run", without_dry_run))
    print(count_text("sections, no dry run", sections))


if __name__ == "__main__":
    main()
