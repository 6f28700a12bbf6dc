"""Generates on a server, lets it sleep and wake, and generates again. Usage: served_sleep.py FOLDER

The last line is JSON: the responses before and after, and what the server says of its state.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import torch

from spmdflow.config.schema import RolloutConfig, ServerConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.generator import RunContext, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.serving.generator import ServedGenerator

MODEL = str(Path(__file__).parents[3] / "algos" / "arithmetic" / "model")


def is_sleeping(generator: ServedGenerator) -> bool:
    """What vLLM's own route says."""
    url = generator._own[0].url
    key = Path(sys.argv[1], "servers", "key-0").read_text(encoding="ascii")
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/is_sleeping", headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bool(json.loads(answer.read())["is_sleeping"])


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
    generator = ServedGenerator(cfg, MODEL, device, RunContext(Path(sys.argv[1])))
    take_folder_weights(generator, MODEL, verify=True)
    prompts = ragged_from_rows([torch.tensor([1, 5, 6, 13, 7]), torch.tensor([1, 9, 13, 4])])
    responses = []
    asleep = []
    awake = []
    for number in range(2):
        columns = generator.generate(prompts, Sampling(max_new_tokens=8), [3, 4])
        responses.append([row.tolist() for row in rows_of(columns["responses"])])
        if number:
            awake.append(not is_sleeping(generator))
        generator.sleep()
        asleep.append(is_sleeping(generator))
    print(json.dumps({"responses": responses, "asleep": asleep, "awake": awake}))
    generator.close()


if __name__ == "__main__":
    main()
