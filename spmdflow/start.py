"""`spmdflow run`: checks the command line, then starts torchrun with it.

Script, files, keys and values are checked in this process, before torchrun starts and without
torch, so that a mistake is reported once and quickly. Then the process becomes torchrun
(`spmdflow.torchrun`), whose ranks are `spmdflow.run`. Inside of torchrun, and with --inproc or
--help, it is `spmdflow.run` itself: one rank, one process, or the help.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from spmdflow import run
from spmdflow.config.check import check_open, with_problems
from spmdflow.config.load import Loaded, load
from spmdflow.config.location import run_dir_of
from spmdflow.deferred_name import deferring
from spmdflow.errors import CheckpointError, ConfigError
from spmdflow.program import check_metrics_port

REFUSED = run.REFUSED

_USAGE = """\
usage: spmdflow run [-n RANKS] [--nnodes NODES] SCRIPT [CONFIG.yaml] [key=value ...]
                    [-- TORCHRUN-ARGUMENTS]
       spmdflow run --inproc SCRIPT ...      one process without torchrun, for breakpoint()
       spmdflow run SCRIPT --help

-n RANKS       ranks of each node; default: one for each of its GPUs, 1 without a GPU
--nnodes NODES nodes, such as 4, or 1:4 for as many of them as there are; default 1. Start the same
               command on each of them, with torchrun's --rdzv-endpoint after --
