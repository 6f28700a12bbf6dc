"""Peak host memory and bytes read of building engines over a random-weight model.

python startup_memory.py write FOLDER SIZE          a Qwen2 of a SIZE of `SIZES`, in bfloat16
torchrun --nproc-per-node 4 startup_memory.py measure FOLDER OUTPUT CASE...

CASE: KIND:LAYOUT:DTYPE:trains or KIND:LAYOUT:DTYPE:frozen, on the first ranks of the world.
OUTPUT: JSON, {case: a row for each rank}. Bytes over those before the case, after all imports.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.models.base import axis_groups
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import HuggingFaceFolder
from spmdflow.weights.table import parameters
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine, engine_of

AXES = ("tp", "pp", "dp", "replica", "embedding")
SIZES = {
    # layers, hidden, ffn, heads, key-value heads, vocabulary
    "1.5B": (28, 1536, 8960, 12, 2, 151936),
    "0.1B": (12, 768, 2048, 12, 4, 32768),
}


def write(folder: Path, size: str) -> None:
    """A folder of random weights: one tensor at a time on the host."""
    layers, hidden, ffn, heads, kv_heads, vocabulary = SIZES[size]
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for part in parameters(Architecture.from_config(config)):
        file = f"{part.name}.safetensors"
        tensor = torch.rand(part.shape, dtype=torch.bfloat16)
        save_file({part.name: tensor}, folder / file, metadata={"format": "pt"})
        weight_map[part.name] = file
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


class PeakMemory:
    """Highest RssAnon of this process while the block runs, over that before it."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed memory is used again, and not seen
        self._before = self._highest = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        return self._highest - self._before

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._highest = max(self._highest, self._now())

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def share_of(engine: TrainEngine) -> int:
    """Bytes of the parameters, gradient buffers and optimizer states that the engine keeps."""
    optimizer: Any = engine.optimizer
    parts = getattr(engine, "_modules", None) or [engine._module]
    held = [x for part in parts for x in part.parameters()]
    tensors = [*held, *(x for _, x, _ in engine.state_blocks())]
    for ddp in getattr(optimizer, "ddps", ()):
        tensors += [buffer.grad_data for buffer in ddp.buffers]
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def count_reads() -> list[int]:
    """Bytes of every box that this process reads of folders from now on."""
    found = list[int]()
    read = HuggingFaceFolder.read

    def counted(folder: HuggingFaceFolder, name: str, box: Box) -> Tensor:
        values = read(folder, name, box)
        found.append(values.nbytes)
        return values

    HuggingFaceFolder.read = counted  # type: ignore[method-assign]
    return found


def measure(folder: Path, output: Path, cases: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = GroupTable(dist.get_rank(), timeout_seconds=600)
    found = {}
    reads = count_reads()
    for case in ["fsdp:1:float32:trains", "megatron:t1:float32:trains", *cases]:
        kind, sizes, dtype, what = case.split(":")
        size = {letter: int(number) for letter, number in _parts(sizes)}
        pp_size = size.get("p", 1)
        tp_size = size.get("t", 1)
        dp_size = size.get("d", 1)
        ranks = tuple(range(pp_size * tp_size * dp_size))
        layout = Layout(ranks, pp_size=pp_size, dp_size=dp_size, tp_size=tp_size)
        groups.make([GroupSpec(each, "compute", "gloo") for each in axis_groups(layout, AXES)])
        # the first two cases import and start everything that is needed, on a tiny model
        path = folder if case in cases else TINY
        row = {}
        if rank in ranks:
            context = WorkerContext("actor", layout, rank, groups, torch.device("cpu"), seed=0)
            cfg = SimpleNamespace(
                engine=EngineConfig(kind=kind), model=ModelConfig(path=str(path), dtype=dtype)
            )
            if what == "trains":
                cfg.optimizer = OptimizerConfig()
            reads.clear()
            with PeakMemory() as peak:
                engine = engine_of(cfg, context, head="causal_lm")
            assert all(not x.is_meta for _, x, _ in engine.state_blocks())
            row = {"peak": peak.num_bytes, "share": share_of(engine), "read": sum(reads)}
            del engine
            gc.collect()
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, row)
        if case in cases:
            found[case] = rows[: len(ranks)]
    if rank == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


TINY = Path(__file__).parents[3] / "algos/arithmetic/model"


def _parts(sizes: str) -> list[tuple[str, str]]:
    if sizes.isdigit():
        return [("d", sizes)]
    return [(part[0], part[1:]) for part in sizes.split(".")]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3])
    else:
        measure(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
