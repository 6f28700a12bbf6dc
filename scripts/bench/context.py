"""Context parallelism on two cores: a long row on two ranks of one thread, and on one rank of two.

The model in --model has 9 heads, which two ranks do not divide; a random Llama of its sizes has 8
heads. Rounds alternate between the ways. One row for each model, length and way: seconds of a
training step (median), the same over those of one rank, seconds in messages of attention, GB sent
by all ranks, largest GB of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("_context_steps.py")
ALONE = "one rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and how often."""
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, length and way."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        eight = write_with_eight_heads(arguments.model, Path(folder) / "eight")
        models = {"9 heads": (arguments.model, ["ring", "gather"])}
        models["8 heads"] = (eight, ["ulysses", "ring", "gather"])
        for name, (model, ways) in models.items():
            for length in arguments.lengths:
                lines: dict[str, list[dict[str, float]]] = {}
                for _ in range(arguments.rounds):
                    for way in [ALONE, *ways]:
                        lines.setdefault(way, []).append(step_of(model, way, length))
                rows += rows_of(name, length, lines)
    return rows


def rows_of(
    name: str, length: int, lines: dict[str, list[dict[str, float]]]
) -> list[dict[str, Any]]:
    """The table's rows of one model and length."""
    rows = []
    alone = statistics.median(line["seconds"] for line in lines[ALONE])
    for way, steps in lines.items():
        middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        row: dict[str, Any] = {"model": name, "length": length, "way": way}
        row |= {"seconds": middle["seconds"], "ratio": middle["seconds"] / alone}
        row |= {"waiting_s": middle["waiting"], "sent_gb": middle["bytes"] / 1e9}
        rows.append(row | {"memory_gb": middle["memory"] / 1e9})
    return rows


def step_of(model: Path, way: str, length: int) -> dict[str, float]:
    """What a program of its own measured in one step."""
    ranks = 1 if way == ALONE else 2
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.jsonl"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += [f"--nproc-per-node={ranks}", str(PROGRAM), str(model)]
        words += ["auto" if way == ALONE else way, str(length), "1", str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": str(2 // ranks)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"context: {way} at {length} tokens failed\n{done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(file.read_text())
        print(f"{model.name} {way} {length}: {found['seconds']:.1f} s", file=sys.stderr)
        return found


def write_with_eight_heads(model: Path, folder: Path) -> Path:
    """A random Llama of the same sizes, but for 8 heads of 72, of which 4 for keys."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    config.num_attention_heads = 8
    config.num_key_value_heads = 4
    config.head_dim = config.hidden_size // 8
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
