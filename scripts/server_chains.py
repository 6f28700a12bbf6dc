"""Disturb the generation servers of small runs at random, and check what the run promises.

    .venv/bin/python scripts/server_chains.py [--chains 5] [--disturbances 20] [--keep FOLDER]

Two trainer ranks, one generating rank and three vLLM servers (and one that joins) train GRPO on
sums with flow.queue. In each chain, servers are killed, stopped, restarted, given old weights, made
slow, half-closed or made to answer garbage, one disturbance after each step. Half of the chains run
in exact mode and are compared with an undisturbed run; in the others every token is drawn again by
vLLM in process. A finished chain is a file in --state, so the script goes on where it was ended.
Exit code 1 if a promise was broken. docs/lab/SERVERS.md holds the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from chains.disturb import NAMES, ChainFleet
from chains.servers import ServerSetup
from chains.verify import Verdict, check_each_once, verify_exact, verify_fast

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "algos" / "arithmetic" / "model"
SCRIPT = Path(__file__).parent / "chains" / "recording.py"
PROMPTS = 16
SAMPLES = 8
MAX_STALENESS = 2
STEP_LIMIT = 300.0
"""Longest time without a new step, in seconds."""
AFTER = 6
"""Steps after the last disturbance."""
STATE = ROOT / "docs" / "lab" / "server_chains"


@dataclass
class Chain:
    """One run and its disturbances."""

    number: int
    is_exact: bool
    num_disturbances: int
    done: list[str] = field(default_factory=list)
    seconds_lost: list[float] = field(default_factory=list)
    """Of each disturbance: seconds of the step that followed, less the median of calm steps."""

    @property
    def steps(self) -> int:
        """Steps of its run."""
        return self.num_disturbances + AFTER

    @property
    def name(self) -> str:
        """Of its state file."""
        mode = "exact" if self.is_exact else "fast"
        return f"{mode}-{self.number}-{self.num_disturbances}"


def start_run(
    chain: Chain,
    run_dir: Path,
    urls: list[str],
    key_file: Path,
    others: Sequence[str] = (),
    *,
    num_trainers: int = 2,
    num_generators: int = 1,
) -> subprocess.Popen[bytes]:
    """Start the run of a chain; return its process, which leads a session of its own.

    urls: of servers that run already; the run starts its own without any. others: further words.
    num_trainers and num_generators: ranks of the two pools.
    """
    num_ranks = num_trainers + num_generators
    words = [
        f"placement={{a: {{roles: [actor, reference, reward], ranks: {[*range(num_trainers)]}}}, "
        f"b: {{roles: [generator], ranks: {[*range(num_trainers, num_ranks)]}}}}}",
        f"run.dir={run_dir}",
        "run.seed=7",
        f"total_steps={chain.steps}",
        f"max_staleness={MAX_STALENESS}",
        f"data.prompts_per_step={PROMPTS}",
        f"data.samples_per_prompt={SAMPLES}",
        f"actor.update.mini_batch_size={PROMPTS * SAMPLES}",
        "actor.update.old_log_probs=recompute",
        "actor.optimizer.lr=3e-4",
        "actor.rollout.engine=served",
        f"actor.rollout.server.exact={str(chain.is_exact).lower()}",
        f"actor.rollout.max_batch_size={1 if chain.is_exact else 16}",
        "actor.rollout.server.stall_seconds=4",
        "actor.rollout.server.health_seconds=2",
        "actor.rollout.server.transfer_seconds=5",
        "eval_every=0",
        f"save_every={0 if chain.is_exact else 1}",
        "run.keep_checkpoints=1000",
    ]
    if urls:
        words.append(f"actor.rollout.server.addresses=[{','.join(urls)}]")
        words.append(f"actor.rollout.server.key_file={key_file}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-port", str(port), "-m", "spmdflow.run", str(SCRIPT)]
    command += [str(ROOT / "algos" / "grpo_async.yaml"), *words, *others]
    with (run_dir.parent / f"{run_dir.name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )


def run_chain(chain: Chain, folder: Path) -> Path:
    """Carry a chain out; return RUN_DIR. RuntimeError if the run ends or hangs."""
    key_file = folder / "key"
    key_file.write_text("k" * 32, encoding="ascii")
    setup = ServerSetup(str(MODEL), key_file, folder, chain.is_exact)
    fleet = ChainFleet(setup, num_servers=3, num_joining=1, seed=chain.number)
    run_dir = folder / "run"
    process = None
    try:
        fleet.wait()
        process = start_run(chain, run_dir, fleet.urls, key_file)
        _disturb_steps(chain, fleet, run_dir, process)
        status = process.wait(STEP_LIMIT)
        if status != 0:
            raise RuntimeError(f"the run ended with status {status}: {folder}/run.log")
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait(60)
        fleet.close()
    return run_dir


def _disturb_steps(
    chain: Chain, fleet: ChainFleet, run_dir: Path, process: subprocess.Popen[bytes]
) -> None:
    """Disturb a server some time after each new step, until all disturbances are done."""
    chooser = random.Random(f"{chain.number} {chain.is_exact}")
    names: list[str] = []
    while len(names) < chain.num_disturbances:
        names += chooser.sample(NAMES, len(NAMES))  # each kind before any comes again
    step = 0
    for name in names[: chain.num_disturbances]:
        step = wait_for_step(run_dir, step + 1, process)
        time.sleep(chooser.uniform(0, 1.0))
        text = fleet.disturb(name)
        chain.done.append(f"step {step}: {text}")
        sys.stdout.write(f"{chain.name} {chain.done[-1]}\n")
        sys.stdout.flush()
    wait_for_step(run_dir, chain.steps, process)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until a step is recorded; return the newest. RuntimeError if the run ends or hangs."""
    path = run_dir / "metrics.jsonl"
    newest = -1
    changed = time.monotonic()
    while newest < step:
        number = path.read_bytes().count(b"\n") if path.is_file() else 0
        if number > newest:
            newest = number
            changed = time.monotonic()
        if process.poll() is not None and newest < step:
            raise RuntimeError(f"the run ended with status {process.returncode} at step {newest}")
        if time.monotonic() - changed > STEP_LIMIT:
            raise RuntimeError(f"no step after {newest} within {STEP_LIMIT:g} s")
        time.sleep(0.1)
    return newest


