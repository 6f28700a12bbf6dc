"""Where vLLM's loader puts the weights of tiny models, on all ranks of one replica.

Usage: torchrun --nproc-per-node N observe_vllm.py FOLDER LAYOUT CASE ...
A case is a family, or family+variant. Each rank writes FOLDER/CASE-LAYOUT-RANK.json. After a model
that vLLM refuses, its process cannot start another one, and ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.families.tiny import FAMILIES, save_tiny_model
from spmdflow.config.parallel import sizes_of
from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import Replica, take_folder_weights
from spmdflow.rollout.table_cache import as_lists
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.rollout.vllm_derived import derive_tables

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "use_bias": True,
        "attention_out_bias": True,
        "use_qk_norm": True,
    },
    "dense": {"mlp_only_layers": [0]},
}
"""Settings of a config that give a model other tensors."""
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "head_dim": 32,
    "vocab_size": 300,
    "num_hidden_layers": 3,
}
"""Few of them are equal, and the vocabulary is padded. Heads as `scripts.families.run` has them."""
_OTHER_SIZES = {
    "gpt2": {"n_embd": 256, "n_layer": 3, "n_head": 8},
    "glm4_moe": {"num_hidden_layers": 6},  # vLLM wants a layer with experts on each of three stages
    "gpt_oss": {"intermediate_size": 384, "num_key_value_heads": 4},  # four ranks: multiples of 32
    "olmo2": {"num_key_value_heads": 4},
    "olmo3": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
}
"""vLLM refuses the last four on more ranks than key-value heads."""


def main() -> None:
    """Observe all cases, one after another."""
    folder = Path(sys.argv[1])
    layout = sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = tuple(range(dist.get_world_size()))
    groups = GroupTable(rank, timeout_seconds=600)
    groups.make([GroupSpec(ranks, "compute", "gloo")])
    sizes = sizes_of("layout", layout)
    whole = Layout(
        ranks,
        pp_size=1,
        dp_size=len(ranks),
        tp_size=1,
        gen_tp_size=sizes.tp,
        gen_pp_size=sizes.pp,
        gen_expert_size=sizes.ep,
    )
    replica = Replica.of(whole, rank, groups)
    for case in sys.argv[3:]:
        model = folder / "models" / f"{case}-{layout}"
        if rank == 0:
            save_model(case, model)
        dist.barrier()
        found = observe(model, replica)
        (folder / f"{case}-{layout}-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        if "refused" in found:
            os._exit(0)  # half an engine is left, whose end would wait for its parts


def save_model(case: str, folder: Path) -> None:
    """Write the tiny model of a case."""
    family, _, variant = case.partition("+")
    settings = FAMILIES[family]
    changes = dict(VARIANTS[variant])
    if "moe_intermediate_size" in settings:
        changes["moe_intermediate_size"] = 96
    if "shared_expert_intermediate_size" in settings:
        changes["shared_expert_intermediate_size"] = 64
    if "layer_types" in settings:
        types = settings["layer_types"]
        changes["layer_types"] = [*types, types[0]]
    changes |= _OTHER_SIZES.get(family, {})
    save_tiny_model(family, folder, sizes=_SIZES, changes=changes)


def observe(model: Path, replica: Replica) -> dict[str, Any]:
    """This rank's table, the shapes of the model's tensors and config.json; or why vLLM refuses."""
    settings = RolloutConfig(engine="vllm", max_batch_size=1, max_new_tokens=1)
    try:
        generator = VllmGenerator(settings, str(model), torch.device("cpu"), replica)
        take_folder_weights(generator, str(model), verify=False)
        derived = derive_tables(generator.model, str(model), replica)
        generator.close()
    except ConfigError as err:
        return {"refused": str(err)}
    own = derived.tables[replica.replica_rank]
    return {
        "config": json.loads((model / "config.json").read_text()),
        "shapes": {name: list(shape) for name, shape in derived.shapes.items()},
        "table": {name: as_lists(local) for name, local in own.items()},
    }


if __name__ == "__main__":
    main()
