"""Four ranks run engines on packed and on padded rows; rank 0 writes how far apart they are.

Usage: torchrun --nproc-per-node 4 packed_rows.py FOLDER. FOLDER/results.json: cases, each with its
largest relative gaps and the positions that the model of each rank computed; how far the answers of
rows move, by family, when the other rows of their micro-batch are permuted or replaced. On one and
two ranks most rows begin with the same prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import transformers
from engine_state import whole_state
from engine_world import LR, MAX_DP, loss_of, split
from fsdp_reference import TEMPERATURE, make_batch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.data.ragged import lengths_of, ragged, ragged_from_rows, rows_of, select_rows
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.micro_batch import MicroBatch
from spmdflow.workers.model import load_model

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4}),
    "qwen3": ("Qwen3", {}),
}
HEADS = {"causal_lm": "ForCausalLM", "scalar": "ForSequenceClassification"}
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "initializer_range": 0.1,
    "max_window_layers": 1,
}
BUDGET = 40
ROWS = 11
SHARED_DP = 2
SHARED = 8
"""On at most so many ranks, so many rows begin with PROMPT."""
PROMPT = torch.tensor([5, 3, 9, 9, 2, 7])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = GroupTable(rank, timeout_seconds=600)
    pools = [tuple(range(dp)) for dp in range(1, MAX_DP + 1)]
    alone = [(member,) for member in range(1, MAX_DP)]
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in pools + alone])
    if rank == 0:
        write_models(folder)
    dist.barrier()
    results = []
    for family, head, kind, dp, dtype in cases():
        if rank < dp:
            name = {"family": family, "head": head, "kind": kind, "dp": dp, "dtype": dtype}
            results.append(name | gaps(folder, groups, **name))
        dist.barrier()
    if rank == 0:
        moved = {family: moved_by_others(folder, groups, family) for family in FAMILIES}
        (folder / "results.json").write_text(json.dumps({"cases": results, "moved": moved}))
    dist.destroy_process_group()


def cases() -> Iterator[tuple[str, str, str, int, str]]:
    """Every family on FSDP over 1-4 ranks, and on ZeRO's stages; the critic's head on both."""
    for number, family in enumerate(FAMILIES):
        for dp in range(1, MAX_DP + 1):
            yield family, "causal_lm", "fsdp", dp, "float64" if dp % 2 else "float32"
            yield family, "scalar", "fsdp", dp, "float32" if dp % 2 else "float64"
        for place, kind in enumerate(("zero1", "zero2", "zero3")):
            dp = 2 + (number + place) % 3
            for dtype in ("float32", "float64"):
                yield family, "causal_lm", kind, dp, dtype


def write_models(folder: Path) -> None:
    """A tiny random model of each family with each head."""
    for seed, (name, (prefix, more)) in enumerate(FAMILIES.items()):
        config = getattr(transformers, f"{prefix}Config")(**SIZE, **more)
        for head, ending in HEADS.items():
            config.num_labels = 1
            torch.manual_seed(seed)
            model = getattr(transformers, prefix + ending)(config)
            model.save_pretrained(folder / name / head)


def gaps(
    folder: Path, groups: GroupTable, *, family: str, head: str, kind: str, dp: int, dtype: str
) -> dict[str, Any]:
    """Between packed and padded rows: of answers, metrics, gradients; positions of each rank."""
    model = folder / family / head
    packed, padded = (
        measured(engine_of(model, groups, head, kind, dp, dtype, how), head, dp)
        for how in ([], ["padded"])
    )
    found = {"answers": gap(padded["answers"], packed["answers"]), "gradients": 0.0}
    found["losses"] = max(gap(padded["losses"][n], x) for n, x in packed["losses"].items())
    if dist.get_rank() == 0:  # which has the whole state
        found["gradients"] = max(gap(padded["state"][n], x) for n, x in packed["state"].items())
    everyone: list[Any] = [None] * dp
    mine = found | {name: packed[name] for name in ("positions", "tokens")}
    mine |= {"padded_positions": padded["positions"]}
    dist.all_gather_object(everyone, mine, group=groups.get(tuple(range(dp))))
    worst = {name: max(each[name] for each in everyone) for name in found}
    return worst | {
        name: [each[name] for each in everyone]
        for name in ("positions", "tokens", "padded_positions")
    }


def moved_by_others(folder: Path, groups: GroupTable, family: str) -> list[float]:
    """Largest change of a row's log-probabilities: others permuted, others with other tokens."""
    engine = engine_of(folder / family / "causal_lm", groups, "causal_lm", "fsdp", 1, "float32", [])
    batch = make_batch(ROWS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))

    def answers(rows: TensorDict) -> list[Tensor]:
        found = engine.forward(rows, log_probs, num_micro_batches=1)
        assert isinstance(found, TensorDict)
        return rows_of(found["found"])

    first = answers(batch)
    permuted = answers(select_rows(batch, order))
    others = batch.clone()
    lengths = lengths_of(batch["responses"])
    kept = torch.arange(ROWS).repeat_interleave(lengths) == 0
    changed = torch.where(kept, batch["responses"].values(), 63 - batch["responses"].values())
    others["responses"] = ragged(changed, lengths)
    gaps = [gap(first[row], permuted[place]) for place, row in enumerate(order.tolist())]
    return [max(gaps), gap(first[0], answers(others)[0])]


