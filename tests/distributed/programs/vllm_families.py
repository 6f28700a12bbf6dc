"""One vLLM replica over all ranks, for each of some families: its table, its tokens, its checksums.

Usage: torchrun --nproc-per-node T vllm_families.py FOLDER FAMILY ...
Each rank writes FOLDER/rank-R.json, {family: what was found}. After FAMILY:experts the ranks divide
whole experts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from scripts.families.run import SIZES_FOR_VLLM
from scripts.families.tiny import save_tiny_model
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.errors import ConfigError
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.rollout.generator import Replica, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.rollout.vllm_derived import derive_tables
from spmdflow.rollout.vllm_weights import stock_table
from spmdflow.router import Routers
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import attention_of, with_tensors
from spmdflow.weights.table import ShardTable
from tests.vllm_routes import routes_found

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 12], [30], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [50, 51]]
TOKENS = 8


def main() -> None:
    """Measure all families, one after another."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = tuple(range(dist.get_world_size()))
    groups = GroupTable(rank, timeout_seconds=600)
    groups.make([GroupSpec(ranks, "compute", "gloo")])
    found = {}
    for word in sys.argv[2:]:
        family, _, whole_experts = word.partition(":")
        replica = Replica(rank, ranks, ranks, (rank,), groups, divides_experts=bool(whole_experts))
        model = folder / family
        if rank == 0:
            save_tiny_model(family, model, sizes=SIZES_FOR_VLLM)
        dist.barrier()
        try:
            found[word] = measure(model, replica)
        except ConfigError as err:
            found[word] = {"refused": str(err)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def measure(model: Path, replica: Replica) -> dict[str, Any]:
    """What one family's generator has and says."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, **attention_of(transformers.AutoConfig.from_pretrained(model))
    ).eval()
    cfg = RolloutConfig(engine="vllm", max_batch_size=8, max_new_tokens=TOKENS)
    cfg.max_prompt_tokens = 200
    routers = Routers.of(plain)
    if routers is not None:
        cfg.router = "replay"
    generator = VllmGenerator(cfg, str(model), CPU, replica)
    try:
        take_folder_weights(generator, str(model), verify=False)
        prompts = ragged_from_rows([torch.tensor(prompt) for prompt in PROMPTS])
        drawn = generator.generate(prompts, Sampling(TOKENS), list(range(len(PROMPTS))))
        result = {
            "gap": largest_gap(plain, rows_of(drawn["responses"]), drawn["rollout_log_probs"]),
            "hashes": generator.hashes(),
            "table": equals_recorded_table(generator, model, replica),
            "loads_again": loads_of_second_derivation(generator, model, replica),
        }
        if routers is not None:
            result["routes"] = routes_found(generator, plain, routers)
        result["swapped"] = names_after_swap(generator, result["hashes"])
        return result
    finally:
        generator.close()


def largest_gap(plain: Any, responses: list[Tensor], log_probs: Tensor) -> float:
    """Between the generator's log-probs and those of a forward of transformers over each row."""
    gap = 0.0
    for prompt, response, own in zip(PROMPTS, responses, rows_of(log_probs), strict=True):
        row = torch.cat([torch.tensor(prompt), response])[None]
        with torch.no_grad():
            logits = plain(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        gap = max(gap, float((own - expected).abs().max()))
    return gap


def equals_recorded_table(generator: VllmGenerator, model: Path, replica: Replica) -> bool:
    """Whether the derived table is the one that plans use, box by box."""
    architecture = Architecture.sizes_from_folder(model)
    if architecture.obstacle:
        architecture = with_tensors(architecture, model)
    derived = derive_tables(generator.model, str(model), replica)
    recorded = stock_table(architecture, replica, replica.replica_rank)
    return boxes_of(derived.tables[replica.replica_rank]) == boxes_of(recorded)


def loads_of_second_derivation(generator: VllmGenerator, model: Path, replica: Replica) -> int:
    """How often vLLM's loader runs if the tables are wanted again: they are kept."""
    calls = []
    load_weights = generator.model.load_weights
    generator.model.load_weights = lambda weights: (calls.append(1), load_weights(weights))
    derive_tables(generator.model, str(model), replica)
    del generator.model.load_weights
    return len(calls)


def boxes_of(table: ShardTable) -> dict[str, list[Any]]:
    """Shape and pieces, sorted, of each tensor of the engine."""
    return {name: [local.shape, *sorted(map(str, local.pieces))] for name, local in table.items()}


def names_after_swap(generator: VllmGenerator, before: dict[str, int]) -> list[str]:
    """Exchange two experts of the first tensor that has some; the tensors whose hash changed."""
    for name, view, _ in generator.blocks():
        if ".experts." in name and view.ndim == 3:
            first = view[0].clone()
            view[0] = view[1]
            view[1] = first
            break
    after = generator.hashes()
    return [name for name, value in after.items() if value != before[name]]


if __name__ == "__main__":
    main()
