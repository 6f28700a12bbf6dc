"""Runs a case in a folder of its own, and returns what was measured, next to what the plan says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.bench._processor import processor_name
from scripts.learn.runs import commit_of_code
from scripts.matrix.case import MODEL, Case
from scripts.records import Record, cause_in

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900
"""Of one case; then its ranks are ended, and it has failed."""
REFUSED = 2

VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def perform(case: Case, runs: Path, hardware: Path | None) -> Record:
    """Run a case and return its record.

    state: ran, refused (settings that cannot work, with the message) or failed (with the end of the
    output).
    hardware: the file that scripts/calibrate.py wrote for this number of ranks.
    """
    folder = runs / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_dir = folder / "run"
    if case.resumes:
        shutil.copytree(runs / case.resumes / "run", run_dir)
    words = case.words(str(run_dir))
    if hardware is not None:
        words.append(f"run.hardware={hardware}")
    begun = time.time()
    code = _run(case, folder, words)
    record: Record = {
        "name": case.name,
        "key": case.key,
        "group": case.group,
        "command": case.command(),
        "ranks": case.num_ranks,
        "commit": commit_of_code(),
        "processor": processor_name(),
        "wall_seconds": round(time.time() - begun, 1),
    }
    if code != 0:
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        state = "refused" if code == REFUSED else "failed"
        return record | {"state": state, "text": cause_in(log)}
    record |= {"state": "ran", **_seconds(run_dir), "memory": _memory(case, folder)}
    record["metrics"] = _metrics(run_dir)
    if case.checks_export:
        record["export"] = _check_export(run_dir)
    return record


def _run(case: Case, folder: Path, words: list[str]) -> int:
    """Run torchrun with the ranks of `rank.py`; return its exit code. Output: folder/log.txt."""
    launcher = [sys.executable, "-m", "spmdflow.torchrun", str(folder / "run"), "--standalone"]
    launcher += [f"--nproc-per-node={case.num_ranks}", "--shutdown-timeout=60"]
    program = [str(ROOT / "scripts" / "matrix" / "rank.py"), str(folder), *words]
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)}
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [*launcher, *program],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _seconds(run_dir: Path) -> Record:
    """Seconds of a step by stage, predicted and measured (median of the steps after the first)."""
    prediction = json.loads((run_dir / "prediction.json").read_text())
    stages = {}
    for stage in prediction["stages"]:
        stages[stage["stage"]] = [stage["predicted"], stage["measured"]]
    return {"seconds": stages, "notes": prediction["notes"]}


def _memory(case: Case, folder: Path) -> Record:
    """Bytes of each phase: planned with its parts, and measured by rank."""
    ranks = []
    for rank in range(case.num_ranks):
        ranks.append(json.loads((folder / f"memory-{rank}.json").read_text()))
    planned = {}
    for phase in json.loads((folder / "run" / "prediction.json").read_text())["memory"]:
        planned[phase["phase"]] = phase
    phases = {}
    for name in sorted({name for rank in ranks for name in rank}):
        phases[name] = {
            "measured": [rank.get(name) for rank in ranks],
            "planned": planned.get(name, {}).get("planned"),
            "parts": planned.get(name, {}).get("parts", {}),
        }
    return phases


KEPT_METRICS = (
    *("rollout/drift", "rollout/drift_max", "rollout/weights_verified", "actor/grad_norm"),
    *("actor/loss", "reward_model/loss", "reward/mean", "perf/host_bytes"),
)


def _metrics(run_dir: Path) -> Record:
    """Some metrics of the last step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    return {name: last[name] for name in KEPT_METRICS if last.get(name) is not None}


def _check_export(run_dir: Path) -> Record:
    """What plain transformers and vLLM say to one prompt with the exported folder."""
    program = str(ROOT / "scripts" / "matrix" / "read_export.py")
    answers = {}
    for reader in ("transformers", "vllm"):
        done = subprocess.run(
            [sys.executable, program, reader, str(run_dir / "export" / "actor"), MODEL],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **VARIABLES},
            timeout=LIMIT_SECONDS,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"{reader} cannot read the export of {run_dir}:\n{done.stderr[-3000:]}"
            )
        answers[reader] = json.loads(done.stdout.splitlines()[-1])
    return answers
