"""Make a virtual environment for each program of tests/programs, with pinned versions.

    python scripts/make_program_environments.py                     # those that are missing
    python scripts/make_program_environments.py openai smolagents   # only these
    python scripts/make_program_environments.py --resolve openai    # new pins

They lie in ~/.cache/spmdflow/programs, or in --folder, or in the folder that the variable
SPMDFLOW_PROGRAMS names; the tests look there too. tests/programs/requirements/NAME.txt has the pins
of a program: first the packages that are tested, then, behind an empty line, all that they need.

An environment that is complete and has these pins is left alone. An installation that fails, or
takes longer than --seconds, is reported with the end of pip's output, and the next program follows;
the exit status is then 1. --resolve installs the newest versions that the first lines allow, and
writes all that was installed behind them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "tests" / "programs" / "requirements"
FOLDER_VARIABLE = "SPMDFLOW_PROGRAMS"
STAMP = "spmdflow-pins.txt"
"""File of a complete environment: the pins that it was made with."""
_SHOWN_LINES = 15
"""Of the output of a failed command."""


class InstallationFailed(Exception):
    """A command failed or took too long."""


def default_folder() -> Path:
    """Where the environments are, unless --folder says so."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path.home() / ".cache" / "spmdflow" / "programs"


def program_names() -> list[str]:
    """All programs that have pins."""
    return sorted(file.stem for file in REQUIREMENTS.glob("*.txt"))


def is_complete(environment: Path, pins: str) -> bool:
    """Whether the environment was made to the end, with these pins."""
    stamp = environment / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == pins


def make_environment(name: str, folder: Path, *, python: str, seconds: float) -> str:
    """Makes the environment of a program unless it is complete; returns what was done.

    InstallationFailed if a command fails, or if all of them take longer than `seconds`.
    """
    pins = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    environment = folder / name
    if is_complete(environment, pins):
        return "is there"
    started = time.monotonic()
    pip = _new_environment(environment, python=python, seconds=seconds)
    left = seconds - (time.monotonic() - started)
    _call([*pip, "install", "--no-deps", "-r", str(REQUIREMENTS / f"{name}.txt")], left)
    (environment / STAMP).write_text(pins, encoding="utf-8")
    return f"made in {time.monotonic() - started:.0f} s"


def resolve_pins(name: str, folder: Path, *, python: str, seconds: float) -> str:
    """Makes the environment from the first lines of the pins alone, and writes the others.

    InstallationFailed as in `make_environment`. Returns what was done.
    """
    file = REQUIREMENTS / f"{name}.txt"
    tested, _, _ = file.read_text(encoding="utf-8").partition("\n\n")
    environment = folder / name
    started = time.monotonic()
    pip = _new_environment(environment, python=python, seconds=seconds)
    left = seconds - (time.monotonic() - started)
    _call([*pip, "install", *tested.split()], left)
    installed = _call([*pip, "list", "--format=freeze", "--exclude=pip"], 60.0)
    named = {_package_of(line) for line in tested.split()}
    others = []
    for line in installed.splitlines():
        if "==" in line and _package_of(line) not in named:
            others.append(line)
    pins = "\n".join([*tested.split(), "", *others]) + "\n"
    file.write_text(pins, encoding="utf-8")
    (environment / STAMP).write_text(pins, encoding="utf-8")
    return f"resolved {len(others)} more packages in {time.monotonic() - started:.0f} s"


def _package_of(line: str) -> str:
    """The name of the package that a line pins, in one spelling."""
    return line.partition("==")[0].partition("[")[0].lower().replace("_", "-").replace(".", "-")


def _new_environment(environment: Path, *, python: str, seconds: float) -> list[str]:
    """Makes an empty environment, in place of one that is incomplete. Returns its pip command."""
    if environment.exists():
        shutil.rmtree(environment)
    environment.parent.mkdir(parents=True, exist_ok=True)
    _call([python, "-m", "venv", str(environment)], seconds)
    return [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _call(words: list[str], seconds: float) -> str:
    """Runs a command and returns what it wrote. What it started ends with it."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        written, _ = process.communicate(timeout=max(1.0, seconds))
    except BaseException as err:  # also an interrupt: nothing may stay behind
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(err, subprocess.TimeoutExpired):
            raise InstallationFailed(
                f"took longer than {seconds:.0f} s: {' '.join(words)}"
            ) from err
        raise
    if process.returncode:
        shown = "\n".join(written.splitlines()[-_SHOWN_LINES:])
        raise InstallationFailed(f"{' '.join(words)} ended with {process.returncode}:\n{shown}")
    return written


def main() -> int:
    """Makes the environments that were asked for. 1 if one of them failed."""
    names = program_names()
    parser = argparse.ArgumentParser(description="Virtual environments of tests/programs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--python", default=sys.executable, help="which Python they get")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each program")
    parser.add_argument("--resolve", action="store_true", help="install and write new pins")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(names))
    if unknown:
        parser.error(f"got {', '.join(unknown)}; expected names of {', '.join(names)}")
    make = resolve_pins if given.resolve else make_environment
    failed = []
    for name in given.names or names:
        print(f"{name}: in {given.folder / name} ...", flush=True)
        try:
            done = make(name, given.folder, python=given.python, seconds=given.seconds)
        except (InstallationFailed, OSError) as err:
            print(f"{name}: failed: {err}", flush=True)
            failed.append(name)
        else:
            print(f"{name}: {done}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}; each other one is complete")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