def lost_seconds(run_dir: Path, num_disturbances: int) -> list[float]:
    """Seconds of each disturbed step above the median of the calm ones at the end."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(line)["time/step_seconds"] for line in lines]
    calm = statistics.median(seconds[num_disturbances + 2 :])
    return [max(0.0, each - calm) for each in seconds[1 : num_disturbances + 1]]


def verify(chain: Chain, run_dir: Path, reference: Path | None) -> Verdict:
    """Judge a chain. reference: RUN_DIR of the undisturbed run, in exact mode."""
    if reference is not None:
        verdict = verify_exact(run_dir, reference)
    else:
        verdict = verify_fast(run_dir, model=str(MODEL), seed=7, max_staleness=MAX_STALENESS)
    verdict.problems += check_each_once(run_dir, steps=chain.steps, rows_per_step=PROMPTS * SAMPLES)
    return verdict


def counters_of(run_dir: Path) -> dict[str, Any]:
    """What the fleet counted."""
    result: dict[str, Any] = {}
    for path in sorted((run_dir / "rows").glob("counters-*.pt")):
        result |= torch.load(path, weights_only=True)
    return result


def carry_out(chain: Chain, state: Path, work: Path) -> dict[str, Any]:
    """Carry a chain out and judge it, unless its state file exists; return the record."""
    path = state / f"{chain.name}.json"
    if path.is_file():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record
    reference = None
    if chain.is_exact:
        reference = work / f"calm-{chain.num_disturbances}"
        if not (reference / "run" / "finished").is_file():
            shutil.rmtree(reference, ignore_errors=True)
            reference.mkdir(parents=True)
            calm = Chain(0, is_exact=True, num_disturbances=0)
            calm.num_disturbances = chain.num_disturbances
            run_undisturbed(calm, reference)
        reference = reference / "run"
    folder = work / chain.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    run_dir = run_chain(chain, folder)
    verdict = verify(chain, run_dir, reference)
    record = {
        "chain": chain.name,
        "disturbances": chain.done,
        "seconds": round(time.monotonic() - began, 1),
        "seconds_lost": [round(each, 2) for each in lost_seconds(run_dir, chain.num_disturbances)],
        "verdict": asdict(verdict),
        "counters": counters_of(run_dir),
    }
    state.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def run_undisturbed(chain: Chain, folder: Path) -> None:
    """The run of a chain without disturbances, to compare with."""
    calm = Chain(chain.number, chain.is_exact, chain.num_disturbances)
    key_file = folder / "key"
    key_file.write_text("k" * 32, encoding="ascii")
    setup = ServerSetup(str(MODEL), key_file, folder, calm.is_exact)
    fleet = ChainFleet(setup, num_servers=1, num_joining=0, seed=0)
    try:
        fleet.wait()
        process = start_run(calm, folder / "run", fleet.urls, key_file)
        if process.wait(20 * STEP_LIMIT) != 0:
            raise RuntimeError(f"the undisturbed run failed: {folder}/run.log")
    finally:
        fleet.close()


def print_table(records: list[dict[str, Any]]) -> None:
    """One line a chain, then the seconds lost a disturbance."""
    lost: list[float] = []
    for record in records:
        verdict = record["verdict"]
        lost += record["seconds_lost"]
        text = "kept" if not verdict["problems"] else f"BROKEN: {verdict['problems'][:3]}"
        counters = record["counters"]
        sys.stdout.write(
            f"{record['chain']}: {text}; {verdict['num_rows']} rows, {verdict['num_tokens']} "
            f"tokens, {verdict['num_near_ties']} near ties, log-probs within "
            f"{verdict['largest_gap']:.1e} ({verdict.get('num_above', 0)} rows above 1e-5), "
            f"age at most {verdict['largest_age']}; {counters.get('moved_rows', 0)} rows moved, "
            f"{counters.get('recomputed_tokens', 0)} tokens computed again\n"
        )
    if lost:
        sys.stdout.write(
            f"seconds lost a disturbance: median {statistics.median(lost):.1f}, "
            f"worst {max(lost):.1f}, of {len(lost)}\n"
        )


def main() -> int:
    """Carry the chains out, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=5, help="of each mode")
    parser.add_argument("--disturbances", type=int, default=20)
    parser.add_argument("--modes", nargs="+", default=["exact", "fast"])
    parser.add_argument("--state", type=Path, default=STATE, help="folder of finished chains")
    parser.add_argument("--keep", type=Path, help="folder in which runs stay")
    options = parser.parse_args()
    work = options.keep or Path(tempfile.mkdtemp())
    records = []
    for number in range(1, options.chains + 1):
        for mode in options.modes:
            chain = Chain(number, mode == "exact", options.disturbances)
            records.append(carry_out(chain, options.state, work))
            print_table(records[-1:])
    print_table(records)
    return int(any(record["verdict"]["problems"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
