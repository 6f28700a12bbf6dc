"""One rank of a run: `torchrun ... -m spmdflow.run SCRIPT [CONFIG.yaml] [key=value ...]`.

torchrun starts N equal processes. Each of them imports the script, loads and checks the settings
and joins the process group. Then every rank is an *executor*: a loop that runs the methods of its
workers. On rank 0 another thread, the *controller*, runs the script's `main(flow, cfg)` once. Calls
of the script are sent to the executors. With `--inproc` one process without torchrun does
everything, call by call, so that `breakpoint()` works anywhere.

Exit codes of a rank (torchrun itself exits with 0 or 1):

    0  the script finished
    1  the run failed: RUN_DIR/failure.json has rank, role, method and cause
    2  the settings or the script cannot work; nothing was started
    3  stopped by SIGTERM, SIGHUP or Ctrl-C, after a checkpoint (torchrun turns it into 1)

If a rank dies, the others learn it within seconds (from the controller, or because they lose it),
write their failure files and exit. torchrun stops the remaining processes. No rank waits for a dead
one. If torchrun itself is killed, its ranks end too, at any time after the first line of `main`.
With `--max-restarts` torchrun restarts the ranks, and run.resume=auto resumes from the checkpoint.

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
from typing import Any

from spmdflow.config.check import with_problems
from spmdflow.config.leaf import parts_of, schema_help
from spmdflow.config.load import Loaded, help_text, load, settings_text
from spmdflow.config.location import run_dir_of, to_yaml
from spmdflow.config.parallel import batch_algebra, generation_sizes
from spmdflow.config.schema import ModelConfig, PPOConfig, RolloutConfig, RunConfig
from spmdflow.config.source import sort_words
from spmdflow.cpu.memory import keep_freed_memory
from spmdflow.deferred_name import deferring
from spmdflow.errors import CheckpointError, ConfigError, SpmdflowError
from spmdflow.failure.launcher import AGENT_MARK, die_with_launcher
from spmdflow.failure.start_watch import StartWatch
from spmdflow.kind.generator import generator_kind
from spmdflow.kind.registry import resolve
from spmdflow.log import print_text
from spmdflow.parallel.allocator import VARIABLE, allocator_settings, settings_for
from spmdflow.plan.showing import show_planning
from spmdflow.program import check_versions, prepare
from spmdflow.runtime.process import allow_open_files, open_closed_streams
from spmdflow.weights.own_code import unused_code_text

FINISHED = 0
FAILED = 1
REFUSED = 2

_USAGE = """\
usage: torchrun [...] -m spmdflow.run SCRIPT [CONFIG.yaml] [key=value ...]
       python -m spmdflow.run --inproc SCRIPT [CONFIG.yaml] [key=value ...]
       python -m spmdflow.run SCRIPT --help

SCRIPT         Python file with main(flow, cfg), or the name of a bundled script, such as ppo
CONFIG.yaml    settings that override the script's own YAML (the script's name with .yaml).
               Its section assume (NAME: example) is read by spmdflow.plan; a run ignores it.
key=value      one setting, such as actor.optimizer.lr=3e-4; overrides the files
--inproc       run everything in one process without torchrun
--help         show this text and all settings of SCRIPT (default: of PPO), with the values that
               result from the other words of this command line

Exit codes of a rank: 0 finished, 1 failed, 2 settings rejected, 3 stopped after a checkpoint
(SIGTERM, SIGHUP, Ctrl-C). torchrun turns 2 and 3 into 1. RUN_DIR/finished exists only after the
last step.

settings (key, type, default; "here VALUE by FILE" is the value of this command line):
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
    """The ranks that torchrun gave this process; rank 0 of 1 without torchrun."""

    rank: int
    local_rank: int
    world_size: int
    restarts: int = 0
    """How often torchrun has restarted its ranks."""

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Read torchrun's variables."""
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run this rank and return its exit code. words: the arguments; default: sys.argv."""
    return run_rank(partial(_load, sys.argv[1:] if words is None else words))


def run_rank(load: Callable[[RankEnvironment], tuple[Loaded, bool] | None]) -> int:
    """Run the script that `load` returns on this rank, and return the rank's exit code.

    Under torchrun this process ends with torchrun; if torchrun has ended already, the code is 1. An
    error in settings or script is printed and gives 2.
    load: returns (script with its settings, whether to run it in this process alone), or None if
    there is nothing to run (code 0).
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
    environment = RankEnvironment.from_environment()
    try:
        command = load(environment)
    except (ConfigError, CheckpointError) as err:
        return _refuse(err, environment)
    if command is None:
        return FINISHED
    if watch is not None:
        watch.run_dir = run_dir_of(command[0].cfg.run)
    return _launch(command[0], environment, watch, inproc=command[1])


def _load(words: Sequence[str], environment: RankEnvironment) -> tuple[Loaded, bool] | None:
    """Return (script with its settings, whether --inproc) for the words of a command line.

    For --help it prints the help on rank 0 and returns None; also for a run that has finished.
    """
    arguments = parse_arguments(words)
    if "help" in arguments.flags:
        if arguments.script is None:
            settings = schema_help(PPOConfig)
        else:
            with deferring():
                settings = help_text(arguments.script, arguments.config, arguments.overrides)
        _say(environment, _USAGE + settings)
        return None
    loaded = prepare_rank(arguments, environment)
    if already_finished(loaded, environment):
        return None
    return loaded, "inproc" in arguments.flags