def log_probs(output: CausalOutput, micro: MicroBatch) -> Mapping[str, Tensor]:
    return {"found": micro.spread(output.log_probs(TEMPERATURE))}


def values(output: ScalarOutput, micro: MicroBatch) -> Mapping[str, Tensor]:
    return {"found": micro.spread(output.at(micro.predicting))}


def measured(engine: TrainEngine, head: str, dp: int) -> dict[str, Any]:
    """One forward and one step on this rank's rows."""
    batch = make_batch(ROWS)
    if dp <= SHARED_DP:
        batch["prompts"] = ragged_from_rows([PROMPT] * SHARED + rows_of(batch["prompts"])[SHARED:])
    share, parts = split(batch, dp, dist.get_rank(), 1, BUDGET)
    positions: list[int] = []
    words = next(m for m in engine.model.module.modules() if isinstance(m, torch.nn.Embedding))
    words.register_forward_pre_hook(lambda _, given: positions.append(given[0].numel()))

    answer = values if head == "scalar" else log_probs
    answers = engine.forward(share, answer, num_micro_batches=parts)
    assert isinstance(answers, TensorDict)
    seen = sum(positions)
    metrics = engine.train_step(
        share, loss_of("reward" if head == "scalar" else "tied"), num_micro_batches=parts
    )
    assert sum(positions) == 2 * seen
    state = whole_state(engine)
    return {
        "answers": answers["found"].values(),
        # other metrics may be fractions of tokens, which are counted in float32
        "losses": {n: torch.tensor(metrics[n], dtype=torch.float64) for n in ("loss", "grad_norm")},
        "state": {name: x for name, x in state.items() if name.endswith(".exp_avg")},
        "positions": seen,
        "tokens": int(sum(lengths_of(share[name]).sum() for name in ("prompts", "responses"))),
    }


def engine_of(
    folder: Path,
    groups: GroupTable,
    head: str,
    kind: str,
    dp: int,
    dtype: str,
    options: list[str],
) -> TrainEngine:
    """Weights, moments and all computation in dtype; betas[0] = 0 keeps the gradient in exp_avg."""
    layout = Layout.data_parallel(tuple(range(dp)))
    context = WorkerContext("actor", layout, dist.get_rank(), groups, torch.device("cpu"), seed=0)
    model = load_model(ModelConfig(path=str(folder), dtype=dtype), head=head)
    model = replace(model, module=model.module.to(getattr(torch, dtype)))
    for part in model.module.modules():
        if type(part).__name__.endswith("RMSNorm"):  # transformers' own rounds to float32
            part.forward = partial(norm, part)
    optimizer = OptimizerConfig(lr=LR, betas=[0.0, 0.95], clip_norm=1e9)
    cfg = EngineConfig(kind=kind, options=options, micro_batch_tokens=BUDGET)
    engine = resolve(engine_kind(kind).implementation)
    return engine(model, cfg, context, optimizer=optimizer, total_optimizer_steps=1)


def norm(part: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, part.weight.shape, part.weight, part.variance_epsilon)


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest number."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
