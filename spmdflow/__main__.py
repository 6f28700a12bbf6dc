"""`spmdflow COMMAND ...`, also `python -m spmdflow COMMAND ...`: lists and starts the commands."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from spmdflow import __version__
from spmdflow.config.source import bundled_folder, bundled_scripts

FINISHED = 0
REFUSED = 2

COMMANDS = {
    "run": ("spmdflow.start", "train or evaluate: checks the command line, then starts torchrun"),
    "sweep": ("spmdflow.sweep", "run a script for each combination of some settings"),
    "data": (
        "spmdflow.preview.__main__",
        "show the tokens of rows, and which of them are trained",
    ),
    "plan": ("spmdflow.plan.__main__", "dry run without a device: errors, bytes, memory, seconds"),
    "weights": (
        "spmdflow.show_weights",
        "show which elements of a model each rank has, for any layout",
    ),
    "serve": ("spmdflow.serving.start", "start a vLLM server that runs can generate with"),
    "report": ("spmdflow.report", "print curves and metrics of a RUN_DIR"),
    "view": ("spmdflow.view.__main__", "write an HTML page: curves, samples, timeline, settings"),
    "status": (
        "spmdflow.status",
        "show what a live run is doing: calls, ranks, lines of code, stacks",
    ),
    "replay": ("spmdflow.replay", "replay a saved step and report what differs"),
    "export": ("spmdflow.export", "write a model of a checkpoint as a Hugging Face folder"),
    "clean": ("spmdflow.clean", "remove capsules, profiles and old records from RUN_DIRs"),
    "doctor": (
        "spmdflow.doctor.__main__",
        "show what is installed, what works here, and what is missing",
    ),
}
"""Command -> (module whose main(words) it calls, description)."""

_HELP = ("-h", "--help", "help")
_USAGE = """\
spmdflow {version}: reinforcement learning of language models as one torchrun command

usage: spmdflow COMMAND ...      (python -m spmdflow COMMAND ... is the same)
       spmdflow COMMAND --help

commands:
{commands}

examples:
  spmdflow run -n 4 ppo
  spmdflow run ppo --help                every setting of a script

bundled scripts, in {folder}:
  {scripts}
A script uses the YAML file of the same name. CONFIG.yaml and key=value override it.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, with the other words; return its exit code.

    Prints the help for no word, -h, --help or help, and the version for --version. An unknown
    command is reported on stderr and gives 2. words: default: sys.argv.
    """
    words = sys.argv[1:] if words is None else words
    name = words[0] if words else "--help"
    if name in _HELP:
        commands = "\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items())
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
    try:
        status: int = import_module(COMMANDS[name][0]).main(words[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # its reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINISHED
    return status


def _unknown(name: str) -> str:
    """Return the error message for an unknown command, with the most likely correction.

    The name of a bundled script gets the command that starts it, others the most similar command.
    """
    near = difflib.get_close_matches(name, COMMANDS, 1)
    if name.removesuffix(".py").removeprefix("algos/") in bundled_scripts():
        hint = f"start scripts with spmdflow run {name}"
    elif near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = "spmdflow --help describes the commands"
    return f"command line: got {name!r}, expected a command ({', '.join(COMMANDS)}); {hint}"


if __name__ == "__main__":
    sys.exit(main())
