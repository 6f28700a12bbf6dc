"""Runs one entry with one seed as a process of its own, and remembers that it is finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.learn.entry import CALCULATOR, MIXTURE, Entry
from scripts.matrix.case import MODEL

ROOT = Path(__file__).parents[2]
_MARK = "learned.json"


@dataclass(frozen=True)
class Run:
    """One finished run: where it lies and what it took.

    seconds: of its steps, by the clock; cpu_seconds: of the whole process, none if the run was
    continued from a checkpoint.
    """

    run_dir: Path
    seed: int
    commit: str
    seconds: float
    cpu_seconds: float | None
    judged: list[dict[str, Any]] | None

    def records(self) -> list[dict[str, Any]]:
        """The lines of its metrics.jsonl. Any: JSON values."""
        lines = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def commit_of_code() -> str:
    """Short hash of HEAD; with "+" if tracked files of spmdflow/ or algos/ differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "spmdflow", "algos"])
    return head.stdout.strip() + ("+" if changed.returncode else "")


def finished_or_none(entry: Entry, seed: int, folder: Path) -> Run | None:
    """The run, if it came to its end with these settings."""
    run_dir = folder / entry.run_name(seed)
    if not (run_dir / _MARK).is_file():
        return None
    kept = json.loads((run_dir / _MARK).read_text())
    return Run(run_dir=run_dir, **kept)


class Slots:
    """Processors that simultaneous runs may use: a run takes one for each of its ranks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        self._changed = threading.Condition()

    @contextmanager
    def take(self, ranks: int) -> Iterator[None]:
        """Wait until there are as many, at most all of them."""
        wanted = min(ranks, self._count)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


class Processes:
    """The processes that are running, so that all of them can be stopped."""

    def __init__(self) -> None:
        self._live: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def run(self, command: list[str], log: Path) -> float:
        """CPU seconds of a command that must succeed; its output is appended to log."""
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        variables |= {"TOKENIZERS_PARALLELISM": "false"}
        if self._stopped:
            raise SystemExit(f"{' '.join(command)}: not started, the runs were stopped")
        with open(log, "a") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, cwd=ROOT, stdout=output, stderr=output
            )
        self._live.append(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self._live.remove(process)
        if process.returncode != 0:
            tail = "\n".join(log.read_text().splitlines()[-15:])
            raise SystemExit(
                f"{' '.join(command)}: got exit code {process.returncode}, expected 0; see {log}\n"
                f"{tail}"
            )
        return usage.ru_utime + usage.ru_stime

    def stop(self) -> None:
        """SIGTERM for all, and no further one is started; checkpoints make them continue later."""
        self._stopped = True
        for process in self._live:
            process.terminate()


def perform(entry: Entry, seed: int, folder: Path, processes: Processes) -> Run:
    """Run to the end, continuing from the last checkpoint of an interrupted attempt.

    Output goes to <run folder>.log. SystemExit with the log's end if the run fails.
    """
    run_dir = folder / entry.run_name(seed)
    folder.mkdir(parents=True, exist_ok=True)
    commit = commit_of_code()
    run_words = entry.words(seed, str(run_dir))
    launcher = [sys.executable, "-m", "spmdflow.run", "--inproc"]
    if entry.num_ranks > 1:
        launcher = [sys.executable, "-m", "spmdflow", "run", "-n", str(entry.num_ranks)]
    continued = (run_dir / "checkpoints" / "latest").exists()
    log = run_dir.with_name(run_dir.name + ".log")
    cpu = processes.run([*launcher, *run_words], log)
    judged = judge(run_dir, log, processes) if entry.judged else None
    run = Run(run_dir, seed, commit, 0.0, None if continued else round(cpu, 1), judged)
    seconds = sum(record.get("time/step_seconds", 0.0) for record in run.records())
    run = replace(run, seconds=round(seconds, 1))
    kept = {name: value for name, value in asdict(run).items() if name != "run_dir"}
    (run_dir / _MARK).write_text(json.dumps(kept, indent=2) + "\n")
    return run


def prepare(entries: Collection[Entry], folder: Path, processes: Processes) -> None:
    """Make what the runs of these entries read, once."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = {entry.group for entry in entries}
    if "offline" in groups:
        _make_story_pairs(folder, processes)
    if groups & {"real_model", "calculator"}:
        _make_real_model(folder, processes)
    if "calculator" in groups:
        _make_calculator(folder, processes)
    if "mixture" in groups:
        _make_mixture(folder, processes)
    program = str(ROOT / "scripts" / "make_problems.py")
    for problems in sorted({entry.problems for entry in entries if entry.problems}):
        words = [os.path.expandvars(word) for word in problems]
        if any("$SPMDFLOW_DATA" in word for word in words):
            sys.exit(
                "learn: SPMDFLOW_DATA is not set, expected the folder of real input; set it "
                "(scripts/prepare_stories.py says what is in it)"
            )
        processes.run([sys.executable, program, *words], folder / "problems.log")


def _make_real_model(folder: Path, processes: Processes) -> None:
    """Make the folder of SmolLM2-135M-Instruct."""
    if not (ROOT / MODEL / "config.json").is_file():
        program = str(ROOT / "scripts" / "make_smollm2.py")
        processes.run([sys.executable, program, str(ROOT / MODEL)], folder / "real_model.log")


def _make_calculator(folder: Path, processes: Processes) -> None:
    """Make questions and dialogues, and teach the real model the call by supervised learning."""
    program = str(ROOT / "scripts" / "make_calculator.py")
    log = folder / "calculator_sft.log"
    processes.run([sys.executable, program, str(ROOT / "problems")], log)
    if not (ROOT / CALCULATOR / "export" / "actor" / "config.json").is_file():
        files = ["algos/sft.py", "algos/sft_calculator.yaml"]
        settings = [f"actor.model.path={MODEL}", f"run.dir={CALCULATOR}"]
        launcher = [sys.executable, "-m", "spmdflow", "run", "-n", "2"]
        processes.run([*launcher, *files, *settings], log)


def _make_mixture(folder: Path, processes: Processes) -> None:
    """Make and pre-train the tiny mixture of experts of the bundled task."""
    if not (ROOT / MIXTURE / "model" / "config.json").is_file():
        program = str(ROOT / "scripts" / "make_arithmetic.py")
        words = ["--out", str(ROOT / MIXTURE), "--experts", "8"]
        processes.run([sys.executable, program, *words], folder / "mixture.log")


def _make_story_pairs(folder: Path, processes: Processes) -> None:
    """Make the short stories and pairs of the stages before RL; needs SPMDFLOW_DATA."""
    out = ROOT / "runs" / "story_pairs"
    if not (out / "pairs.test.jsonl").is_file():
        script = str(ROOT / "scripts" / "make_story_pairs.py")
        processes.run([sys.executable, script, "--out", str(out)], folder / "story_pairs.log")


def judge(run_dir: Path, log: Path, processes: Processes) -> list[dict[str, Any]]:
    """Rows of stories_metrics.py for the checkpoints of a run; needs SPMDFLOW_DATA."""
    out = run_dir / "judged.json"
    script = str(ROOT / "scripts" / "stories_metrics.py")
    options = ["--no-start", "--draws", "2", "--samples", "3", "--json", str(out)]
    processes.run([sys.executable, script, "--run", str(run_dir), *options], log)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows
