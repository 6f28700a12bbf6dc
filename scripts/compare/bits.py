"""Three PPO steps on 12 layouts at two commits, compared bit for bit.

Each run is algos/ppo.py with the bundled model, on the first ranks of one torchrun of four, with
gloo on the CPU. A step draws 16 prompts, makes two optimizer steps of the actor and of the critic,
has a KL to the reference in the reward and in the loss, and evaluates. Compared are all metrics but
those of clocks and of memory, and every tensor of the last checkpoint: weights and moments of actor
and critic on each rank. One more run is algos/grpo_async.py, whose generator is a model of its own,
with max_staleness=0 (with more, its numbers depend on timing).

Old log-probs come from the same rule at both commits (`actor.update.old_log_probs`): by default
from a forward of the trainer, since `auto` chooses in another way before and after.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compare.checkout import Checkout, end_of_log, run_program, torchrun_words
from compare.equality import (
    Difference,
    compare_metrics,
    compare_tensors,
    read_metrics,
    read_tensors,
)

PROGRAM = Path(__file__).parent / "_layouts.py"
EQUAL = "equal"
NOT_RUN = "not run"
PASSED = (EQUAL, NOT_RUN)
IGNORED_METRICS = ("time/", "perf/")
"""Seconds, tokens a second, bytes of host memory."""
RENAMED_METRICS: dict[str, str] = {}
"""Old name -> new name of metrics that were renamed on purpose."""
ENGINES = {"ppo": ("actor", "critic", "reference"), "grpo_async": ("actor", "reference")}
"""Script -> its models that have an engine."""
SECONDS = 3000.0
"""Limit of all layouts of one commit together."""
_SHOWN = 10
"""Differences of a layout that are printed."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """One run of three steps."""

    name: str
    num_ranks: int
    kind: str = "fsdp"
    """Engine of the actor, the critic and the reference."""
    layout: str = "t1"
    more: tuple[str, ...] = ()
    """Further settings."""
    script: str = "ppo"
    """Its name in algos/."""
    needs: str | None = None
    """A package without which it cannot run."""

    def settings(self, run_dir: Path, *, num_steps: int, old_log_probs: str) -> list[str]:
        """Settings of the run, over those of ppo.yaml."""
        words = [
            f"run.dir={run_dir}",
            f"total_steps={num_steps}",
            f"actor.update.old_log_probs={old_log_probs}",
            *SMALL[self.script],
        ]
        for role in ENGINES[self.script]:
            words.append(f"{role}.engine.kind={self.kind}")
            words.append(f"{role}.engine.layout={self.layout}")
            words.append(f"{role}.engine.micro_batch=3 rows")
        return [*words, *self.more]


_SHARED = (
    "data.eval_prompts=16",
    "eval_every=1",
    "save_every=0",
    "run.save_last=true",
    "run.sample_every=0",
    "actor.update.mini_batch_size=8",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
)
SMALL = {
    "ppo": (
        *_SHARED,
        "data.prompts_per_step=16",
        "critic.update.mini_batch_size=8",
        "critic.optimizer.schedule=constant",
        "critic.optimizer.warmup_steps=0",
        "advantage.kl_coef=0.02",
    ),
    "grpo_async": (
        *_SHARED,
        "data.prompts_per_step=4",
        "data.samples_per_prompt=4",
        "actor.rollout.temperature=2.5",
    ),
}
"""Script -> settings that make its steps small."""
LAYOUTS = (
    Layout("fsdp-d1", 1),
    Layout("fsdp-d2", 2),
    Layout("fsdp-d4", 4),
    Layout("zero1", 2, "zero1"),
    Layout("zero2", 2, "zero2"),
    Layout("zero3", 2, "zero3"),
    Layout("megatron-t2", 2, "megatron", "t2", needs="megatron.core"),
    Layout("megatron-p2", 2, "megatron", "p2", needs="megatron.core"),
    Layout("megatron-t2p2", 4, "megatron", "t2p2", needs="megatron.core"),
    Layout("split", 2, more=("placement=split",)),
    Layout("standalone", 4, more=("placement=standalone",)),
    Layout("own-generator", 2, more=("max_staleness=0",), script="grpo_async"),
    Layout(
        "vllm-blocks",
        2,
        "megatron",
        "t2",
        more=(
            "actor.rollout.engine=vllm",
            "actor.rollout.layout=t1",
            "actor.rollout.weights=blocks",
        ),
        needs="vllm",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which layouts, how many steps, and the rule of old log-probs."""
    names = [each.name for each in LAYOUTS]
    parser.add_argument("--layouts", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--old-log-probs", choices=("recompute", "rollout", "auto"), default="recompute"
    )
    parser.add_argument(
        "--skip-old", action="store_true", help="the folder of --keep has the old runs already"
    )


