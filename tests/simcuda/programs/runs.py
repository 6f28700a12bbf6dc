"""Whole runs of the scripts on simulated devices, one after another in the same processes.

    torchrun --nproc-per-node 4 tests/simcuda/programs/runs.py FOLDER NAME ...

Each run uses the first ranks of the program, as many as its entry says, and ends with a line of
its seconds. What the ranks have started lies in SIMCUDA_LOG, run by run.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import spmdflow
from scripts.families.run import SIZES_FOR_VLLM
from scripts.families.tiny import save_tiny_model
from spmdflow.kind.registry import register_tracker
from spmdflow.run import RankEnvironment, _take_device
from spmdflow.tracking.tracker import Sink

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "algos" / "arithmetic" / "model"
SMALL = (
    "actor.rollout.engine=builtin",
    "data.prompts_per_step=16",
    "data.eval_prompts=16",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "run.sample_every=0",
    "total_steps=2",
    "eval_every=2",
    "save_every=2",
)
PPO = (
    *SMALL,
    "actor.update.mini_batch_size=8",
    "critic.update.mini_batch_size=8",
    "critic.optimizer.schedule=constant",
    "critic.optimizer.warmup_steps=0",
)
PIPELINE = ("actor.engine.kind=megatron", "actor.engine.layout=t2p2")
VLLM = ("actor.rollout.engine=vllm", "actor.rollout.kv_cache_gib=0.0625", "eval_every=0")
T2 = ("actor.engine.kind=megatron", "actor.engine.layout=t2", "critic.engine.kind=megatron")
OFFLOAD = (
    "actor.engine.offload=[parameters,gradients,optimizer]",
    "critic.engine.offload=[parameters,gradients,optimizer]",
)
MICRO = ("actor.update.mini_batch_size=64", "actor.engine.micro_batch_rows=8")
"""Several micro-batches a step, between which the host does not wait."""
MIXTURE = (
    "actor.model.path={folder}/mixture",
    "reference.model.path={folder}/mixture",
    "actor.update.mini_batch_size=64",
)
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "ppo, fsdp, bfloat16": ("ppo", 2, PPO),
    "ppo, zero 1 and 2, offload": (
        "ppo",
        2,
        (*PPO, *OFFLOAD, "actor.engine.kind=zero1", "critic.engine.kind=zero2"),
    ),
    "ppo, megatron t2p2, sequence parallel": (
        "ppo",
        4,
        (
            *PPO,
            *PIPELINE,
            "actor.engine.options=[sequence_parallel,recompute]",
            "critic.engine.kind=megatron",
            "critic.engine.layout=p2",
            "critic.engine.options=[overlap,selective_recompute]",
        ),
    ),
    "ppo, split, zero 3": ("ppo", 4, (*PPO, "placement=split", "actor.engine.kind=zero3")),
    "grpo, fsdp": ("grpo", 2, (*SMALL, *MICRO)),
    "grpo, fsdp, resumed": (
        "grpo",
        2,
        (*(word for word in SMALL if not word.startswith("total_steps")), *MICRO, "total_steps=3"),
    ),
    "grpo, fsdp, a mixture, replayed routes": (
        "grpo",
        2,
        (*SMALL, *MIXTURE, "actor.update.router=replay", "actor.update.router_balance_coef=0.01"),
    ),
    "grpo, fsdp d2c2": (
        "grpo",
        4,
        (*SMALL, *MICRO, "actor.engine.layout=d2c2", "reference.engine.layout=c4"),
    ),
    "grpo, zero 3 c2, keys gathered, recompute": (
        "grpo",
        2,
        (
            *(*SMALL, *MICRO, "actor.engine.kind=zero3", "actor.engine.layout=c2"),
            *("actor.engine.context_attention=gather", "actor.engine.options=[recompute]"),
        ),
    ),
    "grpo, fsdp d2c2, rings": (
        "grpo",
        4,
        (
            *(*SMALL, *MICRO, "actor.engine.layout=d2c2", "reference.engine.layout=c4"),
            *(f"{role}.engine.context_attention=ring" for role in ("actor", "reference")),
        ),
    ),
    "grpo, megatron t2c2": (
        "grpo",
        4,
        (
            *(*SMALL, *MICRO, "actor.engine.kind=megatron", "actor.engine.layout=t2c2"),
            *("actor.engine.options=[sequence_parallel]", "reference.engine.layout=c2"),
        ),
    ),
    "grpo, fsdp e2, a mixture": (
        "grpo",
        4,
        (*SMALL, *MIXTURE, "actor.engine.layout=d4e2", "actor.update.router_balance_coef=0.01"),
    ),
    "grpo, megatron t2e2, a mixture": (
        "grpo",
        4,
        (
            *(*SMALL, *MIXTURE, "actor.engine.kind=megatron", "actor.engine.layout=t2e2"),
            *("actor.engine.options=[recompute]", "actor.update.router=replay"),
            "actor.update.router_balance_coef=0.01",
        ),
    ),
    "grpo, one step off policy": ("grpo_async", 4, (*SMALL, "actor.update.mini_batch_size=32")),
}
"""Name -> script, number of ranks, settings. A resumed run continues the run of that name."""
WITH_VLLM: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "ppo, megatron t4, vllm t2, blocks": (
        "ppo",
        4,
        (
            *(*PPO, *VLLM, *T2, "actor.rollout.weights=blocks"),
            *("actor.engine.layout=t4", "actor.rollout.layout=t2"),
        ),
    ),
    "grpo, megatron p2, vllm t2, copy": (
        "grpo",
        4,
        (
            *(*SMALL, *VLLM, "actor.engine.kind=megatron", "actor.engine.layout=p2"),
            *(
                "actor.rollout.layout=t2",
                "actor.update.mini_batch_size=64",
                "save_every=0",
                "run.save_last=false",
            ),
        ),
    ),
    "ppo, megatron t2, vllm t2, flat": (
        "ppo",
        4,
        (*PPO, *VLLM, *T2, "actor.rollout.weights=flat"),
    ),
    "ppo, fsdp, vllm t2, copy": ("ppo", 4, (*PPO, *VLLM, "actor.rollout.layout=t2")),
    "ppo, zero 3, vllm, copy, offload": (
        "ppo",
        2,
        (*PPO, *VLLM, *OFFLOAD, "actor.engine.kind=zero3", "critic.engine.kind=zero2"),
    ),
    "ppo, fsdp s2, vllm t2, copy": (
        "ppo",
        4,
        (*PPO, *VLLM, "actor.engine.layout=s2", "actor.rollout.layout=t2"),
    ),
    "grpo, megatron p3v2, vllm, copy": (
        "grpo",
        3,
        (
            *(*SMALL, *VLLM, "actor.model.path={folder}/deep", "data.samples_per_prompt=6"),
            *(
                "actor.engine.kind=megatron",
                "actor.engine.layout=p3v2",
                "save_every=0",
                "run.save_last=false",
            ),
            *("actor.rollout.layout=p3", "actor.update.mini_batch_size=48"),
        ),
    ),
    "grpo, fsdp, vllm t2, a mixture, replayed routes": (
        "grpo",
        2,
        (
            *(*SMALL, *VLLM, *MIXTURE, "actor.rollout.layout=t2", "actor.update.router=replay"),
            *("save_every=0", "run.save_last=false"),
        ),
    ),
    "grpo, megatron t2e2, vllm t2, a mixture": (
        "grpo",
        4,
        (
            *(*SMALL, *VLLM, *MIXTURE, "actor.rollout.layout=t2"),
            *("actor.engine.kind=megatron", "actor.engine.layout=t2e2"),
            *("save_every=0", "run.save_last=false"),
        ),
    ),
    "grpo, one step off policy, vllm": (
        "grpo_async",
        4,
        (*SMALL, *VLLM, "actor.update.mini_batch_size=32"),
    ),
}
"""The same; one of them in a process: vLLM's sleeping allocator takes no second engine."""
RUNS |= WITH_VLLM
_P2 = [
    f"{role}.engine.{setting}"
    for role in ("actor", "critic")
    for setting in ("kind=megatron", "layout=p2")
]
_STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo, fsdp": ("ppo", PPO),
    "ppo, fsdp, offload": ("ppo", (*PPO, *OFFLOAD)),
    "ppo, megatron p2": ("ppo", (*PPO, *_P2)),
    "grpo, fsdp": ("grpo", (*SMALL, "actor.update.mini_batch_size=64")),
}
STEPS = (2, 3)
BLOCKS = "device_blocks"
RUNS |= {
    f"{name}, {steps} steps": (
        script,
        2,
        (
            *(*settings, "eval_every=0", "save_every=0", "run.save_last=false"),
            *(f"total_steps={steps}", f"run.trackers=[{BLOCKS}]"),
            "actor.update.old_log_probs=recompute",  # auto may change its mind after a step
        ),
    )
    for name, (script, settings) in _STEPS.items()
    for steps in STEPS
}
"""What a run of three steps does more than one of two is what a step does."""


