"""Generates on a server, lets it sleep and wake, and generates again. Usage: served_sleep.py FOLDER

The last line is JSON: whether the responses are equal, and the device memory that the server's
processes hold before, during and after its sleep.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from spmdflow.config.schema import RolloutConfig, ServerConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.generator import RunPlace, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.serving.generator import ServedGenerator

MODEL = str(Path(__file__).parents[3] / "algos" / "arithmetic" / "model")


def main() -> None:
    """Generate, sleep, wake, generate, and print what was found."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    server = ServerConfig(transfer_seconds=120.0, health_seconds=30.0, stall_seconds=300.0)
    cfg = RolloutConfig(
        engine="served",
        dtype="float32",
        max_new_tokens=8,
        max_batch_size=4,
        kv_cache_gib=1 / 16,
        server=server,
    )
    generator = ServedGenerator(cfg, MODEL, device, RunPlace(Path(sys.argv[1])))
    take_folder_weights(generator, MODEL, verify=True)
    prompts = ragged_from_rows([torch.tensor([1, 5, 6, 13, 7]), torch.tensor([1, 9, 13, 4])])
    responses = []
    free = [torch.cuda.mem_get_info()[0]]
    for _ in range(2):
        columns = generator.generate(prompts, Sampling(max_new_tokens=8), [3, 4])
        responses.append([row.tolist() for row in rows_of(columns["responses"])])
        free.append(torch.cuda.mem_get_info()[0])
        generator.sleep()
        free.append(torch.cuda.mem_get_info()[0])
    print(json.dumps({"responses": responses, "free": free}))
    generator.close()


if __name__ == "__main__":
    main()
