"""A host program whose runs fail, and which goes on each time.

    torchrun --nproc-per-node 3 failing_launches.py OUT_DIR

OUT_DIR/rank-<k>.json: by name of the launch what it raised or returned on rank k, the failure's
record, the seconds it took, a sum of the host after it, and what the process holds then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

import spmdflow
from spmdflow.models.policy import ActorWorker
from spmdflow.models.reward import RewardWorker
from spmdflow.worker_api.register import register
from tests.distributed.programs.inside_torchrun import (
    ROOT,
    TASK,
    Config,
    SecondWorker,
    script_of,
    toy_config,
)
from tests.distributed.programs.many_launches import left

SCRIPT = ROOT / "algos" / "grpo.py"
MEMBERS = (0, 2)
SMALL = ["data.prompts_per_step=4", "total_steps=1", "eval_every=0", "run.sample_every=0"]
SMALL += ["actor.update.mini_batch_size=16", "run.hardware=null"]


FUNCTIONS = """import time

def nan(prompt, response, row):
    return float("nan")

def slow(prompt, response, row):
    open("{mark}", "w").close()
    time.sleep(90)  # less than reward.sample_seconds, many times more than a run may take to end
    return 0.0
"""


class BrokenWorker(SecondWorker):
    """Cannot be built on the run's last rank."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        if context.rank == MEMBERS[-1]:
            raise FileNotFoundError("no weights here")


def main_with_broken_worker(flow: Any, cfg: Config) -> None:
    flow.spawn(BrokenWorker, cfg.second)
    flow.spawn(SecondWorker, cfg.first, name="first")  # more groups are made meanwhile


def main_with_error(flow: Any, cfg: Any) -> None:
    for step in flow.steps(3):
        if step.number == 2:
            raise KeyError("in the script's second step")


class FailingWorker(SecondWorker):
    """Raises as soon as a reward function scores."""

    @register(transfer_mode="3D_PROTO", reads=("responses",))
    def fail(self, batch: TensorDict) -> None:
        while not (Path(str(self.context.run_dir)) / "judging").exists():
            time.sleep(0.05)
        raise ValueError("while it judges")


def main_that_fails_while_it_judges(flow: Any, cfg: Any) -> None:
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    failing = flow.spawn(FailingWorker, cfg.reference, pool=flow.pool("all"))
    prompts = flow.prompts(cfg.data)
    for _ in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        failing.fail(batch)
        reward.compute_reward(batch)


def made_in_python(out: Path, **reward: Any) -> Any:
    """Settings as a host program makes them: an object, no YAML; references are not resolved."""
    cfg = spmdflow.GRPOConfig()
    cfg.actor.model.path = str(TASK / "model")
    cfg.data.train_path = str(TASK / "train.jsonl")
    cfg.data.eval_path = None
    cfg.data.max_prompt_tokens = 16
    cfg.data.prompts_per_step = 4
    cfg.data.samples_per_prompt = 4
    cfg.actor.update.mini_batch_size = 16
    cfg.actor.rollout.max_new_tokens = 4
    cfg.reward.function = reward.get("function", "spmdflow.rewards.arithmetic:exact_match")
    cfg.reward.sample_seconds = 100.0
    cfg.total_steps = 1
    cfg.eval_every = 0
    cfg.save_every = 0
    cfg.run.dir = str(out)
    cfg.run.sample_every = 0
    return cfg


def attempt(run: Callable[[], int], expected: Sequence[int]) -> dict[str, Any]:
    """expected: what the process holds afterwards; empty: nobody knows yet."""
    start = time.monotonic()
    seen: dict[str, Any] = {"record": {}}
    try:
        seen["result"] = run()
    except spmdflow.SpmdflowError as err:
        seen |= {"result": f"{type(err).__name__}: {err}", "record": getattr(err, "record", {})}
    seen["seconds"] = time.monotonic() - start
    total = torch.ones(1)
    dist.all_reduce(total)
    seen |= {"sum": float(total), "left": left(expected)}
    dist.barrier()  # nobody ends while another one counts
    return seen


def ask_later(script: ModuleType, cfg: Any) -> int:
    """Return at once outside, work on, and ask at the end."""
    outcome = spmdflow.launch(script, cfg, ranks=MEMBERS, wait=False)
    if dist.get_rank() not in MEMBERS:
        while not outcome.is_known:
            time.sleep(0.1)
    return outcome.wait()


def main() -> None:
    """One launch after the other."""
    out = Path(sys.argv[1])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its pool, one thread a core, stays: not ours
    dist.init_process_group("gloo")
    nan, slow = (f"{out / 'bad.py'}:{name}" for name in ("nan", "slow"))
    if dist.get_rank() == 0:
        (out / "bad.py").write_text(FUNCTIONS.format(mark=out / "slow" / "judging"))
    dist.barrier()
    loaded = spmdflow.load_settings(
        SCRIPT, overrides=[*SMALL, f"run.dir={out / 'loaded'}"], num_ranks=2
    )
    wrong = made_in_python(out / "wrong")
    wrong.actor.model.path = str(out / "nowhere")
    toys = toy_config(out / "toys", "colocate")
    launches: dict[str, Callable[[], int]] = {
        "script": lambda: spmdflow.launch(script_of(main_with_error), toys, ranks=MEMBERS),
        "spawn": lambda: spmdflow.launch(script_of(main_with_broken_worker), toys, ranks=MEMBERS),
        "settings": lambda: spmdflow.launch(SCRIPT, wrong, ranks=MEMBERS),
        "reward": lambda: spmdflow.launch(
            SCRIPT, made_in_python(out / "nan", function=nan), ranks=MEMBERS
        ),
        "judging": lambda: spmdflow.launch(
            script_of(main_that_fails_while_it_judges),
            made_in_python(out / "slow", function=slow),
            ranks=MEMBERS,
        ),
        "asked later": lambda: ask_later(script_of(main_with_error), toys),
        "made in Python": lambda: spmdflow.launch(
            SCRIPT, made_in_python(out / "made"), ranks=MEMBERS
        ),
        "loaded": lambda: spmdflow.launch(SCRIPT, loaded, ranks=MEMBERS),
        "by name": lambda: spmdflow.launch(
            "algos/grpo.py", settings=[*SMALL, f"run.dir={out / 'named'}"], ranks=MEMBERS
        ),
    }
    seen: dict[str, Any] = {}
    for name, run in launches.items():
        seen[name] = attempt(run, seen["script"]["left"] if seen else ())
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
