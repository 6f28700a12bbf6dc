"""One rank of a run: `torchrun ... -m spmdflow.run SCRIPT [CONFIG.yaml] [key=value ...]`.

torchrun starts N equal processes. Each of them imports the script, loads and checks the settings
and joins the process group. Then every rank serves as an *executor*: a loop that runs the methods
of the workers living there. On rank 0 one more thread, the *controller*, runs the script's
`main(flow, cfg)` once; what the script calls is sent to the executors. With `--inproc` one process
without torchrun does everything, call by call, so that `breakpoint()` works anywhere.

Exit codes of a rank (torchrun itself exits with 0 or 1):

    0  the script finished
    1  the run failed: RUN_DIR/failure.json names rank, role, method and cause
    2  refused: settings or script cannot work; nothing was started
    3  stopped by SIGTERM, SIGHUP or Ctrl-C, after a checkpoint (torchrun makes 1 of it)

When a rank dies, the others learn it within seconds (from the controller, or by losing it),
write what they know and exit; torchrun stops what is left. No rank waits for a dead one. When
torchrun itself is killed, its ranks end too, at any time after the first line of `main`. With
`--max-restarts` torchrun starts the ranks again, and run.resume=auto goes on from the checkpoint.

An error in settings is printed once per node. The node's other ranks wait 5 s before they exit:
torchrun stops every rank as soon as one has failed, and would stop the one that prints.
"""

from __future__ import annotations

import difflib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from spmdflow.config.check import with_problems
from spmdflow.config.leaf import parts_of, schema_help
from spmdflow.config.load import Loaded, help_text, load, settings_text
from spmdflow.config.location import run_dir_of
from spmdflow.config.parallel import batch_algebra
from spmdflow.config.schema import ModelConfig, PPOConfig, RunConfig
from spmdflow.config.source import sort_words
from spmdflow.cpu.memory import keep_freed_memory
from spmdflow.errors import CheckpointError, ConfigError, SpmdflowError
from spmdflow.failure.launcher import AGENT_MARK, die_with_launcher
from spmdflow.failure.start_watch import StartWatch
from spmdflow.log import print_text
from spmdflow.plan.showing import show_planning
from spmdflow.program import prepare
from spmdflow.runtime.process import allow_open_files, open_closed_streams
from spmdflow.weights.own_code import unused_code_text

FINISHED = 0
FAILED = 1
REFUSED = 2

_USAGE = """\
usage: torchrun [...] -m spmdflow.run SCRIPT [CONFIG.yaml] [key=value ...]
       python -m spmdflow.run --inproc SCRIPT [CONFIG.yaml] [key=value ...]
       python -m spmdflow.run SCRIPT --help

SCRIPT         Python file with main(flow, cfg), or a bundled script by its name, such as ppo
CONFIG.yaml    settings; they lie over those of the script's own YAML (its name with .yaml)
               its section assume (NAME: example) is for spmdflow.plan; a run ignores it
key=value      one setting, such as actor.optimizer.lr=3e-4; wins over the files
--inproc       one process, no torchrun, every call runs at once
--help         this text and every setting of SCRIPT (of PPO without one), with the value that it
               has with the other words of this command line

exit codes of a rank: 0 finished, 1 failed, 2 refused, 3 stopped after a checkpoint (by SIGTERM,
SIGHUP, Ctrl-C). torchrun makes 1 of 2 and 3; RUN_DIR/finished exists only after the last step

settings (key, type, default; here VALUE by FILE: what this command line would run with):
"""
_FLAGS = {"--help": "help", "-h": "help", "--inproc": "inproc"}
_SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class Arguments:
    """The parsed command line."""

    script: str | None
    config: str | None
    overrides: tuple[str, ...]
    flags: frozenset[str]


@dataclass(frozen=True)
class RankEnvironment:
    """Where torchrun put this process; rank 0 of 1 without torchrun."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Read torchrun's variables."""
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run this rank and return its exit code; words: the arguments, by default sys.argv's."""
    return run_rank(partial(_load, sys.argv[1:] if words is None else words))


