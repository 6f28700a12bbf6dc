"""Writes the records of a run that never ran, with numbers that can be added by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = {
    "class": "ActorWorker",
    "ranks": [[0, 3]],
    "layout": "t1p1d4",
    "engine": "fsdp",
    "precision": "bfloat16",
    "generator": "vllm",
    "generator_precision": "bfloat16",
    "adapters": False,
    "sizes": {"update.mini_batch_size": 8, "update.num_epochs": 1},
    "weights": {
        "family": "llama",
        "parameters": 1300,
        "matrices": 1000,
        "head": 100,
        "attention": 10,
        "window": None,
    },
}
LAUNCH = {
    "step": 1,
    "launch": 1,
    "time": 1.0,
    "command": "python -m spmdflow.run ppo",
    "script": "algos/ppo.py",
    "versions": {"python": "3.11.7", "spmdflow": "0.2.0", "torch": "2.13.0", "vllm": "0.32.0"},
    "git": {"package": {"commit": "abc", "dirty": False}, "script": {}},
    "device": "NVIDIA H100 80GB HBM3",
    "ranks": 4,
    "nodes": 1,
    "sizes": {"data.prompts_per_step": 2, "data.samples_per_prompt": 4, "max_staleness": 1},
    "models": {"actor": MODEL},
}
"""A start on four H100."""


def totals(rows: int, prompts: int, responses: int) -> dict[str, int]:
    return {"rows": rows, "prompt_tokens": prompts, "response_tokens": responses}


def step(number: int, began: float, seconds: float = 1.5, **changes: Any) -> dict[str, Any]:
    """A step that trains 8 rows, 80 prompt and 320 response tokens, and drops 100 tokens."""
    record: dict[str, Any] = {"step": number, "launch": 1, "began": began, "seconds": seconds}
    record |= {"evaluates": False, "saves": False}
    record |= {"trained": totals(8, 80, 320), "failed": totals(1, 10, 30)}
    record |= {"dropped": totals(2, 20, 80), "stale": totals(2, 20, 60)}
    record |= {"prompt_lengths": [[10, 8]], "response_lengths": [[30, 4], [50, 4]]}
    record["passes"] = [
        {
            "call": "actor.generate_sequences",
            "kind": "generate",
            "rows": 8,
            "epochs": 1,
            "tokens": 400,
            "head_tokens": 320,
            "attended": 5000.0,
        },
        {
            "call": "actor.update_actor",
            "kind": "train",
            "rows": 8,
            "epochs": 2,
            "tokens": 400,
            "head_tokens": 320,
            "attended": 5000.0,
        },
    ]
    return record | changes


def metrics(number: int) -> dict[str, Any]:
    """Of the same step: its reward is its number."""
    return {
        "step": number,
        "time/step_seconds": 1.5,
        "reward/mean": float(number),
        "actor/reference_kl": number / 100,
        "rollout/prompt_tokens": 110.0,
        "rollout/response_tokens": 430.0,
        "rollout/age": 0.25,
        "rollout/age_max": 1.0,
    }


def write_run(
    folder: Path, steps: list[dict[str, Any]], launches: list[dict[str, Any]] | None = None
) -> Path:
    """The files of a run with these steps, and with metrics of each."""
    folder.mkdir(exist_ok=True)
    write_lines(folder / "throughput.jsonl", steps)
    write_lines(folder / "launches.jsonl", [LAUNCH] if launches is None else launches)
    write_lines(folder / "metrics.jsonl", [metrics(record["step"]) for record in steps])
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
