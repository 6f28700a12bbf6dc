"""torchrun whose processes are forked from one that has imported torch and spmdflow already.

The agent is torchrun's own, with torchrun's arguments, and its ranks are its children, as after
the command; but starting Python anew costs five to ten seconds of a core for each rank, which a
test of numbers need not pay. A test of processes (their command lines, their memory, what kills
them, an order of sets that differs between ranks) starts the command.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PRELOAD = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "tensordict"),
    *("transformers.models.llama.modeling_llama", "numpy", "zmq", "msgpack", "omegaconf"),
    *("spmdflow.run", "spmdflow.controller.script", "spmdflow.runtime.session"),
    *("spmdflow.models.policy", "spmdflow.models.critic", "spmdflow.models.reward"),
    *("spmdflow.workers.fsdp", "megatron.core.pipeline_parallel"),
]
"""Modules that the server has imported before the first process starts, if they are installed."""


def fork_server() -> ForkServerContext | SpawnContext:
    """Starts processes by fork from the server of this process of pytest.

    With a GPU each starts anew: CUDA cannot be used in a fork of a process that asked for devices.
    """
    if torch.cuda.is_available() and os.environ.get("SIMCUDA") != "1":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def torchrun(
    arguments: Sequence[str],
    log: Path,
    *,
    seconds: float,
    status: int = 0,
    with_vllm: bool = False,
) -> None:
    """`torchrun --standalone *arguments` in the root of the checkout, its output in log.

    with_vllm: the agent imports vLLM once, for all ranks. AssertionError with the end of log if it
    ends with another status or takes longer.
    """
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = fork_server().Process(
        target=_agent, args=(list(arguments), log, variables, with_vllm)
    )
    process.start()
    try:
        process.join(seconds)
        assert process.exitcode == status, f"status {process.exitcode}: {log.read_text()[-4000:]}"
    finally:
        if process.exitcode != status:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()


def run_module(module: str, arguments: Sequence[str], log: Path, *, seconds: float) -> int:
    """`python -m module *arguments` in the root of the checkout; returns its exit status.

    Its output goes to log. AssertionError with the end of log if it takes longer.
    """
    words = [module, *arguments]
    process = fork_server().Process(target=_alone, args=(words, log, dict(os.environ)))
    process.start()
    try:
        process.join(seconds)
        assert process.exitcode is not None, f"not ended: {log.read_text()[-4000:]}"
        return process.exitcode
    finally:
        process.kill()
        process.join()


def _alone(words: list[str], log: Path, variables: Mapping[str, str]) -> None:
    _become(log, variables)
    sys.argv = words
    sys.path.insert(0, str(ROOT))
    runpy.run_module(words[0], run_name="__main__")


def _become(log: Path, variables: Mapping[str, str]) -> None:
    """Makes this process what a new one would be: a session, the root, its output, environment."""
    os.setsid()
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(variables)


def _agent(arguments: list[str], log: Path, variables: Mapping[str, str], with_vllm: bool) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    _become(log, variables)
    if with_vllm:
        from spmdflow.rollout.vllm_contract import check_contract

        check_contract()
        gc.freeze()  # so that no rank's garbage collection goes through vLLM's objects
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4().hex}"]
    options = parse_args([*words, *arguments])  # what --standalone stands for
    config = config_from_args(options)[0]
    config.start_method = "fork"
    words = options.training_script_args
    elastic_launch(config, _rank)(options.module, options.training_script, words)


def _rank(is_module: bool, program: str, words: list[str]) -> None:
    """The agent waits for a return where all is well: the program must not call os._exit."""
    sys.argv = [program, *words]
    sys.path.insert(0, str(ROOT if is_module else Path(program).parent))
    run = runpy.run_module if is_module else runpy.run_path
    try:
        run(program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