TORCHRUN-ARGUMENTS
               such as --max-restarts 3. Without --shutdown-timeout the ranks have {seconds} s to
               save after a signal (torch 2.13 and newer; torchrun's own default is 30 s)

The command line is checked before torchrun starts. torchrun with -m spmdflow.run does the same
without these checks. Exit codes: 0 finished, 1 failed, 2 settings rejected, 3 stopped after a
checkpoint.

"""
_SHUTDOWN_SECONDS = 600
_TORCH_WITH_SHUTDOWN_TIMEOUT = (2, 13)
_RENDEZVOUS = ("rdzv", "master", "standalone")
_GPU_FILES = ("/dev/nvidia0", "/dev/kfd")
_INSIDE_TORCHRUN = "RANK"


@dataclass(frozen=True)
class CommandLine:
    """The words of `spmdflow run`, sorted."""

    ranks: str | None
    """-n as written; None: as many as the node has GPUs."""
    nodes: str
    """--nnodes as written."""
    script_words: tuple[str, ...]
    """SCRIPT, CONFIG.yaml, settings and flags of spmdflow.run."""
    torchrun_words: tuple[str, ...]


def main(
    words: Sequence[str] | None = None,
    become: Callable[[str, list[str]], None] = os.execv,
) -> int:
    """Check the command line and become torchrun, or run this rank; return the exit code.

    Returns 2 for a command line that cannot work, after one error on stderr. words: the arguments
    after `run`; default: sys.argv. become: replaces this process by another program.
    """
    words = sys.argv[1:] if words is None else words
    if _INSIDE_TORCHRUN in os.environ or "--inproc" in words:
        return run.main(words)
    if "--help" in words or "-h" in words:
        sys.stdout.write(_USAGE.format(seconds=_SHUTDOWN_SECONDS))
        return run.main(words)
    try:
        command = sort_command(words)
        loaded = check_command(command)
        program = torchrun_command(command, run_dir_of(loaded.cfg.run))
    except (ConfigError, CheckpointError) as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED
    sys.stdout.flush()
    become(sys.executable, program)
    return run.FINISHED  # only if `become` returns


def sort_command(words: Sequence[str]) -> CommandLine:
    """Sort the words after `run`; ConfigError for -n or --nnodes without a usable value."""
    ranks: str | None = None
    nodes = "1"
    script_words: list[str] = []
    own, torchrun_words = _split_at_dashes(words)
    rest = iter(own)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in ("-n", "--nnodes"):
            script_words.append(word)
            continue
        if not equals:
            value = next(rest, "")
        if name == "-n":
            ranks = _require_pattern(name, value, r"[1-9]\d*", "a number of ranks", "-n 4")
        else:
            expected = "a number of nodes, or the fewest and the most"
            nodes = _require_pattern(name, value, r"[1-9]\d*(:[1-9]\d*)?", expected, "--nnodes 2")
    return CommandLine(ranks, nodes, tuple(script_words), tuple(torchrun_words))


def _split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after the first `--`."""
    words = list(words)
    if "--" not in words:
        return words, []
    index = words.index("--")
    return words[:index], words[index + 1 :]


def _require_pattern(name: str, value: str, pattern: str, expected: str, example: str) -> str:
    """Return the value if it has the pattern, otherwise raise ConfigError."""
    if not re.fullmatch(pattern, value):
        raise ConfigError.of("command line", f"{name} {value}".strip(), expected, f"as {example}")
    return value


def check_command(command: CommandLine) -> Loaded:
    """Load script and settings, check them for this number of ranks, and return them.

    Imports no torch unless the script does. ConfigError for what cannot work.
    """
    arguments = run.parse_arguments(command.script_words)
    if arguments.script is None:
        expected = "one such as algos/ppo.py"
        raise ConfigError.of("command line", "no SCRIPT", expected, "--help shows the usage")
    if command.ranks is not None:
        check_ranks(int(command.ranks), Path("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    most_nodes = int(command.nodes.rpartition(":")[2])
    world_size = most_nodes * int(command.ranks or num_gpus() or 1)
    try:
        with deferring():
            loaded = load(arguments.script, arguments.config, arguments.overrides)
    except ConfigError as err:
        raise with_problems(err, world_size) from err
    check_open(loaded.cfg, world_size)
    if command.nodes == "1":  # otherwise rank 0 may be on another node
        check_metrics_port(loaded.cfg.run)
    return loaded


def check_ranks(ranks: int, devices: Path, visible: str | None) -> None:
    """Raise ConfigError for more ranks than this node has NVIDIA GPUs, without torch.

    It counts files /dev/nvidia0, ..., or the entries of CUDA_VISIBLE_DEVICES if there are fewer. A
    node without GPUs, or that shows none, may have any number of ranks. When ranks meet they are
    compared again, by the UUIDs of their devices.
    devices: the folder /dev. visible: CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    count = len(list(devices.glob("nvidia[0-9]*")))
    if visible is not None:
        entries = [word.strip() for word in visible.split(",")]
        count = min(count, len([word for word in entries if word and not word.startswith("-")]))
    if 0 < count < ranks:
        raise ConfigError.of(
            "command line",
            f"-n {ranks} on a node with {count} GPU{'s' * (count > 1)}",
            "at most one rank for each GPU",
            f"write -n {count} or omit -n; CUDA_VISIBLE_DEVICES= (empty) runs on the CPU",
        )


def num_gpus() -> int:
    """Number of GPUs of this node; torch is imported only where there is one."""
    if not any(Path(file).exists() for file in _GPU_FILES):
        return 0
    import torch

    return torch.accelerator.device_count()


def torchrun_command(command: CommandLine, run_dir: Path) -> list[str]:
    """Return the command that this process becomes.

    ConfigError for several nodes without an address where they meet.
    """
    words = list(command.torchrun_words)
    names = {word.partition("=")[0].lstrip("-").replace("_", "-") for word in words}
    has_meeting_point = any(name.startswith(_RENDEZVOUS) for name in names) or any(
        name in os.environ for name in ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
    )
    if not has_meeting_point:
        if command.nodes != "1":
            raise ConfigError.of(
                "command line",
                f"--nnodes {command.nodes} without an address where the nodes meet",
                "torchrun's --rdzv-endpoint",
                "add -- --rdzv-backend c10d --rdzv-endpoint HOST:29500, with the host of one node",
            )
        words.append("--standalone")
    if "shutdown-timeout" not in names and _has_shutdown_timeout():
        words += ["--shutdown-timeout", str(_SHUTDOWN_SECONDS)]
    ranks = command.ranks or str(num_gpus() or 1)
    words += ["--nnodes", command.nodes, "--nproc-per-node", ranks]
    program = [sys.executable, "-m", "spmdflow.torchrun", str(run_dir), *words]
    return [*program, "-m", "spmdflow.run", *command.script_words]


def _has_shutdown_timeout() -> bool:
    """Whether torchrun has --shutdown-timeout, and its environment does not set it already."""
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ or "PET_SHUTDOWN_TIMEOUT" in os.environ:
        return False
    numbers = version("torch").split(".")[:2]
    return tuple(map(int, numbers)) >= _TORCH_WITH_SHUTDOWN_TIMEOUT


if __name__ == "__main__":
    sys.exit(main())
