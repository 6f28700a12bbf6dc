"""GRPO on sums by chat, TRL and spmdflow to the same number of steps: reward, KL, held-out sums.

    scripts/bench.py trl_sums --trl ~/trl/bin/python --model FOLDER --problems problems

Environment of TRL, and FOLDER: see `bench.py trl --help`. Same model, prompts in the same order, 16
sums x 8 samples of at most 16 tokens, one update of 128 rows a step, AdamW with a constant rate of
1e-5, float32. The KL has a weight of 0.001 in the loss, so that both measure it. Each trainer draws
samples by its own random numbers, so the curves agree only as two seeds do. Afterwards both models
are evaluated by algos/evaluate.py, greedily, on the same held-out sums.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench._trl_work import Work
from bench.trl import ROOT, SIDE, own_settings, run_trl, watch

KL_WEIGHT = 0.001
HELD_OUT = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where TRL, model and problems are, and how much."""
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl/venv/bin/python"), metavar="PY")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--problems", type=Path, default=ROOT / "problems", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each step that is shown; the last ones are the evaluations."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        work = Work(
            "sums",
            str(arguments.model.resolve()),
            str((arguments.problems / "sums.train.jsonl").resolve()),
            threads=arguments.threads,
            steps=arguments.steps,
            new_tokens=16,
            kl_coef=KL_WEIGHT,
            reward="last_number",
            trained=str(folder / "trl_model"),
        )
        theirs = _theirs(work, folder, arguments.trl)
        ours = _ours(work, folder)
        rows = []
        for step in range(work.steps):
            rows.append({"step": step + 1, **theirs[step], **ours[step]})
        held_out = arguments.problems / "sums.test.jsonl"
        start = _held_out(work.model, held_out, folder / "start")
        rows.append({"step": 0, "trl_held_out": start, "own_held_out": start})
        rows.append(
            {
                "step": work.steps,
                "trl_held_out": _held_out(work.trained, held_out, folder / "theirs"),
                "own_held_out": _held_out(str(folder / "run"), held_out, folder / "ours"),
            }
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def _theirs(work: Work, folder: Path, python: Path) -> list[dict[str, float]]:
    """TRL's reward and KL of each step."""
    run_trl(work, "whole", folder, python)
    logs = json.loads((folder / "trl.json").read_text())["logs"]
    return [{"trl_reward": log["reward"], "trl_kl": log["kl"]} for log in logs]


def _ours(work: Work, folder: Path) -> list[dict[str, float]]:
    """The same of a run of spmdflow."""
    settings = [
        *own_settings(replace(work, reward="last_number"), folder),
        "data.chat_template=true",
        "run.save_last=true",
        f"reward.function={SIDE / 'reward.py'}:last_number",
        "reference.compute=always",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={work.threads}", "-m", "spmdflow.run", "algos/grpo.py"]
    lines = folder / "run" / "metrics.jsonl"
    words = [*command, "algos/grpo.yaml", *settings]
    watch(words, lines, folder, threads=1, path=ROOT)
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    return [
        {"own_reward": step["reward/mean"], "own_kl": step["actor/reference_kl"]} for step in steps
    ]


def _held_out(model: str, problems: Path, run_dir: Path) -> float:
    """Greedy accuracy on the held-out sums."""
    command = [sys.executable, "-m", "spmdflow.run", "--inproc", "algos/evaluate.py"]
    settings = [
        f"run.dir={run_dir}",
        f"actor.model.path={model}",
        f"data.eval_path={problems}",
        f"data.eval_prompts={HELD_OUT}",
        *("data.eval_samples=0", "data.max_prompt_tokens=64", "data.chat_template=true"),
        "actor.rollout.max_new_tokens=16",
        f"reward.function={SIDE / 'reward.py'}:last_number",
    ]
    subprocess.run([*command, *settings], check=True, cwd=ROOT, capture_output=True)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    accuracy: float = json.loads(lines[-1])["eval/mean"]
    return accuracy
