"""One call, from the script's line to its reply: the files of the package that handle it.

Usage: python scripts/call_trace.py        (two ranks; prints a table, and the files in order)

Runs PPO on the bundled task with two ranks and records, by `sys.setprofile` in every thread of
rank 0's process, each named function of the package that is entered while the second step calls
`critic.compute_values(batch)` and waits for its reply. A *stay* is a run of consecutive functions
of one file; a *return* is a stay in a file that was left before.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from _stays import stays_of

import spmdflow
from spmdflow import (
    ActorWorker,
    CriticWorker,
    Flow,
    PPOConfig,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
)

ROOT = Path(__file__).parents[1]
PACKAGE = str(Path(spmdflow.__file__).parent)
TRACED_STEP = 2
MODEL_PACKAGES = {
    "blocks",
    "config",
    "cpu",
    "hybrid_engine",
    "kind",
    "models",
    "objectives",
    "rollout",
    "tracking",
    "weights",
    "workers",
}
"""Packages of the model's own work; a round trip without them is transport and rows."""
MODEL_FILES = {"data/micro.py", "parallel/device.py"}
"""Micro-batches, and their way to the device."""
ROW_PLANNER = "blocks/rows.py"
"""The one file of `blocks` that plans rows."""


class Entered(NamedTuple):
    """A function that was entered."""

    thread: str
    file: str
    function: str


class Recorder:
    """Records the functions of the package that are entered, in every thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.entered: list[Entered] = []
        self._clock = threading.local()
        """Of each thread: the frame of its regular look at clocks, which is no part of a call."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function, as `sys.setprofile` takes it."""
        clock = getattr(self._clock, "frame", None)
        if event == "return" and frame is clock:
            self._clock.frame = None
        if not self.is_on or event != "call" or clock is not None:
            return
        code = frame.f_code
        if code.co_name == "_tick":
            self._clock.frame = frame
            return
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(PACKAGE).lstrip("/")
            self.entered.append(Entered(threading.current_thread().name, file, code.co_name))

    def functions(self) -> list[tuple[str, str]]:
        """File and name of each function that was entered, in order."""
        return [(each.file, each.function) for each in self.entered]


recorder = Recorder()
threading.setprofile(recorder)
sys.setprofile(recorder)  # the main thread, which runs the compute lane


def describe(name: str, entered: Sequence[Entered]) -> str:
    """Files, stays, returns, and how often the most visited file is entered."""
    stays = stays_of(each.file for each in entered)
    most = Counter(stays).most_common(1) or [("none", 0)]
    num_files = len(set(stays))
    return (
        f"{name:42} {num_files:3} files {len(stays):3} stays {len(stays) - num_files:3} returns; "
        f"most often {most[0][0]} ({most[0][1]})"
    )


def is_transport(file: str) -> bool:
    """Whether a file carries calls and rows, and is not the model's own work."""
    if file == ROW_PLANNER:
        return True
    return file not in MODEL_FILES and file.partition("/")[0] not in MODEL_PACKAGES


def main(flow: Flow, cfg: PPOConfig) -> None:
    """As algos/ppo.py; one call of the second step is recorded."""
    sys.setprofile(recorder)
    actor = flow.spawn(ActorWorker, cfg.actor)
    critic = flow.spawn(CriticWorker, cfg.critic)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch.lengths("responses")
        recorder.is_on = step.number == TRACED_STEP
        values = critic.compute_values(batch)
        num_sent = len(recorder.entered)
        values.refs["values"].result.wait()
        recorder.is_on = False
        if step.number == TRACED_STEP:
            report(num_sent)
        batch |= values
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(critic.update_critic(batch), actor.update_actor(batch))


def report(num_sent: int) -> None:
    """Print what was recorded. num_sent: functions entered until the call had been sent."""
    own_thread = threading.current_thread().name
    sent = [each for each in recorder.entered[:num_sent] if each.thread == own_thread]
    transport = [each for each in recorder.entered if is_transport(each.file)]
    print(describe("script's side, until the call is sent", sent))
    print(describe("round trip, transport and rows", transport))
    print(describe("round trip, all", recorder.entered))
    sent_stays = stays_of(each.file for each in sent)
    print("\nscript's side:")
    for file in sent_stays:
        print(f"  {file}")
    print("\nstays by file:")
    for file, count in Counter(sent_stays).most_common():
        print(f"  {count:2} {file}")
    print("\nround trip, calls by function:")
    for (file, function), count in Counter(recorder.functions()).items():
        print(f"  {count:3} {file}:{function}")


def start() -> int:
    """Run this script on two ranks; the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["-m", "spmdflow.run", str(Path(__file__).absolute())]
        command += [str(ROOT / "algos" / "ppo.yaml"), f"run.dir={folder}/run", "total_steps=2"]
        command += ["data.prompts_per_step=32", "actor.update.mini_batch_size=16"]
        command += ["critic.update.mini_batch_size=16", "eval_every=0", "save_every=0"]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(start())
