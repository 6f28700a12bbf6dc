"""The command line of a plan: `python -m spmdflow.plan SCRIPT [CONFIG.yaml] [key=value ...]`.

    --world N          ranks of the run (8)
    --hardware NAME    a100_80gb, h100, h200, cpu, or a file of scripts/calibrate.py (this node's)
    --node-size N      ranks of a node (the hardware's)
    --assume NAME=X    an example of what only a run knows: scores=0,1 responses=200 actor/kl=0.1
                       (wins over the section assume of CONFIG.yaml, that over flow.assume)
    --calls N          most calls of a step (100)
    --no-data          prompts are as long as allowed; the data file is not read
    --json             everything as data
    --picture FILE     the schedule as .svg or .html
    --replay RUN_DIR   ranks, steps, lengths and values of an earlier run; its settings, if no
                       CONFIG.yaml is given; planned bytes are compared with its counters
    --auto             placement=auto: the ten best placements and why they lose

Exit codes: 0 nothing is wrong, 1 something is, 2 the script or its settings cannot be planned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spmdflow.config.auto import choose_by_device
from spmdflow.config.load import load
from spmdflow.config.schema import AUTO
from spmdflow.config.source import sort_words
from spmdflow.errors import ConfigError, DataError, PlanError
from spmdflow.plan.auto import auto_plain, auto_text, resolve
from spmdflow.plan.picture import write_picture
from spmdflow.plan.replay import Replay
from spmdflow.plan.report import PlanReport, plan
from spmdflow.plan.residency import choose_by_plan
from spmdflow.plan.showing import planning_shown
from spmdflow.plan.text import plan_text
from spmdflow.plan.trace import TraceSettings, settings_of_run
from spmdflow.plan.transport import MOST_CALLS
from spmdflow.plan.workload import hardware_of, nodes_of

FINE = 0
WRONG = 1
REFUSED = 2
_HERE = "command line"


def main(words: Sequence[str] | None = None) -> int:
    """Plan what the words of the command line say; returns the exit code."""
    try:
        return _plan(_parser().parse_intermixed_args(words))
    except (ConfigError, DataError, PlanError) as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--calls", type=int, default=MOST_CALLS, metavar="N")
    parser.add_argument("--no-data", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="RUN_DIR")
    parser.add_argument("--auto", action="store_true")
    return parser


def _plan(options: argparse.Namespace) -> int:
    script, config, overrides = sort_words(options.words)
    if script is None:
        raise ConfigError.of(_HERE, "no SCRIPT", "one such as ppo", "--help shows the usage")
    if options.world < 1:
        got = f"--world {options.world}"
        raise ConfigError.of(_HERE, got, "at least 1 rank", "set --world 1 or more")
    _check_folder(options.picture)
    if options.replay is not None and (options.replay / "config.yaml").exists():
        config = config or str(options.replay / "config.yaml")
    # before the replay: its record has objects of the script's classes
    loaded = load(script, config, overrides, download=False)
    replay = None if options.replay is None else Replay.of_run(options.replay)
    world = tuple(range(options.world if replay is None else len(replay.ranks)))
    name = options.hardware or loaded.cfg.run.hardware
    hardware = hardware_of(name, options.node_size, world_size=len(world))
    backend = "gloo" if hardware.is_cpu else "nccl"
    device = "cpu" if hardware.is_cpu else "cuda"
    choices = choose_by_device(loaded.cfg, device, here=False)
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
    found = None
    with planning_shown(None):
        if options.auto or getattr(cfg, "placement", None) == AUTO:
            found = resolve(loaded.script, cfg, len(world), hardware, examples=examples)
            cfg = found.cfg
        choices += choose_by_plan(loaded.script, cfg, len(world), hardware, examples=examples)
        report = plan(loaded.script, cfg, settings, hardware, replay=replay, choices=choices)
    if options.picture is not None:
        _write_picture(report, options.picture)
    if options.json:
        plain = report.to_plain() | ({"auto": auto_plain(found)} if found else {})
        sys.stdout.write(json.dumps(plain) + "\n")
    else:
        sys.stdout.write((auto_text(found) if found else "") + plan_text(report))
    if report.problems:
        return WRONG
    return FINE


def _write_picture(report: PlanReport, path: Path) -> None:
    """The plan as a picture; ConfigError if the file cannot be written."""
    try:
        write_picture(report, path)
    except OSError as err:
        got = f"--picture {path}: {err.strerror}"
        raise ConfigError.of(_HERE, got, "a file that can be written", "give another") from err


def _check_folder(picture: Path | None) -> None:
    """Before any work: ConfigError if a picture cannot be written there."""
    if picture is not None and not (picture.parent.is_dir() and os.access(picture.parent, os.W_OK)):
        expected = "a name in a folder that can be written"
        do = f"make {picture.parent} or give another"
        raise ConfigError.of(_HERE, f"--picture {picture}", expected, do)


def _example(text: str) -> tuple[str, Any]:
    """ "scores=0,1" -> ("scores", [0, 1])."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError.of(_HERE, f"--assume {text}", "NAME=VALUE", "write --assume scores=0,1")
    if "," in value:
        with contextlib.suppress(ValueError):  # not only numbers: a declaration, int64[2,3]
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
