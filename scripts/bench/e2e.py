"""Predicted against measured seconds of a step: one PPO workload in configurations drawn by seed.

Every configuration is one that `spmdflow.plan` finds nothing wrong with. Runs are interleaved: each
repeat runs all of them in an order of its own. A finished run is kept as a line of --runs at once,
so the measurement can be stopped and taken up again (--seconds, or Ctrl-C); a file of other
settings is refused. A run's seconds are the median of its steps, the first left out. Predicted
seconds are the plan's from the settings alone, made after the last run; nothing is fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench._configuration import Configuration, drawn
from bench._correlation import chosen, spearman, split_half
from spmdflow.config.load import load
from spmdflow.errors import ConfigError, PlanError
from spmdflow.plan.report import plan
from spmdflow.plan.trace import TraceSettings
from spmdflow.plan.workload import hardware_of, nodes_of

ROOT = Path(__file__).parents[2]
ALGORITHM = ROOT / "algos" / "ppo.py"
BUNDLED = ROOT / "algos" / "arithmetic" / "model"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""12.6 M random parameters: forty times the bundled model, so that computing counts."""
ROLES = ("actor", "critic", "reference")
WORKLOAD = (
    "data.prompts_per_step=128",
    "actor.rollout.max_new_tokens=8",
    "actor.rollout.verify_every=0",
    *(f"{role}.engine.micro_batch_rows=32" for role in ROLES),
    *(f"{role}.update.mini_batch_size=64" for role in ROLES[:2]),
    *(f"{role}.optimizer.schedule=constant" for role in ROLES[:2]),
    *(f"{role}.optimizer.warmup_steps=0" for role in ROLES[:2]),
    *(f"{role}.optimizer.lr=1.0e-6" for role in ROLES[:2]),  # lengths of responses stay
    "eval_every=0",
    "save_every=0",
    "run.save_last=false",
    "run.sample_every=0",
)
RUN_SECONDS = 300
Runs = dict[str, dict[int, float]]
"""Title -> repeat -> seconds of a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much, and with which coefficients."""
    parser.add_argument("--configurations", type=int, default=24, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="runs of each")
    parser.add_argument("--steps", type=int, default=4, metavar="S", help="of a run, at least 2")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing and the orders")
    parser.add_argument(
        "--hardware", default="cpu", metavar="FILE", help="of calibrate.py --name cpu..."
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "e2e.jsonl", metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw measured over predicted")
    parser.add_argument("--seconds", type=float, metavar="T", help="start no run after T seconds")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each configuration, the fastest first; the verdict is printed."""
    if arguments.steps < 2 or arguments.configurations < 2:
        sys.exit("e2e: got less than 2 steps or configurations, expected at least 2; raise it")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model)
        found = valid(arguments, model)
        runs = load_runs(arguments.runs, key_of(arguments))
        run_missing(arguments, list(found), model, runs)
    rows = [
        _row(configuration, seconds, runs[configuration.title])
        for configuration, seconds in found.items()
        if configuration.title in runs
    ]
    if len(rows) < 2:
        sys.exit(f"e2e: got {len(rows)} configurations with a run, expected 2; run it longer")
    full = [c for c in found if len(runs.get(c.title, ())) == arguments.repeats]
    print(verdict(rows, [list(runs[c.title].values()) for c in full], len(found)))
    if arguments.plot:
        draw(rows, arguments.plot)
    return sorted(rows, key=lambda row: float(row["measured_s"]))


def valid(arguments: argparse.Namespace, model: Path) -> dict[Configuration, float]:
    """The first N drawn configurations without a problem, and their predicted seconds."""
    found: dict[Configuration, float] = {}
    for configuration in drawn(arguments.seed):
        seconds = predicted(configuration, model, arguments)
        if seconds is not None:
            found[configuration] = seconds
        if len(found) == arguments.configurations:
            break
    return found


def predicted(
    configuration: Configuration, model: Path, arguments: argparse.Namespace
) -> float | None:
    """Seconds of a step by the plan; None: the plan refuses it or finds something wrong."""
    hardware = hardware_of(arguments.hardware, configuration.num_ranks)
    if not hardware.is_cpu:
        sys.exit(
            f"e2e: got hardware {hardware.name}, expected one of processors; write it with "
            f"calibrate.py --name cpu_here"
        )
    world = tuple(range(configuration.num_ranks))
    settings = TraceSettings(world=world, nodes=nodes_of(world, hardware), backend="gloo")
    try:
        words = _settings(configuration, model, arguments.steps)
        loaded = load(str(ALGORITHM), None, words)
        report = plan(loaded.script, loaded.cfg, settings, hardware)
    except (ConfigError, PlanError):
        return None
    return None if report.problems else report.prediction.seconds


def run_missing(
    arguments: argparse.Namespace, found: list[Configuration], model: Path, runs: Runs
) -> None:
    """Run what the file has not, repeat by repeat; a run that fails is told and left out."""
    started = time.monotonic()
    for repeat in range(arguments.repeats):
        order = random.Random(arguments.seed * 1000 + repeat).sample(found, len(found))
        for configuration in order:
            if repeat in runs.get(configuration.title, {}):
                continue
            if arguments.seconds is not None and time.monotonic() - started >= arguments.seconds:
                return
            try:
                seconds = _run(configuration, model, arguments.steps)
            except (subprocess.SubprocessError, OSError, ValueError) as err:
                print(f"failed: {configuration.title}: {err}", file=sys.stderr)
                continue
            runs.setdefault(configuration.title, {})[repeat] = seconds
            keep_run(arguments.runs, key_of(arguments), configuration.title, repeat, seconds)


def key_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What runs of one file share."""
    return {"steps": arguments.steps, "workload": list(WORKLOAD), "model": SIZES}


def keep_run(path: Path, key: dict[str, Any], title: str, repeat: int, seconds: float) -> None:
    """Append a finished run; the first line of a file is the key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if is_new:
            file.write(json.dumps(key) + "\n")
        line = {"configuration": title, "repeat": repeat, "seconds": seconds}
        file.write(json.dumps(line | {"load": os.getloadavg()[0]}) + "\n")


def load_runs(path: Path, key: dict[str, Any]) -> Runs:
    """The runs of a file, none if there is no file. ValueError if they are of another workload."""
    if not path.exists():
        return {}
    first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if first != key:
        raise ValueError(
            f"{path}: got runs of {first}, expected {key}; give another --runs FILE or the same "
            f"settings"
        )
    runs: Runs = {}
    for line in lines:
        runs.setdefault(line["configuration"], {})[line["repeat"]] = line["seconds"]
    return runs


def verdict(rows: list[dict[str, Any]], repeats: list[list[float]], wanted: int) -> str:
    """Correlation, its ceiling and what the chosen plan loses, as lines.

    repeats: of the configurations that have all their runs.
    """
    guesses, times = ([float(row[k]) for row in rows] for k in ("predicted_s", "measured_s"))
    found = spearman(guesses, times)
    lines = [f"{len(rows)} of {wanted} configurations have runs, {len(repeats)} all of them"]
    if len(repeats) == len(rows) and len(repeats[0]) > 1:
        ceiling = split_half(repeats)
        lines.append(
            f"Spearman {found:.3f}, split-half ceiling {ceiling:.3f}, part of it "
            f"{found / ceiling:.3f} (aim 0.9)"
        )
    else:
        lines.append(f"Spearman {found:.3f}; no ceiling before all have all their repeats (2)")
    choice = chosen(guesses, times)
    lines.append(
        f"chosen: {rows[choice.index]['configuration']}, rank {choice.rank} of {len(rows)}, "
        f"{choice.loss:.1%} behind the best (aim 5 %)"
    )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Every configuration as a point, its slowest and fastest run as a bar."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
    for ranks, colour in (("1", "tab:green"), ("2", "tab:blue"), ("4", "tab:orange")):
        some = [row for row in rows if row["configuration"].startswith(ranks + " ")]
        if not some:
            continue
        mean = [row["measured_s"] for row in some]
        below = [row["measured_s"] - row["fastest_s"] for row in some]
        above = [row["slowest_s"] - row["measured_s"] for row in some]
        axes.errorbar(
            [row["predicted_s"] for row in some],
            mean,
            yerr=[below, above],
            fmt="o",
            color=colour,
            capsize=2,
            label=f"{ranks} rank{'s' * (ranks != '1')} on {os.cpu_count()} cores",
        )
    axes.set_xlabel("predicted seconds of a step")
    axes.set_ylabel("measured: mean, fastest to slowest run")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_model(folder: Path) -> None:
    """A random model of SIZES with the bundled model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(BUNDLED)
    for name, size in SIZES.items():
        setattr(config, name, size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in BUNDLED.glob("tokenizer*"):
        shutil.copy(file, folder)


def _settings(configuration: Configuration, model: Path, steps: int) -> list[str]:
    models = [f"{role}.model.path={model}" for role in ROLES]
    return [*WORKLOAD, *models, *configuration.settings, f"total_steps={steps}"]


def _run(configuration: Configuration, model: Path, steps: int) -> float:
    """Median seconds of a step; the first is left out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={configuration.num_ranks}", "-m", "spmdflow.run"]
        command += [str(ALGORITHM), *_settings(configuration, model, steps)]
        _finish([*command, f"run.dir={folder}/run"], Path(folder) / "log")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    times = {row["step"]: row["time/step_seconds"] for row in map(json.loads, lines) if row["step"]}
    return statistics.median(seconds for step, seconds in times.items() if step > 1)


def _finish(command: list[str], log: Path) -> None:
    """Run torchrun to its end; past the limit its whole process group is killed."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(RUN_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise ValueError(f"exit code {code}: {log.read_text()[-1500:]}")


def _row(configuration: Configuration, seconds: float, runs: dict[int, float]) -> dict[str, Any]:
    mean = statistics.mean(runs.values())
    return {
        "configuration": configuration.title,
        "predicted_s": seconds,
        "measured_s": mean,
        "predicted/measured": seconds / mean,
        "fastest_s": min(runs.values()),
        "slowest_s": max(runs.values()),
        "runs": len(runs),
    }
