"""`spmdflow COMMAND ...`, also `python -m spmdflow COMMAND ...`: lists the commands, starts one."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from spmdflow import __version__
from spmdflow.config.source import bundled_folder, bundled_scripts

FINISHED = 0
REFUSED = 2

COMMANDS = {
    "run": ("spmdflow.run", "train or evaluate: one rank of a run; torchrun starts it"),
    "plan": ("spmdflow.plan.__main__", "a dry run on no device: errors, bytes, memory, seconds"),
    "report": ("spmdflow.report", "the curves and figures of a RUN_DIR"),
    "view": ("spmdflow.view.__main__", "a page for a browser: curves, samples, timeline, settings"),
    "status": ("spmdflow.status", "what a live run does: calls, ranks, lines of code, stacks"),
    "replay": ("spmdflow.replay", "run a step again that a run kept, and name what differs"),
    "export": ("spmdflow.export", "a trained model of a checkpoint as a Hugging Face folder"),
    "doctor": (
        "spmdflow.doctor.__main__",
        "what is installed, what works here, what is missing for what",
    ),
}
"""Command -> the module whose main(words) it calls, and a phrase."""

_HELP = ("-h", "--help", "help")
_USAGE = """\
spmdflow {version}: reinforcement learning of language models as one torchrun command

usage: spmdflow COMMAND ...      (python -m spmdflow COMMAND ... is the same)
       spmdflow COMMAND --help

commands:
{commands}

start:
  torchrun --standalone --nproc-per-node 4 -m spmdflow.run ppo
  python -m spmdflow.run ppo --help      every setting of a script

bundled scripts, in {folder}:
  {scripts}
A script's name runs it with the YAML of that name; CONFIG.yaml and key=value lie over that.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Start the command that the first word names; returns its exit code, 2 for an unknown one."""
    words = sys.argv[1:] if words is None else words
    name = words[0] if words else "--help"
    if name in _HELP:
        commands = "\n".join(f"  {name:<8} {phrase}" for name, (_, phrase) in COMMANDS.items())
        scripts = ", ".join(bundled_scripts())
        folder = bundled_folder()
        facts = {"version": __version__, "folder": folder, "scripts": scripts}
        sys.stdout.write(_USAGE.format(commands=commands, **facts))
        return FINISHED
    if name == "--version":
        sys.stdout.write(f"spmdflow {__version__}\n")
        return FINISHED
    if name not in COMMANDS:
        sys.stderr.write(f"spmdflow: {_unknown(name)}\n")
        return REFUSED
    status: int = import_module(COMMANDS[name][0]).main(words[1:])
    return status


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, 1)
    if name.removesuffix(".py").removeprefix("algos/") in bundled_scripts():
        hint = f"scripts are started with torchrun ... -m spmdflow.run {name}"
    elif near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = "spmdflow --help says what each does"
    return f"command line: got {name!r}, expected a command ({', '.join(COMMANDS)}); {hint}"


if __name__ == "__main__":
    sys.exit(main())