def run_rank(load: Callable[[RankEnvironment], tuple[Loaded, bool] | None]) -> int:
    """Run what load(place) gives: a script with its settings, and whether in this process alone.

    None: nothing is to be run. Returns the exit code of this rank.
    """
    open_closed_streams()
    has_agent = AGENT_MARK in os.environ
    launcher = die_with_launcher() if has_agent else None
    if has_agent and launcher is None:
        sys.stderr.write(
            f"spmdflow: got process {os.getppid()} as parent, expected torchrun; torchrun ended "
            f"while its ranks started: start the command again\n"
        )
        return FAILED
    watch = StartWatch(launcher) if launcher is not None else None
    allow_open_files()
    place = RankEnvironment.from_environment()
    try:
        found = load(place)
    except (ConfigError, CheckpointError) as err:
        return _refuse(err, place)
    if found is None:
        return FINISHED
    if watch is not None:
        watch.run_dir = run_dir_of(found[0].cfg.run)
    return _launch(found[0], place, watch, inproc=found[1])


def _load(words: Sequence[str], place: RankEnvironment) -> tuple[Loaded, bool] | None:
    arguments = parse_arguments(words)
    if "help" in arguments.flags:
        if arguments.script is None:
            settings = schema_help(PPOConfig)
        else:
            settings = help_text(arguments.script, arguments.config, arguments.overrides)
        _say(place, _USAGE + settings)
        return None
    return prepare_rank(arguments, place), "inproc" in arguments.flags


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Sort the words of a command line into SCRIPT, CONFIG.yaml, overrides and flags."""
    flags = frozenset(_flag(word) for word in words if word.startswith("-"))
    plain = []
    for word in words:
        if not word.startswith("-"):
            plain.append(word)
    return Arguments(*sort_words(plain), flags)


def _flag(word: str) -> str:
    if word not in _FLAGS:
        near = difflib.get_close_matches(word, _FLAGS, 1)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = "torchrun's own flags go before -m"
        raise ConfigError.of("command line", word, ", ".join(_FLAGS), hint)
    return _FLAGS[word]


def prepare_rank(arguments: Arguments, place: RankEnvironment) -> Loaded:
    """Load and check everything; ConfigError for what cannot work."""
    if arguments.script is None:
        expected = "one such as algos/ppo.py"
        do = "--help shows the usage"
        raise ConfigError.of("command line", "no SCRIPT", expected, do)
    if "inproc" in arguments.flags and place.world_size > 1:
        where = "command line"
        got = f"--inproc on {place.world_size} ranks"
        raise ConfigError.of(where, got, "one process", "start it without torchrun")
    if place.world_size == 1 and "RANK" not in os.environ and "inproc" not in arguments.flags:
        raise ConfigError(
            "command line: got no torchrun around this process, expected torchrun or --inproc; "
            "write torchrun --standalone --nproc-per-node 4 -m spmdflow.run ... or add --inproc"
        )
    try:
        loaded = load(arguments.script, arguments.config, arguments.overrides)
    except ConfigError as err:
        raise with_problems(err, place.world_size) from err
    if not Path(arguments.script).is_file():
        _say(place, f"script: {loaded.script.__file__}, bundled with spmdflow")
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
    with show_planning(run_dir_of(loaded.cfg.run)) if place.rank == 0 else nullcontext():
        loaded, placed = prepare(loaded, place.world_size, node_size=node_size)
    _say(place, settings_text(loaded))
    if placed:
        _say(place, placed)
    if own_code := unused_code_text(part.path for _, part in parts_of(loaded.cfg, ModelConfig)):
        _say(place, own_code)
    _say(place, batch_algebra(loaded.cfg, place.world_size))
    return loaded


def _say(place: RankEnvironment, text: str) -> None:
    """Print text on rank 0; ConfigError if standard output does not take it."""
    if place.rank != 0:
        return
    try:
        print_text(text + "\n")
    except OSError as err:
        expected = "a place to write to"
        do = "free space there, or send it elsewhere"
        raise ConfigError.of("standard output", err, expected, do) from err


def _refuse(err: SpmdflowError, place: RankEnvironment) -> int:
    """Tell the user once per node; a node may lack a file that the others have."""
    if place.local_rank == 0:
        where = f" rank {place.rank}:" if place.rank else ""
        sys.stderr.write(f"spmdflow:{where} {err}\n")
        sys.stderr.flush()
        _tell_torchrun(str(err))
    else:
        time.sleep(_SILENT_SECONDS)
    return REFUSED


def _tell_torchrun(message: str) -> None:
    """Put the cause into torchrun's own summary, which comes last on the screen."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        text = json.dumps({"message": message, "timestamp": str(int(time.time()))})
        Path(file).write_text(text, encoding="utf-8")


