"""Seconds that a checkpoint costs a run: waited for, and beside training, in one run.

Rows are phases of the same steps, medians over rounds. `more_s`: seconds more than without a save;
`ratio`: of those, beside / waited for; `cpu_s`: processor seconds of all ranks, more than without;
`copy_s`: of `more_s`, in which the script waits for the copy to host memory. Steps either leave the
processors alone, as a device's do, or compute. The model has random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "algos" / "arithmetic" / "model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is saved, where, and what runs beside."""
    parser.add_argument("--ranks", type=int, default=4, metavar="N")
    parser.add_argument("--work", choices=("device", "cpu"), default="device")
    parser.add_argument("--amount", type=float, default=0.25, help="seconds of a step, or products")
    parser.add_argument("--steps", type=int, default=40, help="of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the run")
    parser.add_argument("--layers", type=int, default=12, help="of 8 M parameters")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="such as run.dir")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each phase."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        make_model(folder / "model", arguments.layers)
        beside = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(arguments.busy)
        ]
        try:
            found = one_run(arguments, folder)
        finally:
            for process in beside:
                process.kill()
    none = {key: statistics.median(values) for key, values in found["none"].items()}
    rows = []
    whole = 0.0
    for phase in ("none", "waited", "beside"):
        row = {key: statistics.median(values) for key, values in found[phase].items()}
        more = row["seconds"] - none["seconds"]
        whole = more if phase == "waited" else whole
        rows.append(
            {
                "phase": phase,
                "seconds": row["seconds"],
                "more_s": more,
                "ratio": more / whole if phase == "beside" else None,
                "cpu_s": row["cpu_s"] - none["cpu_s"],
                "copy_s": row["copy_s"] if phase == "beside" else None,
                "all_s": " ".join(f"{each:.2f}" for each in found[phase]["seconds"]),
            }
        )
    return rows


def make_model(folder: Path, num_layers: int) -> None:
    """A Qwen2 with random weights: 32,000 words, 768 wide."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2608,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder)


def one_run(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Values by phase and name."""
    keys = ("work", "amount", "steps", "rounds")
    given = json.dumps({key: getattr(arguments, key) for key in keys})
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
    command += [f"--nproc-per-node={arguments.ranks}", "-m", "spmdflow.run"]
    command += [str(Path(__file__).with_name("_saving_run.py")), str(ROOT / "algos" / "ppo.yaml")]
    command += [f"actor.model.path={folder / 'model'}", f"data.tokenizer_path={folder / 'model'}"]
    command += ["actor.model.dtype=bfloat16", f"run.dir={folder / 'run'}", "run.keep_checkpoints=1"]
    command += ["total_steps=100000", "eval_every=0", "run.sample_every=0", *arguments.settings]
    more = {"BENCH_SAVING": given, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"saving: the run failed\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in done.stdout.splitlines():
        if "SAVING {" in line:
            record = json.loads(line.partition("SAVING ")[2])
            for key, value in record.items():
                if key != "phase":
                    found[record["phase"]][key].append(value)
    return found
