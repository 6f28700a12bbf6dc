"""`spmdflow sweep`: runs of one script for each combination of some settings, one after another.

    spmdflow sweep -n 4 grpo actor.optimizer.lr=1e-5,3e-5 actor.loss.kl_coef=0,0.04

Each run has a folder of its own, named by the settings that differ: SWEEP/lr=1e-5,kl_coef=0. All
combinations are checked before the first one starts. The same command resumes a sweep: what has
finished is left alone, what was stopped continues. A run that fails does not stop the others. The
table at the end has the settings that differ and the last metrics of every run.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from spmdflow import run, start
from spmdflow.config.load import load
from spmdflow.errors import CheckpointError, ConfigError
from spmdflow.tracking.reading import RunFiles, RunState
from spmdflow.tracking.summary_table import summary_table

_USAGE = """\
usage: spmdflow sweep [-n RANKS] [--nnodes NODES] SCRIPT [CONFIG.yaml] KEY=VALUE,VALUE ...
                      [key=value ...] [-- TORCHRUN-ARGUMENTS]

Runs the script once for each value of KEY, and for each combination if several keys have several
values. run.dir is the folder of the sweep (default: runs/NAME-sweep); each run is a folder in it.
The same command continues a sweep. Other words are those of spmdflow run.
Exit codes: 0 all finished, 1 some failed, 2 settings rejected, 3 stopped by a signal.
"""
STOPPED = 3
_LONGEST_NAME = 120


@dataclass(frozen=True)
class SweepRun:
    """One combination."""

    name: str
    folder: Path
    command: start.CommandLine
    num_steps: int
    """total_steps of its settings."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the sweep of a command line; print its table and return the exit code.

    words: the arguments after `sweep`; default: sys.argv.
    """
    words = sys.argv[1:] if words is None else words
    if not words or {"--help", "-h"} & set(words):
        sys.stdout.write(_USAGE)
        return run.FINISHED
    try:
        runs = runs_of(start.sort_command(words))
    except (ConfigError, CheckpointError) as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return run.REFUSED
    was_stopped = _run_all(runs)
    files = [RunFiles(each.folder) for each in runs]
    sys.stdout.write("\n" + summary_table(files))
    states = [each.run_state for each in files]
    if was_stopped:
        return STOPPED
    if all(state is RunState.FINISHED for state in states):
        return run.FINISHED
    return run.FAILED


def runs_of(command: start.CommandLine) -> list[SweepRun]:
    """Return the runs of a sweep, checked, in the order of the values; the last key varies first.

    ConfigError if no key has several values, or some combination cannot work.
    """
    axes: dict[str, list[str]] = {}
    words: list[str] = []
    for word in command.script_words:
        key, equals, value = word.partition("=")
        values = split_values(value) if equals and not word.startswith("-") else []
        if len(values) > 1:
            axes[key] = values
        else:
            words.append(word)
    if not axes:
        expected = "a key with several values, separated by commas"
        do = "write one as actor.optimizer.lr=1e-5,3e-5"
        raise ConfigError.of("command line", " ".join(command.script_words), expected, do)
    base = _sweep_folder(words)
    labels = shortest_labels(axes)
    runs = []
    for number, combination in enumerate(itertools.product(*axes.values()), start=1):
        settings = dict(zip(axes, combination, strict=True))
        name = _name_of(settings, labels, number)
        folder = base / name
        own_words = [f"{key}={value}" for key, value in settings.items()]
        own_words += [f"run.dir={folder}", f"run.name={name}"]
        own = replace(command, script_words=(*words, *own_words))
        try:
            cfg = start.check_command(own).cfg
        except ConfigError as err:
            raise ConfigError(f"{name}: {err}") from err
        runs.append(SweepRun(name, folder, own, getattr(cfg, "total_steps", 0)))
    return runs


def split_values(text: str) -> list[str]:
    """Split a value at the commas that are in no brackets, braces or quotes."""
    values = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif letter == "," and depth == 0:
            values.append("")
            continue
        values[-1] += letter
    return [value.strip() for value in values]


def shortest_labels(keys: Iterable[str]) -> dict[str, str]:
    """Return for each dotted key its last words, as many as tell it from the other keys."""
    keys = list(keys)
    labels = {}
    for key in keys:
        words = key.split(".")
        for length in range(1, len(words) + 1):
            label = ".".join(words[-length:])
            if sum(f".{other}".endswith(f".{label}") for other in keys) == 1:
                break
        labels[key] = label
    return labels


def _name_of(settings: Mapping[str, str], labels: Mapping[str, str], number: int) -> str:
    """Return the folder's name of a run: "lr=1e-5,kl_coef=0"; with its number if that is long."""
    text = ",".join(f"{labels[key]}={value}" for key, value in settings.items())
    name = "".join(letter if letter.isalnum() or letter in "=,.+-_" else "_" for letter in text)
    if len(name) > _LONGEST_NAME or name != text:
        return f"{number:03d}-{name}"[:_LONGEST_NAME]
    return name


def _sweep_folder(words: list[str]) -> Path:
    """Return the folder of the sweep, and take run.dir and run.name out of words."""
    arguments = run.parse_arguments(words)
    if arguments.script is None:
        expected = "one such as algos/ppo.py"
        raise ConfigError.of("command line", "no SCRIPT", expected, "--help shows the usage")
    cfg = load(arguments.script, arguments.config, arguments.overrides).cfg
    folder = Path(cfg.run.dir or f"runs/{cfg.run.name}-sweep")
    words[:] = [word for word in words if not word.startswith(("run.dir=", "run.name="))]
    return folder


def _run_all(runs: Sequence[SweepRun]) -> bool:
    """Run what has not finished, one after another; return whether a signal stopped the sweep.

    The signals of a terminal reach the run too. SIGTERM is passed on. Then the run saves and ends,
    and no other is started.
    """
    process: subprocess.Popen[bytes] | None = None
    stopped_by: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        if number == signal.SIGTERM and process is not None:
            process.terminate()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in signals]
    try:
        for number, each in enumerate(runs, start=1):
            title = f"run {number} of {len(runs)}: {each.name}"
            if has_finished(each):
                _say(f"{title}: has finished")
                continue
            _say(title)
            program = start.torchrun_command(each.command, each.folder)
            process = subprocess.Popen(program)
            process.wait()
            if stopped_by:
                return True
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    return bool(stopped_by)


def _say(text: str) -> None:
    """Print a heading between the output of the runs."""
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def has_finished(one: SweepRun) -> bool:
    """Whether the folder has a finished run of at least as many steps."""
    files = RunFiles(one.folder)
    if files.run_state is not RunState.FINISHED or not files.metrics:
        return False
    last_step: int = files.metrics[-1]["step"]
    return last_step >= one.num_steps


if __name__ == "__main__":
    sys.exit(main())