def already_finished(loaded: Loaded, environment: RankEnvironment) -> bool:
    """Return whether this run has finished before, with the same settings; rank 0 says so then."""
    from spmdflow.checkpoint.run_dir import finished_step  # late: it needs torch

    step = finished_step(loaded.cfg.run, to_yaml(loaded.cfg))
    if step is None:
        return False
    _say(
        environment,
        f"already finished: {run_dir_of(loaded.cfg.run)} has step {step}, its last, and the same "
        f"settings; a larger total_steps continues it, another run.dir begins a new run",
    )
    return True


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Sort the words of a command line into SCRIPT, CONFIG.yaml, overrides and flags.

    ConfigError for an unknown flag, or a word that is none of them.
    """
    flags = frozenset(_flag(word) for word in words if word.startswith("-"))
    plain = []
    for word in words:
        if not word.startswith("-"):
            plain.append(word)
    return Arguments(*sort_words(plain), flags)


def _flag(word: str) -> str:
    """Return the name of a flag, "help" or "inproc"; ConfigError for an unknown one."""
    if word not in _FLAGS:
        near = difflib.get_close_matches(word, _FLAGS, 1)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = "torchrun's own flags go before -m, or after -- of spmdflow run"
        raise ConfigError.of("command line", word, ", ".join(_FLAGS), hint)
    return _FLAGS[word]


def prepare_rank(arguments: Arguments, environment: RankEnvironment) -> Loaded:
    """Load and check script and settings, choose their `auto` values, and print them on rank 0.

    Raises ConfigError if they cannot work, if there is no script, or if the ranks do not fit the
    flags: --inproc on several ranks, or neither torchrun nor --inproc. On rank 0 also if it cannot
    listen on run.metrics_port. A run that is under way goes on without its page instead.
    """
    if arguments.script is None:
        expected = "one such as algos/ppo.py"
        do = "--help shows the usage"
        raise ConfigError.of("command line", "no SCRIPT", expected, do)
    if "inproc" in arguments.flags and environment.world_size > 1:
        where = "command line"
        got = f"--inproc on {environment.world_size} ranks"
        raise ConfigError.of(where, got, "one process", "start it without torchrun")
    if environment.world_size == 1 and "RANK" not in os.environ and "inproc" not in arguments.flags:
        raise ConfigError(
            "command line: not started by torchrun; use spmdflow run -n 4 ..., or torchrun "
            "--standalone --nproc-per-node 4 -m spmdflow.run ..., or add --inproc for one process"
        )
    try:
        loaded = load(arguments.script, arguments.config, arguments.overrides)
    except ConfigError as err:
        raise with_problems(err, environment.world_size) from err
    if not Path(arguments.script).is_file():
        _say(environment, f"script: {loaded.script.__file__}, bundled with spmdflow")
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", environment.world_size))
    with show_planning(run_dir_of(loaded.cfg.run)) if environment.rank == 0 else nullcontext():
        loaded, placed = prepare(
            loaded,
            environment.world_size,
            node_size=node_size,
            serves_page=environment.rank == 0 and not _is_under_way(loaded, environment),
        )
    warnings = check_versions(loaded.cfg)
    _say(environment, "\n".join([*warnings, *loaded.warnings, settings_text(loaded)]))
    if placed:
        _say(environment, placed)
    if own_code := unused_code_text(part.path for _, part in parts_of(loaded.cfg, ModelConfig)):
        _say(environment, own_code)
    _say(environment, batch_algebra(loaded.cfg, environment.world_size))
    return loaded


def _is_under_way(loaded: Loaded, environment: RankEnvironment) -> bool:
    """Whether torchrun has restarted the ranks of a run that had begun: it has its config.yaml.

    torchrun also restarts ranks that have refused to start.
    """
    return environment.restarts > 0 and (run_dir_of(loaded.cfg.run) / "config.yaml").exists()


def _say(environment: RankEnvironment, text: str) -> None:
    """Print text on rank 0, nothing on others; ConfigError if standard output cannot be written."""
    if environment.rank != 0:
        return
    try:
        print_text(text + "\n")
    except OSError as err:
        expected = "writable output"
        do = "free space there, or redirect it"
        raise ConfigError.of("standard output", err, expected, do) from err


def _refuse(err: SpmdflowError, environment: RankEnvironment) -> int:
    """Print the error on the first rank of each node and return exit code 2.

    Every node prints it, because a node may lack a file that others have. The other ranks of a node
    wait 5 s first, so that torchrun does not stop the printing one.
    """
    if environment.local_rank == 0:
        where = f" rank {environment.rank}:" if environment.rank else ""
        sys.stderr.write(f"spmdflow:{where} {err}\n")
        sys.stderr.flush()
        _tell_torchrun(str(err))
    else:
        time.sleep(_SILENT_SECONDS)
    return REFUSED


def _tell_torchrun(message: str) -> None:
    """Write the cause to torchrun's error file, so that its summary shows it.

    The format is that of torch's own ErrorHandler; for any other, torchrun prints three lines more.
    That summary comes last on the screen. Does nothing without torchrun.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        facts = {"py_callstack": message, "timestamp": str(int(time.time()))}
        record = {"message": {"message": message, "extraInfo": facts}}
        Path(file).write_text(json.dumps(record), encoding="utf-8")


