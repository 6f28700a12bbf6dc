"""Plan one step of a training script without any device.

Usage: python -m spmdflow.plan SCRIPT [CONFIG.yaml] [key=value ...]

    --world N          number of ranks of the run (default: 8)
    --hardware NAME    a100_80gb, h100, h200, cpu, or a file written by scripts/calibrate.py
                       (default: the hardware of this node)
    --node-size N      ranks per node (default: that of the hardware)
    --assume NAME=X    example of a value that only a run knows: scores=0,1 responses=200
                       actor/kl=0.1 (overrides the section assume of CONFIG.yaml, which overrides
                       flow.assume)
    --spread C         coefficient of variation of the lengths of responses in a second prediction
                       (default: 1; 0: no second prediction)
    --calls N          largest number of calls in a step (default: 100)
    --no-data          do not read the data file; prompts have the largest length allowed
    --json             print everything as JSON
    --picture FILE     draw the schedule as .svg or .html
    --replay RUN_DIR   use the ranks, steps, lengths and values of an earlier run, and compare the
                       planned bytes with its counters; also uses its settings, unless CONFIG.yaml
                       is on the command line
    --auto             search a placement (as placement=auto does), and show the ten best and why
                       the others lose

Exit codes: 0 no problems, 1 problems, 2 the script or its settings cannot be planned.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spmdflow.config.load import load
from spmdflow.config.resolve import Choice, choose_device_defaults
from spmdflow.config.schema import AUTO
from spmdflow.config.source import sort_words
from spmdflow.errors import ConfigError, DataError, PlanError
from spmdflow.plan.fit import find_fit
from spmdflow.plan.picture import write_picture
from spmdflow.plan.placement import (
    PlacementSearch,
    find_placement,
    search_plain,
    search_text,
)
from spmdflow.plan.replay import Replay
from spmdflow.plan.report import PlanReport, plan
from spmdflow.plan.showing import show_planning
from spmdflow.plan.spread import USUAL_VARIATION
from spmdflow.plan.text import plan_text
from spmdflow.plan.trace import TraceSettings, settings_of_run
from spmdflow.plan.transport import MOST_CALLS
from spmdflow.plan.workload import hardware_of, nodes_of

FINE = 0
WRONG = 1
REFUSED = 2
_HERE = "command line"
_MOST_VARIATION = 10.0


def main(words: Sequence[str] | None = None) -> int:
    """Plan the script of this command line and print the plan. Return the exit code.

    0: no problems, 1: problems. ConfigError, DataError and PlanError are printed to stderr and give
    2.
    """
    try:
        return _plan(_parser().parse_intermixed_args(words))
    except (ConfigError, DataError, PlanError) as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Its help is the docstring of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m spmdflow.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="+", metavar="SCRIPT [CONFIG.yaml] [key=value ...]")
    parser.add_argument("--world", type=int, default=8, metavar="N")
    parser.add_argument("--hardware", metavar="NAME")
    parser.add_argument("--node-size", type=int, metavar="N")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--spread", type=float, default=USUAL_VARIATION, metavar="C")
    parser.add_argument("--calls", type=int, default=MOST_CALLS, metavar="N")
    parser.add_argument("--no-data", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="RUN_DIR")
    parser.add_argument("--auto", action="store_true")
    return parser


def _plan(options: argparse.Namespace) -> int:
    """Plan, print the plan, write the picture if wanted, and return 0, or 1 if there are problems.

    Resolves `auto` in this order: device defaults, placement, memory. --replay takes the settings
    from RUN_DIR/config.yaml unless a configuration is given. Warnings go to stderr. Raises
    ConfigError for words without a script, --world below 1 or a picture that cannot be written.
    """
    script, config, overrides = sort_words(options.words)
    if script is None:
        raise ConfigError.of(_HERE, "no SCRIPT", "one such as ppo", "--help shows the usage")
    _check_numbers(options)
    _check_folder(options.picture)
    if options.replay is not None and (options.replay / "config.yaml").exists():
        config = config or str(options.replay / "config.yaml")
    # before the replay: its record has objects of the script's classes
    loaded = load(script, config, overrides, download=False)
    sys.stderr.write("".join(f"{warning}\n" for warning in loaded.warnings))
    replay = None if options.replay is None else Replay.of_run(options.replay)
    world = tuple(range(options.world if replay is None else len(replay.ranks)))
    name = options.hardware or loaded.cfg.run.hardware
    hardware = hardware_of(name, options.node_size, world_size=len(world))
    backend = "gloo" if hardware.is_cpu else "nccl"
    device = "cpu" if hardware.is_cpu else "cuda"
    choices = choose_device_defaults(loaded.cfg, device, here=False)
    _set_all(choices, loaded.cfg)
    examples = {**loaded.assume, **dict(map(_example, options.assume))}
    if replay is not None:
        examples = {}
        settings = settings_of_run(replay, backend=backend)
    else:
        settings = TraceSettings(
            world=world,
            nodes=nodes_of(world, hardware),
            backend=backend,
            examples=examples,
            most_calls=options.calls,
            read_data=not options.no_data,
        )
    cfg = loaded.cfg
    search = None
    with show_planning(None):
        if options.auto or getattr(cfg, "placement", None) == AUTO:
            search = find_placement(loaded.script, cfg, len(world), hardware, examples=examples)
            cfg = copy.deepcopy(search.cfg)  # the search says what it decided itself
        fit = find_fit(loaded.script, cfg, len(world), hardware, examples=examples)
        _set_all(fit, cfg)
        choices += fit
        report = plan(
            loaded.script,
            cfg,
            settings,
            hardware,
            replay=replay,
            choices=choices,
            variation=options.spread,
        )
    _print_report(report, search, options)
    if report.problems:
        return WRONG
    return FINE


def _print_report(
    report: PlanReport, search: PlacementSearch | None, options: argparse.Namespace
) -> None:
    """Write the picture if one is wanted, and print the plan as JSON or as text."""
    if options.picture is not None:
        _write_picture(report, options.picture)
    if options.json:
        _print_json(report, search)
    else:
        _print_text(report, search)


def _set_all(choices: Sequence[Choice], cfg: Any) -> None:
    """Set the values of these choices in the settings."""
    for choice in choices:
        choice.set_in(cfg)


def _print_json(report: PlanReport, search: PlacementSearch | None) -> None:
    """Print the plan, and the search for its placement if there was one, as one line of JSON."""
    plain = report.to_plain()
    if search is not None:
        plain["auto"] = search_plain(search)
    sys.stdout.write(json.dumps(plain) + "\n")


def _print_text(report: PlanReport, search: PlacementSearch | None) -> None:
    """Print the search for a placement if there was one, then the plan, as text."""
    if search is not None:
        sys.stdout.write(search_text(search))
    sys.stdout.write(plan_text(report))


def _write_picture(report: PlanReport, path: Path) -> None:
    """Write the plan as a picture; raises ConfigError if the file cannot be written."""
    try:
        write_picture(report, path)
    except OSError as err:
        got = f"--picture {path}: {err.strerror}"
        raise ConfigError.of(_HERE, got, "a writable file", "choose another file") from err


def _check_numbers(options: argparse.Namespace) -> None:
    """Raise ConfigError if --world or --spread is out of range."""
    if options.world < 1:
        got = f"--world {options.world}"
        raise ConfigError.of(_HERE, got, "at least 1 rank", "set --world 1 or more")
    if not 0 <= options.spread <= _MOST_VARIATION:
        got = f"--spread {options.spread:g}"
        do = "set --spread 1, or 0 for no second prediction"
        raise ConfigError.of(_HERE, got, f"a number from 0 to {_MOST_VARIATION:g}", do)


def _check_folder(picture: Path | None) -> None:
    """Raise ConfigError if the folder of a picture is missing or not writable. None: no picture."""
    if picture is not None and not (picture.parent.is_dir() and os.access(picture.parent, os.W_OK)):
        expected = "a file in a writable folder"
        do = f"create {picture.parent} or choose another folder"
        raise ConfigError.of(_HERE, f"--picture {picture}", expected, do)


def _example(text: str) -> tuple[str, Any]:
    """Parse an example of --assume: "scores=0,1" -> ("scores", [0.0, 1.0]).

    Numbers with commas between them become a list; anything else is read as YAML. Raises
    ConfigError without "=" or a name, or if the value is not YAML.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError.of(_HERE, f"--assume {text}", "NAME=VALUE", "write --assume scores=0,1")
    if "," in value:
        with contextlib.suppress(ValueError):  # not numbers: a declaration such as int64[2,3]
            return name, [float(part) for part in value.split(",")]
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as err:
        raise ConfigError(
            f"{_HERE}: got --assume {text}, expected a number, numbers with commas, or a text such "
            f"as 'float32 like responses', in YAML; quote it or close its brackets"
        ) from err


if __name__ == "__main__":
    sys.exit(main())
