"""GRPO steps of a model of real shape on one GPU: seconds and memory beside the prediction.

    python scripts/gpu_step.py 0.5b builtin --out FOLDER
    python scripts/gpu_step.py 1.5b vllm --out FOLDER actor.engine.options=[]
    python scripts/gpu_step.py mixture vllm --out FOLDER actor.engine.kind=megatron

Three steps with Qwen2.5's shapes (mixture: a small Qwen3-MoE) and random weights: 32 prompts with 8
samples of 512 tokens each, optimizer steps on 128 rows. Settings of the run may follow. Prints the
run's table of predicted and measured seconds, the last step's metrics, each call's peak of tensors
and the device's peak memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from real_size import CONFIG, ROOT, write_model

SHAPES = {
    "0.5b": {},
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
    "3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "intermediate_size": 11008,
    },
    "mixture": {  # 1.8 billion parameters, of which a token uses 0.4 billion
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
STEPS = 3
SETTINGS = (
    "data.prompts_per_step=32",
    "data.samples_per_prompt=8",
    "actor.rollout.max_new_tokens=512",
    "actor.update.mini_batch_size=128",
    "actor.engine.micro_batch_tokens=16384",
    "reference.engine.micro_batch_tokens=16384",
    "actor.model.dtype=bfloat16",
    "actor.rollout.dtype=bfloat16",
    "reference.model.dtype=bfloat16",
    f"total_steps={STEPS}",
    "eval_every=0",
    "save_every=0",
    "run.save_last=false",
    "run.sample_every=0",
)


class PeakMemory(threading.Thread):
    """The highest number of bytes in use on the device, by the driver, asked every 50 ms."""

    def __init__(self) -> None:
        """Begins with the first reading."""
        super().__init__(daemon=True)
        self.peak_mib = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Reads until `end`."""
        query = [
            "nvidia-smi",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            "-lms",
            "50",
        ]
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            self.peak_mib = max(self.peak_mib, int(line))
            if self._ended.is_set():
                break
        process.terminate()
        process.wait()

    def end(self) -> int:
        """Returns the highest reading in MiB."""
        self._ended.set()
        self.join(timeout=5)
        return self.peak_mib


def main() -> int:
    """Writes the model, runs the steps, prints and keeps what the run wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("engine", choices=["builtin", "vllm"])
    parser.add_argument("--out", type=Path, required=True)
    args, settings = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        run_dir = Path(scratch) / "run"
        write_model(model, CONFIG | SHAPES[args.size], seed=0)
        words = [*SETTINGS, f"actor.model.path={model}", f"actor.rollout.engine={args.engine}"]
        words += [f"run.dir={run_dir}", *settings]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        memory = PeakMemory()
        memory.start()
        command = [sys.executable, *torchrun, "-m", "spmdflow.run", "grpo", *words]
        status = subprocess.run(command, cwd=ROOT).returncode
        peak = memory.end()
        for name in (
            "prediction.txt",
            "metrics.jsonl",
            "calls.jsonl",
            "config.yaml",
            "failure.json",
        ):
            if (run_dir / name).exists():
                text = (run_dir / name).read_text()
                (args.out / f"{args.size}-{args.engine}-{name}").write_text(text)
                if name == "prediction.txt":
                    print(text)
        show_last_step(run_dir)
        print(f"highest memory in use on the device: {peak / 1024:.1f} GiB")
    return status


def show_last_step(run_dir: Path) -> None:
    """Prints the last step's seconds, tokens per second and mismatch, and each call's memory."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return
    last = json.loads(metrics.read_text().splitlines()[-1])
    for key, value in sorted(last.items()):
        if key.startswith(("time/", "perf/", "rollout/")):
            print(f"{key:40} {value:.5g}")
    for line in (run_dir / "calls.jsonl").read_text().splitlines():
        call = json.loads(line)
        if call["step"] == last["step"] and "device_bytes" in call:
            print(f"{call['label']:40} {call['device_bytes'] / 1e9:.1f} GB in use at most")


if __name__ == "__main__":
    sys.exit(main())
