"""Generates the same rows with vLLM in process or on servers, and writes them to a file.

Usage: served.py in-process|served OUTPUT.pt TP_SIZE MAX_BATCH_SIZE [TRANSPORT] [FAMILY]

FAMILY: of scripts/families, whose tiny model is made next to OUTPUT.pt; without one, the bundled
model of sums.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from scripts.families.run import SIZES_FOR_VLLM
from scripts.families.tiny import save_tiny_model
from spmdflow.config.schema import RolloutConfig, ServerConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.generator import Replica, RunContext, take_folder_weights
from spmdflow.rollout.sampling import Sampling

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "algos" / "arithmetic" / "model"
NUM_ROWS = 40


def main() -> None:
    """Generate, and write responses and log-probabilities."""
    kind, output, tp_size, max_batch_size = sys.argv[1:5]
    is_exact = max_batch_size == "1"
    server = ServerConfig(exact=is_exact, tp_size=int(tp_size), transfer_seconds=60.0)
    if sys.argv[5:]:
        server.transport = sys.argv[5]
    model = str(MODEL)
    if sys.argv[6:]:
        folder = Path(output).parent / "model"
        model = str(save_tiny_model(sys.argv[6], folder, tokenizer=MODEL, sizes=SIZES_FOR_VLLM))
    cfg = RolloutConfig(
        engine="served" if kind == "served" else "vllm",
        dtype="float32",
        max_new_tokens=24,
        max_batch_size=int(max_batch_size),
        kv_cache_gib=1 / 64,
        server=server,
    )
    device = torch.device("cpu")
    if kind == "served":
        from spmdflow.serving.generator import ServedGenerator

        generator = ServedGenerator(cfg, model, device, RunContext(Path(output).parent))
    else:
        from spmdflow.rollout.vllm import VllmGenerator

        generator = VllmGenerator(cfg, model, device, Replica.alone())
    take_folder_weights(generator, model, verify=model == str(MODEL))
    torch.manual_seed(0)
    sizes = torch.randint(2, 12, (NUM_ROWS,)).tolist()
    prompts = ragged_from_rows([torch.randint(3, 16, (size,)) for size in sizes])
    seeds = list(range(1000, 1000 + NUM_ROWS))
    columns = generator.generate(prompts, Sampling(max_new_tokens=24, temperature=1.3), seeds)
    rows = {name: rows_of(columns[name]) for name in ("responses", "rollout_log_probs")}
    torch.save(rows, output)
    generator.close()


if __name__ == "__main__":
    main()