class DeviceBlocks(Sink):
    """Records what is on the device of the first rank after each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics are of no interest."""
        if "SIMCUDA_LOG" in os.environ:
            import record  # on simulated devices only

            record.measure(step)


def main() -> int:
    """0 if every run has ended as it should."""
    folder = Path(sys.argv[1])
    names = sys.argv[2:]
    rank = int(os.environ["RANK"])
    register_tracker(BLOCKS)(DeviceBlocks)  # only here: tests import this module
    _take_device(RankEnvironment.from_environment())
    limit = datetime.timedelta(seconds=1400)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
    if rank == 0:
        write_deep(folder / "deep")
        save_tiny_model("qwen3_moe", folder / "mixture", tokenizer=MODEL, sizes=SIZES_FOR_VLLM)
    dist.barrier()
    for name in names:
        run_dir = folder / f"run-{names.index(name.removesuffix(', resumed'))}"
        script, num_ranks, settings = RUNS[name]
        begin_run(name)
        began = time.perf_counter()
        status = spmdflow.launch(
            ROOT / "algos" / f"{script}.py",
            settings=[
                *(x.format(folder=folder) for x in settings),
                f"run.dir={run_dir}",
            ],
            ranks=tuple(range(num_ranks)),
        )
        if rank == 0:
            print(f"{name}: {status} after {time.perf_counter() - began:.1f} s", flush=True)
    dist.destroy_process_group()
    return 0


def write_deep(folder: Path) -> None:
    """The bundled model with six layers and random weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(MODEL, num_hidden_layers=6)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)


def begin_run(name: str) -> None:
    """What follows in the record belongs to this run."""
    if "SIMCUDA_LOG" in os.environ:
        import record  # on simulated devices only

        record.mark(name)


if __name__ == "__main__":
    sys.exit(main())