def _launch(
    loaded: Loaded, environment: RankEnvironment, watch: StartWatch | None, *, inproc: bool
) -> int:
    """Set up logging, join the process group, run the script, and return the exit code.

    All ranks call it together; with inproc there is no process group. Errors are printed, and put
    into torchrun's summary. Heavy imports are here because errors in settings need no torch.
    """
    import torch.distributed as dist

    from spmdflow.failure.user_code import own_traceback
    from spmdflow.log import quiet_libraries, set_up_logging
    from spmdflow.parallel.device import CPU, own_device
    from spmdflow.program import run_prepared
    from spmdflow.runtime.launch import Surroundings
    from spmdflow.runtime.rendezvous import StartRefused

    set_up_logging(environment.rank)
    quiet_libraries()
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    _set_up_memory(loaded.cfg)
    try:
        if inproc:
            if watch is not None:
                watch.end()
            return run_prepared(loaded.script, loaded.cfg, ranks=(0,), inproc=True).wait()
        if own_device() != CPU:
            _take_device(environment)
        _join_group(loaded.cfg.run)
        secret = os.environ.get("SPMDFLOW_SECRET")
        on_met = watch.end if watch else lambda: None
        launcher = watch.launcher if watch else None
        surroundings = Surroundings(
            secret,
            launcher,
            owns_process=True,
            on_met=on_met,
            restarts=environment.restarts,
        )
        ranks = tuple(range(environment.world_size))
        outcome = run_prepared(loaded.script, loaded.cfg, ranks=ranks, surroundings=surroundings)
        dist.destroy_process_group()
        return outcome.wait()
    except KeyboardInterrupt:  # of a second Ctrl-C in one process, or before the ranks have met
        sys.stderr.write("spmdflow: stopped immediately by Ctrl-C\n")
        return FAILED
    except StartRefused as err:  # on all ranks, or all of a node: printed once per node
        return _refuse(err, environment)
    except SpmdflowError as err:
        message = f"rank {environment.rank}: {type(err).__name__}: {err}"
        sys.stderr.write(f"spmdflow: {message}\n{own_traceback(err)}")
        _tell_torchrun(message)
        if isinstance(err, ConfigError):
            return REFUSED
        return FAILED


def _join_group(run: RunConfig) -> None:
    """Create the default process group (gloo); all ranks call it together.

    It uses a prefix of torchrun's store that only this program uses, with run.start_seconds as
    timeout. Raises StartRefused if this node has no network address for it.
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


def _set_up_memory(cfg: Any) -> None:
    """Configure the allocator of this process: of the host on a CPU, otherwise of the device."""
    from spmdflow.parallel.device import CPU, own_device

    if own_device() == CPU:
        keep_freed_memory(os.environ)
    else:
        _configure_allocator(cfg)


def _configure_allocator(cfg: Any) -> None:
    """Configure torch's allocators of device memory and of pinned host memory.

    Segments of device memory may expand if every generator of the run takes that: micro-batches of
    changing length otherwise leave gaps that nothing fits into. Large blocks of pinned memory get
    their own size. A setting of the user is left alone. The variable is for libraries that read it,
    such as vLLM; torch may have read it already, so it is also told.
    """
    import torch

    if allocator_settings(os.environ):
        return
    settings = settings_for(torch.__version__, expandable=_takes_expandable_segments(cfg))
    if settings:
        os.environ[VARIABLE] = settings
        torch._C._accelerator_setAllocatorSettings(settings)


def _takes_expandable_segments(cfg: Any) -> bool:
    """Whether every generator of the run works with expandable segments of device memory."""
    for role, part in parts_of(cfg, object):
        rollout = getattr(part, "rollout", None)
        if not isinstance(rollout, RolloutConfig):
            continue
        takes = resolve(generator_kind(rollout.generator).takes_expandable_segments)
        if takes is not None and not takes(generation_sizes(role, part).tp):
            return False
    return True


def _take_device(environment: RankEnvironment) -> None:
    """Select the device of this local rank, or the node's only device for all of its ranks.

    Raises ConfigError for several devices but fewer than ranks on the node. Also sets environment
    variables so that NCCL's watchdog leaves failures to this program, which writes their cause
    first and then ends every process (runtime/comm.py).
    """
    import torch

    devices = torch.accelerator.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 1 < devices < ranks:
        where = "devices"
        got = f"{ranks} ranks on a node with {devices} devices"
        raise ConfigError.of(where, got, "one for each rank", "lower --nproc-per-node")
    torch.accelerator.set_device_index(environment.local_rank % devices)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


if __name__ == "__main__":
    gc.disable()  # imports leave hardly any garbage: saves a fifth of their time
    sys.exit(main())
