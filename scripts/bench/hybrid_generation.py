"""Tokens a CPU second of vLLM with its stock layers and with layers that read D training shards.

One rank, one thread, fp32, one model of 15 M parameters; each way in a process of its own, since
vLLM shares its layers for good. Greedy, 32 rows, 64 new tokens; the median of several batches after
a warm-up. Run by scripts/bench.py hybrid_generation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.rollout.vllm_blocks import is_whole, vllm_names
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Blocks, fill
from spmdflow.weights.ranks import megatron_shards

ROOT = Path(__file__).parents[2]
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
NUM_ROWS = 32
PROMPT_TOKENS = 16
NEW_TOKENS = 64
WAYS = {"stock": 0, "blocks, D = 1": 1, "blocks, D = 2": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many batches, how many turns."""
    parser.add_argument("--batches", type=int, default=5, help="batches of each process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each way, by turns")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way."""
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(folder)
        for _ in range(arguments.turns):
            for way in WAYS:
                found = _in_a_process(folder, way, arguments.batches)
                speeds[way] += found["speeds"]
                tokens[way] = found["tokens"]
    stock = statistics.median(speeds["stock"])
    return [
        {
            "layers": way,
            "tokens per CPU second": statistics.median(speeds[way]),
            "of stock": statistics.median(speeds[way]) / stock,
            "equal tokens": tokens[way] == tokens["stock"],
        }
        for way in WAYS
    ]


def _write_model(folder: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL, initializer_range=0.1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def _in_a_process(folder: str, way: str, batches: int) -> dict[str, Any]:
    out = Path(folder) / "found.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, folder, str(WAYS[way]), str(batches), str(out)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def run(folder: str, num_shards: int, batches: int) -> dict[str, Any]:
    """What one process measures; num_shards 0: stock layers."""
    cfg = RolloutConfig(engine="vllm", max_batch_size=NUM_ROWS, weights="copy")
    generator = VllmGenerator(cfg, folder, torch.device("cpu"), Replica.alone())
    writer = Blocks(generator.blocks())
    for name, values in whole_values(folder).items():
        writer.write(name, Box.of_shape(values.shape), values)
    generator.renew(0)
    if num_shards:
        shards = shards_of(folder, num_shards)
        generator.share(shards, tp_size=num_shards, vocab_multiple=64)
        generator.mark_shared(0)
    ids = torch.arange(NUM_ROWS * PROMPT_TOKENS).view(NUM_ROWS, PROMPT_TOKENS)
    prompts = ragged_from_rows(list(ids * 7 % 2048), dtype=torch.int64)
    sampling = Sampling(NEW_TOKENS, greedy=True)
    speeds = []
    tokens = []
    for _ in range(batches + 1):
        started = time.process_time()
        batch = generator.generate(prompts, sampling, list(range(NUM_ROWS)))
        seconds = time.process_time() - started
        tokens = batch["responses"].values().tolist()
        speeds.append(len(tokens) / seconds)
    generator.close()
    return {"speeds": speeds[1:], "tokens": tokens}


def whole_values(folder: str) -> dict[str, Tensor]:
    """The model's tensors by Hugging Face name."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def shards_of(folder: str, num_shards: int) -> dict[str, list[Tensor]]:
    """The tensors of so many tensor-parallel training ranks."""
    values = whole_values(folder)
    arch = Architecture.from_folder(folder)
    names = vllm_names(arch)
    found: dict[str, list[Tensor]] = {}
    for shard in range(num_shards):
        table = megatron_shards(
            arch, tp_size=num_shards, tp_rank=shard, pp_size=1, pp_rank=0, vocab_multiple=64
        )
        local = {name: torch.empty(tensor.shape) for name, tensor in table.items()}
        fill(local, table, lambda name, box: values[name][box.slices()])
        for name, tensor in local.items():
            key = names[name]
            if key not in found or not is_whole(key):
                found.setdefault(key, []).append(tensor)
    return found


if __name__ == "__main__":
    folder, num_shards, batches, out = sys.argv[1:]
    torch.set_num_threads(1)
    Path(out).write_text(json.dumps(run(folder, int(num_shards), int(batches))))