def _launch(
    loaded: Loaded, place: RankEnvironment, watch: StartWatch | None, *, inproc: bool
) -> int:
    """Join the other ranks and run. Imports are here: errors in settings need no torch."""
    import torch.distributed as dist

    from spmdflow.failure.user_code import own_traceback
    from spmdflow.log import quiet_libraries, set_up_logging
    from spmdflow.parallel.device import CPU, own_device
    from spmdflow.program import run_prepared
    from spmdflow.runtime.launch import Surroundings
    from spmdflow.runtime.rendezvous import StartRefused

    set_up_logging(place.rank)
    quiet_libraries()
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if own_device() == CPU:
        keep_freed_memory()
    try:
        if inproc:
            if watch is not None:
                watch.end()
            return run_prepared(loaded.script, loaded.cfg, ranks=(0,), inproc=True).wait()
        if own_device() != CPU:
            _take_device(place)
        _join_group(loaded.cfg.run)
        secret = os.environ.get("SPMDFLOW_SECRET")
        on_met = watch.end if watch else lambda: None
        launcher = watch.launcher if watch else None
        surroundings = Surroundings(secret, launcher, owns_process=True, on_met=on_met)
        ranks = tuple(range(place.world_size))
        outcome = run_prepared(loaded.script, loaded.cfg, ranks=ranks, surroundings=surroundings)
        dist.destroy_process_group()
        return outcome.wait()
    except KeyboardInterrupt:  # of a second Ctrl-C in one process, or before the ranks have met
        sys.stderr.write("spmdflow: stopped at once by Ctrl-C\n")
        return FAILED
    except StartRefused as err:  # by all ranks, or all of a node: told once for each node
        return _refuse(err, place)
    except SpmdflowError as err:
        message = f"rank {place.rank}: {type(err).__name__}: {err}"
        sys.stderr.write(f"spmdflow: {message}\n{own_traceback(err)}")
        _tell_torchrun(message)
        if isinstance(err, ConfigError):
            return REFUSED
        return FAILED


def _join_group(run: RunConfig) -> None:
    """Create the default process group, under a prefix of torchrun's store that only we use.

    StartRefused if this node has no address for it.
    """
    import torch.distributed as dist

    from spmdflow.parallel.device import CPU, own_device
    from spmdflow.parallel.group import COLLECTIVE_SECONDS
    from spmdflow.runtime.rendezvous import StartingRank, own_store, refusal_without_address

    start = timedelta(seconds=run.start_seconds)
    shared, rank, world_size = next(dist.rendezvous("env://", timeout=start))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    origin = str(Path(error_file).parent.parent.parent) if error_file else ""
    me = StartingRank(rank, int(os.environ.get("GROUP_RANK", 0)), origin)
    store = own_store(shared, me, world_size, seconds=run.start_seconds)
    store.set_timeout(start)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=start
        )
    except RuntimeError as err:
        refusal = refusal_without_address(err, os.environ.get("GLOO_SOCKET_IFNAME", ""))
        if refusal is None:
            raise
        raise refusal from err
    if own_device() != CPU:  # NCCL's communicators are made in the first calls
        store.set_timeout(timedelta(seconds=COLLECTIVE_SECONDS))


def _take_device(place: RankEnvironment) -> None:
    """Select the local rank's device, or the only one there is; ConfigError if there are too few.

    NCCL's watchdog is told to leave failures to this program, which writes their cause first and
    then ends every process (runtime/comm.py).
    """
    import torch

    devices = torch.accelerator.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 1 < devices < ranks:
        where = "devices"
        got = f"{ranks} ranks on a node with {devices} devices"
        raise ConfigError.of(where, got, "one for each rank", "lower --nproc-per-node")
    torch.accelerator.set_device_index(place.local_rank % devices)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


if __name__ == "__main__":
    gc.disable()  # imports leave hardly any garbage: saves a fifth of their time
    sys.exit(main())