def compare(arguments: argparse.Namespace, old: Checkout, new: Checkout, folder: Path) -> list[Row]:
    """A row for each layout."""
    chosen = [each for each in LAYOUTS if each.name in arguments.layouts]
    runnable = [each for each in chosen if is_installed(each.needs)]
    for side, checkout in (("old", old), ("new", new)):
        if side == "old" and arguments.skip_old:
            continue
        print(f"{side}: {len(runnable)} runs", flush=True)
        run_layouts(
            runnable,
            checkout,
            folder / side,
            num_steps=arguments.steps,
            old_log_probs=arguments.old_log_probs,
        )
    rows = []
    for layout in chosen:
        if layout in runnable:
            rows.append(_compare_layout(layout, folder, arguments.steps))
        else:
            rows.append(_row(layout, 0, 0, NOT_RUN, f"{layout.needs} is not installed"))
    return rows


def is_installed(package: str | None) -> bool:
    """Whether a package can be imported; None stands for no package."""
    if package is None:
        return True
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False


def run_layouts(
    layouts: Sequence[Layout],
    checkout: Checkout,
    folder: Path,
    *,
    num_steps: int,
    old_log_probs: str = "recompute",
    more: Sequence[str] = (),
) -> None:
    """Run them one after another in one torchrun; each RUN_DIR is folder/NAME.

    more: further settings of every run. A run whose folder has a checkpoint continues from it.
    """
    if not layouts:
        return
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for layout in layouts:
        settings = layout.settings(
            folder / layout.name, num_steps=num_steps, old_log_probs=old_log_probs
        )
        runs.append(
            {
                "name": layout.name,
                "script": f"algos/{layout.script}.py",
                "num_ranks": layout.num_ranks,
                "settings": [*settings, *more],
            }
        )
    work = {"root": str(checkout.root), "runs": runs}
    path = folder / "work.json"
    path.write_text(json.dumps(work, indent=2))
    num_ranks = max(layout.num_ranks for layout in layouts)
    words = [*torchrun_words(num_ranks), str(PROGRAM), str(path)]
    log = folder / "log"
    status = run_program(checkout, words, log, seconds=SECONDS)
    if status != 0:
        print(f"{checkout.text}: torchrun ended with status {status}\n{end_of_log(log)}")


def _compare_layout(layout: Layout, folder: Path, num_steps: int) -> Row:
    """Compare the run of a layout at both commits, and print what differs."""
    old = folder / "old" / layout.name
    new = folder / "new" / layout.name
    for side in (old, new):
        if not is_complete(side, num_steps):
            detail = f"the {side.parent.name} run did not finish: see --keep FOLDER, file log"
            return _row(layout, 0, 0, "failed", detail)
    differences = compare_runs(old, new, num_steps)
    for difference in differences[:_SHOWN]:
        print(f"{layout.name}: {difference}")
    num_metrics = sum(len(compared_metrics(step)) for step in read_metrics(old))
    num_tensors = len(read_tensors(checkpoint_folder(old, num_steps)))
    if not differences:
        return _row(layout, num_metrics, num_tensors, EQUAL, "")
    result = f"{len(differences)} differences"
    return _row(layout, num_metrics, num_tensors, result, str(differences[0]))


def is_complete(run_dir: Path, num_steps: int) -> bool:
    """Whether a run has written its last step and saved it."""
    steps = [line["step"] for line in read_metrics(run_dir)]
    return num_steps in steps and checkpoint_folder(run_dir, num_steps).is_dir()


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run_dir / "checkpoints" / f"step-{step}"


def compare_runs(old: Path, new: Path, num_steps: int) -> list[Difference]:
    """Differences of two RUN_DIRs: metrics first, then tensors of the last checkpoint."""
    metrics = compare_metrics(
        read_metrics(old),
        read_metrics(new),
        ignored=IGNORED_METRICS,
        renamed=RENAMED_METRICS,
    )
    tensors = compare_tensors(
        read_tensors(checkpoint_folder(old, num_steps)),
        read_tensors(checkpoint_folder(new, num_steps)),
    )
    return metrics + tensors


def compared_metrics(step: Any) -> list[str]:
    """Names of a line of metrics.jsonl that are compared."""
    return [name for name in step if not name.startswith(IGNORED_METRICS)]


def _row(layout: Layout, num_metrics: int, num_tensors: int, result: str, detail: str) -> Row:
    return {
        "layout": layout.name,
        "ranks": layout.num_ranks,
        "metrics": num_metrics,
        "tensors": num_tensors,
        "result": result,
        "detail": detail,
    }
