"""Harm small runs in every way and print, at default settings, how long each takes to be named.

    .venv/bin/python scripts/fault_table.py [--at-once 3] [--only stop endless] [--keep FOLDER]

Each fault is a torchrun of its own with three ranks (two for PPO). Seconds count from the harm to
the line that names rank and call, and to the end of torchrun. Runs that end at the limit of a call
(10 minutes) are ended here once they are named, unless --to-the-end. The lost network needs root,
ip and unshare; the full disk needs root. Takes 8 minutes on two cores. Exit code 1 if a fault was
not named within 90 s, or left a process. docs/TROUBLESHOOTING.md holds the table.

The toy run is scripts/faults/faulty.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from spmdflow.failure.stacks import line_in_stacks, stacks_path

ROOT = Path(__file__).parents[1]
TASK = ROOT / "algos" / "arithmetic"
NAMED_SECONDS = 90.0
OUT_SECONDS = 30.0
START_SECONDS = 120.0
LIMIT_SECONDS = 600.0
"""Of a call, at default settings."""
TOY = Path(__file__).parent / "faults" / "faulty.py"
HARMED = "harmed"


@dataclass
class Run:
    """One harmed run."""

    folder: Path
    agents: list[list[str]]
    words: list[str]
    waits_for_end: bool = False
    mark: str = field(default_factory=lambda: f"SPMDFLOW_FAULT={uuid.uuid4().hex}")
    torchruns: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """RUN_DIR of the run."""
        return self.folder / "run"

    def log(self) -> str:
        """What all processes wrote."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def start(self) -> None:
        """Start torchrun, on one or two machines."""
        name, value = self.mark.split("=")
        own = {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        own |= {"SPMDFLOW_FAULT_DIR": str(self.folder)}
        command = ["-m", "spmdflow.run", *self.words, f"run.dir={self.run_dir}"]
        for agent in self.agents:
            with (self.folder / "log.txt").open("ab") as log:
                self.torchruns.append(
                    subprocess.Popen(
                        [*agent, *command],
                        env=os.environ | own,
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                    )
                )

    def alive(self, word: str = "") -> list[int]:
        """Processes of the run with word in their environment, zombies excepted."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit():
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    if self.mark.encode() in environment and (
                        not word or word.encode() in environment
                    ):
                        found.append(int(entry.name))
        return found

    def steps(self) -> int:
        """Steps done."""
        with contextlib.suppress(OSError):
            return (self.run_dir / "metrics.jsonl").read_text().count("\n")
        return 0

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until condition holds or torchrun ended; whether it holds."""
        until = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < until:
            if all(torchrun.poll() is not None for torchrun in self.torchruns):
                return condition()
            time.sleep(0.1)
        return holds

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for torchrun in self.torchruns:
            torchrun.wait()


@dataclass(frozen=True)
class Fault:
    """One way to harm a run, and what must be said about it."""

    name: str
    what: str
    says: str
    """Regular expression of the line that names rank and call."""
    script: str = "toy"
    settings: tuple[str, ...] = ()
    harm: Callable[[Run], None] | None = None
    """None: the run harms itself."""
    goes_on: bool = False
    at_limit: bool = False
    """Named by a warning; the limit of the call ends it later."""
    machines: int = 1
    tmpfs_bytes: int = 0


def _signal(rank: int, number: signal.Signals) -> Callable[[Run], None]:
    def harm(run: Run) -> None:
        (pid,) = run.alive(f"RANK={rank}")
        os.kill(pid, number)

    return harm


def _remove_folder(run: Run) -> None:
    shutil.rmtree(run.run_dir.rename(run.folder / "removed"))  # at once: the run writes there


def _cut_network(run: Run) -> None:
    space = run.agents[1][3]
    subprocess.run(["ip", "-n", space, "link", "set", f"{space}v", "down"], check=True)


CALL = r"faulty\.check \(call \d+, compute lane\)"
WAITS = rf"WARNING.*{CALL} has been running for .* the call waits for rank"
ANY = r".*\(call \d+"
FAULTS = [
    Fault("stop_0", "rank 0 stopped (SIGSTOP)", r"run failed: rank 0: the controller's .*stopped.*"
          r"\(call \d+",
          harm=_signal(0, signal.SIGSTOP)),
    Fault("stop_1", "rank 1 stopped (SIGSTOP)", rf"RUN FAILED: rank 1, {ANY}.*stopped",
          harm=_signal(1, signal.SIGSTOP)),
    Fault("endless", "endless method on rank 1", rf"{WAITS} 1: it is at \S+/faulty\.py:\d+ "
          "in _loop_forever", at_limit=True, settings=("faulty.fault=endless",)),
    Fault("endless_0", "the same on rank 0", rf"{WAITS} 0: it is at \S+:\d+ in _loop_forever",
          at_limit=True, settings=("faulty.fault=endless", "faulty.victim=0")),
    Fault("endless_c", "C code on rank 1 holds the GIL", rf"{WAITS} 1: its process \d+ is running",
          at_limit=True, settings=("faulty.fault=endless_c",)),
    Fault("skip", "rank 1 skips a collective", rf"{WAITS} 1: it has finished.*skipped a "
          r"collective.*faulty\.py:\d+ in check", at_limit=True,
          settings=("faulty.fault=skip",)),
    Fault("slow", "rank 1 slow: 8 s a call", r"rank 1 is slow: .* of faulty\.check", goes_on=True,
          settings=("faulty.fault=slow",)),
    Fault("kill", "rank 1 killed (SIGKILL)", rf"RUN FAILED: rank 1({ANY}.*SIGKILL|:.*SIGKILL{ANY})",
          harm=_signal(1, signal.SIGKILL)),
    Fault("folder", "RUN_DIR removed", r"RUN FAILED: rank 0.*metrics\.jsonl.*, while ending step "
          r"\d+", harm=_remove_folder),
    Fault("network", "network of 2 nodes lost", rf"RUN FAILED: rank [23]({ANY}.*connection is lost"
          rf"|:.*connection is lost{ANY})",
          harm=_cut_network, machines=2),
    Fault("reward", "endless reward function", r"RUN FAILED: rank \d, reward\.compute_reward.*"
          r"never_returns", script="ppo", settings=("reward.function={here}:never_returns",)),
    Fault("nan", "reward NaN", r"RUN FAILED: rank \d, reward\.compute_reward.*nan", script="ppo",
          settings=("reward.function={here}:not_a_number",)),
    Fault("disk", "disk full at the first checkpoint", r"RUN FAILED: rank \d(, \w+\.write \(call "
          r".*step-\d.*No space|.*No space.*while (saving|ending) step \d)",
          script="ppo", settings=("save_every=1",), tmpfs_bytes=9 << 20),
]  # fmt: skip
PPO = ("data.prompts_per_step=8", "actor.update.mini_batch_size=8",
       "critic.update.mini_batch_size=8", "data.eval_prompts=8", "eval_every=0",
       "run.sample_every=0")  # fmt: skip


@contextlib.contextmanager
def _agents(fault: Fault, ranks: int) -> Iterator[list[list[str]]]:
    """Command lines of torchrun, one per machine; two machines are two network namespaces."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if fault.machines == 1:
        yield [[*torchrun, "--standalone", "--nproc-per-node", str(ranks)]]
        return
    spaces = [f"sf{uuid.uuid4().hex[:5]}{letter}" for letter in "ab"]
    first, second = (f"{space}v" for space in spaces)
    commands = [f"netns add {space}" for space in spaces]
    commands += [f"link add {first} type veth peer name {second}"]
    for number, space in enumerate(spaces, start=1):
        commands += [f"link set {space}v netns {space}"]
        commands += [f"-n {space} addr add 10.78.0.{number}/24 dev {space}v"]
        commands += [f"-n {space} link set {device} up" for device in (f"{space}v", "lo")]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
    torchrun += ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "10.78.0.1"]
    torchrun += ["--master-port", "29517", "--node-rank"]
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "env"]
    try:
        yield [
            [
                "ip",
                "netns",
                "exec",
                space,
                *inside,
                f"GLOO_SOCKET_IFNAME={space}v",
                *torchrun,
                str(n),
            ]
            for n, space in enumerate(spaces)
        ]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=True)


@dataclass(frozen=True)
class Found:
    """What a fault led to."""

    fault: Fault
    named: float | None
    """Seconds from the harm to the line."""
    out: float | None
    line: str
    where: str
    problem: str = ""


def drill(fault: Fault, folder: Path, to_the_end: bool) -> Found:
    """Harm one run and watch it; to_the_end: also where the limit of a call ends it."""
    folder.mkdir(parents=True)
    if fault.tmpfs_bytes:
        disk = folder / "run"
        disk.mkdir()
        size = f"size={fault.tmpfs_bytes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
    script = str(ROOT / "algos" / "ppo.py")
    settings = [text.format(here=TOY) for text in fault.settings]
    if fault.script == "toy":
        script = str(TOY)
        ranks = 3
        data = [f"data.train_path={TASK / 'train.jsonl'}", f"data.tokenizer_path={TASK / 'model'}"]
        data += ["data.prompts_per_step=6", "data.max_prompt_tokens=64", "placement=colocate"]
        settings = [*data, "run.sample_every=0", *settings]
    else:
        ranks = 2
        settings = [*PPO, *settings]
    try:
        with _agents(fault, ranks) as agents:
            run = Run(folder, agents, [script, *settings], to_the_end)
            try:
                return _watch(fault, run)
            finally:
                run.end()
    finally:
        if fault.tmpfs_bytes:
            subprocess.run(["umount", str(folder / "run")], check=True)


def _watch(fault: Fault, run: Run) -> Found:
    run.start()
    notes = [run.run_dir / HARMED, run.folder / HARMED]
    if fault.harm is not None:
        if not run.wait(lambda: run.steps() >= 6, START_SECONDS):
            return Found(fault, None, None, "", "", "did not start")
        time.sleep(1.0)
        harmed = time.time()
        fault.harm(run)
    elif fault.tmpfs_bytes:
        run.wait(lambda: run.steps() >= 1, START_SECONDS)
        harmed = time.time()
    else:
        if not run.wait(lambda: any(note.exists() for note in notes), START_SECONDS):
            return Found(fault, None, None, "", "", "did not start")
        harmed = float(next(note for note in notes if note.exists()).read_text())
    pattern = re.compile(fault.says)
    named = None
    if run.wait(lambda: pattern.search(run.log()) is not None, NAMED_SECONDS + OUT_SECONDS):
        named = time.time() - harmed
    line = next((text for text in run.log().splitlines() if pattern.search(text)), "")
    problem = "" if named is not None and named <= NAMED_SECONDS else "not named in time"
    if fault.goes_on or (fault.at_limit and not run.waits_for_end):
        return Found(fault, named, None, line, _where(run, line), problem)
    gone = run.wait(lambda: not run.alive(), OUT_SECONDS + LIMIT_SECONDS * fault.at_limit)
    out = time.time() - harmed if gone else None
    statuses = [torchrun.wait(5) if gone else None for torchrun in run.torchruns]
    problem += "" if gone else " processes are left"
    problem += "" if all(statuses) else f" exit statuses {statuses}"
    return Found(fault, named, out, line, _where(run, line), problem.strip())


def _where(run: Run, line: str) -> str:
    """Where Python was: by failure.json, the line with the fault's name, or the stacks."""
    for path in sorted(run.run_dir.glob("failure*.json")):
        with contextlib.suppress(ValueError):
            facts = json.loads(path.read_text())
            *_, own = ["", *re.findall(r'File "(.+)", line (\d+)', facts["own_traceback"])]
            if where := facts["where"] or ":".join(own) or facts["line"]:
                return str(where)
    *_, found = ["", *re.findall(r"(?:it is|seen|collective) at (\S+:\d+ in \w+)", line)]
    culprit = re.search(r"the call waits for rank (\d+): its process", line)
    if culprit:
        stacks = stacks_path(run.run_dir, int(culprit[1]))
        run.wait(lambda: bool(line_in_stacks(stacks)), 5.0)
        return line_in_stacks(stacks)
    return found


def table(found: list[Found]) -> str:
    """The table in Markdown."""
    rows = ["| fault | named after | ended after | Python was at | said |", "|---|---|---|---|---|"]
    for each in found:
        times = ["-" if s is None else f"{s:.0f} s" for s in (each.named, each.out)]
        if each.out is None and not each.problem:
            times[1] = "goes on" if each.fault.goes_on else f"at {LIMIT_SECONDS:.0f} s"
        text = re.sub(r"^.*?(RUN FAILED: |WARNING |ERROR )", "", each.line)
        text = text.replace(f"{ROOT}/", "").replace("|", "/")
        where = re.sub(r": .*", "", each.where.replace(f"{ROOT}/", ""))
        problem = f" **{each.problem}**" if each.problem else ""
        rows.append(
            f"| {each.fault.what} | {times[0]} | {times[1]} | {where} | {text[:240]}{problem} |"
        )
    return "\n".join(rows)


def drive() -> int:
    """Run the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[fault.name for fault in FAULTS])
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: removed)")
    parser.add_argument("--to-the-end", action="store_true", help="wait for limits of calls")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if fault.name in options.only]
    with contextlib.ExitStack() as at_end:
        folder = options.keep or Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        with ThreadPoolExecutor(options.at_once) as pool:
            to_the_end = options.to_the_end
            tasks = [pool.submit(drill, x, folder / x.name, to_the_end) for x in chosen]
            found = [task.result() for task in tasks]
    print(table(found))
    return int(any(each.problem for each in found))


if __name__ == "__main__":
    sys.exit(drive())
