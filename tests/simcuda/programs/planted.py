"""Device bugs, planted one at a time in an actor that updates, syncs and generates on two devices.

    python tests/simcuda/programs/planted.py FOLDER      prints {bug: how it was noticed} as JSON

A bug is a change of one line of one function; "" is the program as it is. Run on simulated devices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

from tests.distributed.ranks import RanksFailed, run_ranks
from tests.forked import PRELOAD
from tests.gpu.rounds import follow
from tests.rollout_reference import write_family

_PRELOADED = ["tests.gpu.rounds", "spmdflow.models"]


@dataclass(frozen=True)
class Bug:
    """A line as it is, and as somebody might have written it."""

    module: str
    function: str
    right: str
    wrong: str


BUGS = {
    "sums of samples on the host": Bug(
        "spmdflow.workers.engine",
        "TrainEngine.dp_sums",
        "to_device(torch.tensor(on_host, dtype=torch.float64), self.device)",
        "torch.tensor(on_host, dtype=torch.float64)",
    ),
    "positions of a response on the host": Bug(
        "spmdflow.workers.micro_batch",
        "_on_device",
        '"targets", "predicting", ',
        '"targets", ',
    ),
    "tokens of a micro-batch not moved": Bug(
        "spmdflow.workers.micro_batch",
        "_on_device",
        '("input_ids", ',
        "(",
    ),
    "weights of a hash on the host": Bug(
        "spmdflow.blocks.hash",
        "_weights",
        "torch.arange(start + 1, stop + 1, device=device)",
        "torch.arange(start + 1, stop + 1)",
    ),
    "hashes gathered from the host": Bug(
        "spmdflow.workers.engine",
        "TrainEngine.shard_hashes",
        "torch.zeros(len(shapes), dtype=torch.int64, device=self.device)",
        "torch.zeros(len(shapes), dtype=torch.int64)",
    ),
    "moments that nobody wrote": Bug(
        "spmdflow.workers.optimizer",
        "TorchOptimizer.use",
        "torch.full_like(parameter.detach(), value)",
        "torch.empty_like(parameter.detach())",
    ),
    "gradient norm on the host": Bug(
        "spmdflow.workers.optimizer",
        "squared_norm",
        "torch.zeros((), dtype=torch.float64, device=device)",
        "torch.zeros((), dtype=torch.float64)",
    ),
    "end tokens on the first device": Bug(
        "spmdflow.rollout.builtin",
        "BuiltinGenerator.__init__",
        "dtype=torch.int64, device=device)",
        'dtype=torch.int64, device="cuda:0")',
    ),
    "seeds on the host": Bug(
        "spmdflow.rollout.live_rows",
        "LiveRows.begin",
        "torch.tensor(facts, device=device)",
        "torch.tensor(facts)",
    ),
    "prompts not moved": Bug(
        "spmdflow.cpu.llama",
        "LlamaForward.prefill",
        "to_device(pad_sequence(prompts, batch_first=True), self._device)",
        "pad_sequence(prompts, batch_first=True)",
    ),
    "a mask that begins with what was there": Bug(
        "spmdflow.cpu.llama",
        "LlamaForward.step",
        "torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)",
        "torch.empty(seen.shape, dtype=self._dtype, device=seen.device)",
    ),
    "which rows begin with a prompt, on the host": Bug(
        "spmdflow.cpu.shared_prompts",
        "SharedPrompts.of",
        "to_device(torch.cat(parts), device)",
        "torch.cat(parts)",
    ),
    "noise on the host": Bug(
        "spmdflow.rollout.sampling",
        "invert",
        "torch.arange(_BLOCK, device=probs.device)",
        "torch.arange(_BLOCK)",
    ),
    "staging on the host": Bug(
        "spmdflow.hybrid_engine.stream",
        "WeightStream.run",
        "dtype=self._dtype, device=self._device)",
        "dtype=self._dtype)",
    ),
}


def changed(bug: Bug) -> tuple[Any, CodeType]:
    """The function, and the code that it has with the wrong line; LookupError if it has no such."""
    module = import_module(bug.module)
    path = Path(str(module.__file__))
    source = path.read_text()
    if bug.right not in source:
        raise LookupError(f"{path} has no {bug.right}")
    code = compile(source.replace(bug.right, bug.wrong), str(path), "exec")
    function: Any = module
    for name in bug.function.split("."):
        function = getattr(function, name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    function = getattr(function, "__func__", function)  # of a class method
    return function, _code_of(code, bug.function)


def _code_of(code: CodeType, qualified_name: str) -> CodeType:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == qualified_name:
                return each
            if qualified_name.startswith(f"{each.co_qualname}."):
                return _code_of(each, qualified_name)
    raise LookupError(qualified_name)


def follow_with(name: str, path: str) -> list[dict[str, float]]:
    """Rounds of an actor with a bug; every rank plants it in itself."""
    if name:
        function, code = changed(BUGS[name])
        function.__code__ = code
    return follow("cuda", path, {"engine.kind": "fsdp"})


def noticed(run: Callable[[], list[list[dict[str, float]]]]) -> str:
    """The first error, or a response or a hash that is not the trainer's; "" for neither."""
    try:
        ranks = run()
    except RanksFailed as err:
        lines = [line.strip() for line in str(err).splitlines() if "Error" in line]
        return next((line for line in lines if "ChildFailed" not in line), str(err)[-300:])
    for found in (found for rank in ranks for found in rank):
        if found["verified"] != 1 or not found["gap"] <= 5e-3 or not found["worse"] <= 5e-3:
            return f"another result: {found}"
    return ""


def main() -> int:
    """Plant each bug."""
    path = write_family(Path(sys.argv[1]) / "model", "llama", max_position_embeddings=256)
    PRELOAD.extend(_PRELOADED)
    for bug in BUGS.values():
        function, code = changed(bug)
        assert function.__code__ != code
    found = {
        name: noticed(lambda name=name: run_ranks(follow_with, 2, name, path, seconds=280))
        for name in ("", *BUGS)
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
