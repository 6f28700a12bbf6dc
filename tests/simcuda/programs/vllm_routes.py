"""The experts that vLLM returns on a device, next to those of transformers on the CPU.

python tests/simcuda/programs/vllm_routes.py FOLDER      prints one line of JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

from scripts.families.run import SIZES_FOR_VLLM
from scripts.families.tiny import save_tiny_model
from spmdflow.config.schema import RolloutConfig
from spmdflow.rollout.generator import Replica, take_folder_weights
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.router import Routers
from tests.vllm_routes import routes_found


def main() -> None:
    """Generate twice on the first device; the second time a prompt is in the cache."""
    model = save_tiny_model("qwen3_moe", Path(sys.argv[1]) / "model", sizes=SIZES_FOR_VLLM)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    routers = Routers.of(plain)
    assert routers is not None
    torch.cuda.set_device(0)
    cfg = RolloutConfig(engine="vllm", max_batch_size=8, max_new_tokens=8, kv_cache_gib=0.0625)
    cfg.dtype = "float32"
    cfg.max_prompt_tokens = 200
    cfg.router = "replay"
    generator = VllmGenerator(cfg, str(model), torch.device("cuda", 0), Replica.alone())
    take_folder_weights(generator, str(model), verify=False)
    print(json.dumps(routes_found(generator, plain, routers)))
    generator.close()


if __name__ == "__main__":
    main()
