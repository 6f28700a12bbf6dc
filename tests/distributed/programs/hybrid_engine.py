"""Four ranks, actors that train in one 3D layout and generate in another.

Usage: torchrun --nproc-per-node 4 hybrid_engine.py FOLDER CASE,...
Every rank writes FOLDER/rank-N.json: for each case three rounds of update, sync and generation,
compared with transformers, then planted faults.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_state import full_tensors, load_state, state_of
from fsdp_reference import make_batch
from hybrid_engine_case import CASES, Case
from rollout_world import CPU, GREEDY, SAMPLED, SEEDS, message
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.leaf import defaults
from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import lengths_of
from spmdflow.models.policy import ActorWorker
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.plan.record import Trace, TracedModel
from spmdflow.plan.weight import weight_plans
from spmdflow.rollout.sampling import Sampling
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.worker import WorkerContext
from tests.rollout_reference import END, disagreements, load, make_prompts, reference

ROUNDS = 3
TOLERANCE = 1e-5
COMMON = make_prompts(len(SEEDS), vocab_size=100, seed=77)


def actor_of(case: Case, folder: Path, rank: int, groups: GroupTable) -> ActorWorker:
    """The case's actor; collective over the world."""
    cfg = defaults(ActorConfig)
    cfg.model.lora = cfg.rollout.lora = None
    cfg.model.path = str(folder / case.family.replace(" ", "_"))
    cfg.model.dtype = "float32"
    cfg.engine.kind = "megatron"
    cfg.engine.layout = case.train
    cfg.engine.offload = list(case.offload)
    cfg.engine.options = list(case.options)
    cfg.rollout.engine = "vllm"
    cfg.rollout.layout = case.generate
    cfg.rollout.weights = case.weights
    cfg.rollout.max_batch_size = 8
    cfg.rollout.kv_cache_gib = 0.015625
    cfg.optimizer.lr = 5e-3
    ranks = tuple(range(dist.get_world_size()))
    layout = ActorWorker.layout_of(cfg, ranks)
    needed = ActorWorker.needed_groups(cfg, layout)
    groups.make([GroupSpec(group, "compute", "gloo") for group in needed])
    return ActorWorker(cfg, WorkerContext("actor", layout, rank, groups, CPU, 0, 0))


def update(actor: ActorWorker, seed: int) -> None:
    """One optimizer step on rows that differ between dp ranks."""
    actor.hybrid.release()
    dp = actor.context.layout.coordinate(actor.context.rank).dp
    batch = make_batch(5, seed=10 * seed + dp)
    with actor.resident("parameters", "gradients", "optimizer"):
        actor.engine.train_step(batch, actor.loss, num_micro_batches=1)


def trained_model(actor: ActorWorker) -> Any:
    """A transformers model with the trainer's weights."""
    model = load(actor.cfg.model.path)
    with actor.resident("parameters"):
        model.load_state_dict(dict(full_tensors(actor.engine)), strict=False)
    model.tie_weights()
    return model


def prompts_of(actor: ActorWorker) -> Tensor:
    """Prompts that differ between generation replicas."""
    replica = actor.context.layout.generation_replica(actor.context.rank)
    return make_prompts(len(SEEDS), vocab_size=100, seed=replica)


def sync(actor: ActorWorker) -> dict[str, float]:
    with actor.resident("parameters"):
        metrics = actor.hybrid.sync()
    return {name: float(value[0]) for name, value in metrics.items()}


def generate(actor: ActorWorker, prompts: Tensor, sampling: Any) -> TensorDict:
    actor.generator.wake()
    return actor.hybrid.generate(prompts, sampling, SEEDS)


def check_rounds(actor: ActorWorker) -> dict[str, Any]:
    """Update, sync, generate: equal to transformers every time, and other tokens every time."""
    prompts = prompts_of(actor)
    found = []
    for number in range(ROUNDS):
        update(actor, number)
        model = trained_model(actor)
        synced = sync(actor)
        faults = []
        tokens = []
        for sampling in (GREEDY, SAMPLED):
            made = generate(actor, prompts, sampling)
            expected = reference(model, prompts, sampling, SEEDS, (END,))
            faults += disagreements(made, expected, tolerance=TOLERANCE)
            tokens.append(made["responses"].values().tolist())
        found.append({"faults": faults, "tokens": tokens, "synced": synced})
    return {"rounds": found, "drift": drift(actor, COMMON), "planned": planned_bytes(actor)}


def planned_bytes(actor: ActorWorker) -> int:
    """What a plan says that this rank receives in a sync."""
    context = actor.context
    model = TracedModel("actor", ActorWorker, actor.cfg, context.layout, "all")
    ranks = context.layout.ranks
    trace = Trace(ranks, (0,) * len(ranks), {}, {"actor": model}, (), (), {}, {}, ())
    (way,) = weight_plans(trace)
    return way.received[context.rank]


def drift(actor: ActorWorker, prompts: Tensor) -> float | None:
    """Largest log-prob gap between the generator and the trainer; None before the last stage.

    prompts: the same on every rank, as a training replica scores them together.
    """
    made = generate(actor, prompts, Sampling(8))
    batch = TensorDict(
        {
            "prompts": prompts,
            "responses": made["responses"],
            "response_mask": made["response_mask"],
        },
        batch_size=[len(SEEDS)],
    )
    ids = torch.arange(len(SEEDS))
    actor.call = Command(1, 1, ids, generation=torch.zeros_like(ids))

    def score(output: Any, micro: Any) -> dict[str, Tensor]:
        return {"log_probs": micro.spread(output.log_probs())}

    scored = actor.score(batch, score)
    if scored is None:
        return None
    assert torch.equal(lengths_of(scored["log_probs"]), lengths_of(made["responses"]))
    return float((scored["log_probs"].values() - made["rollout_log_probs"].values()).abs().max())


def check_faults(actor: ActorWorker) -> dict[str, Any]:
    """What is planted after the weights have moved and before they are compared."""
    return {
        "stale": planted(actor, stale),
        "swapped": planted(actor, swapped_heads),
        "vocabulary": planted(actor, shifted_vocabulary),
        "cache": missed_reset(actor),
    }


def planted(
    actor: ActorWorker, plant: Callable[[dict[str, Tensor], dict[str, Tensor]], None]
) -> str:
    """The error of a sync between whose two halves something goes wrong on one rank."""
    hybrid = actor.hybrid
    views = {}
    for name, view, _ in actor.generator.blocks():
        views.setdefault(name, view)
    before = {name: view.clone() for name, view in views.items()}
    update(actor, 7)
    move = type(hybrid)._move

    def spoiled(version: int) -> int:
        received = move(hybrid, version)
        if actor.context.rank == 1:
            plant(views, before)
        return received

    hybrid._move = spoiled  # type: ignore[method-assign]
    said = message(lambda: sync(actor))
    del hybrid._move
    refused = message(lambda: generate(actor, prompts_of(actor), GREEDY))
    restored(actor)
    return f"{said} | {refused}"


def restored(actor: ActorWorker) -> None:
    """Right weights again: shared shards may be the trainer's own, whose masters are unharmed."""
    state = state_of(actor.engine)
    with actor.resident("parameters", "optimizer"):
        load_state(actor.engine, state, steps_done=actor.engine.optimizer.steps_done)
    sync(actor)


def stale(views: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    name = next(name for name in views if name.endswith("layers.1.mlp.gate_proj.weight"))
    views[name].copy_(before[name])


def swapped_heads(views: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    name = next(name for name in views if name.endswith("layers.1.self_attn.q_proj.weight"))
    rows = views[name]
    half = len(rows) // 2
    rows.copy_(torch.cat([rows[half:], rows[:half]]))


def shifted_vocabulary(views: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    views["model.embed_tokens.weight"].copy_(views["model.embed_tokens.weight"].roll(1, 0))


def missed_reset(actor: ActorWorker) -> tuple[float | None, float | None]:
    """Drift when the cached prefixes of old weights are kept, and after they are forgotten.

    vLLM keeps prefixes in blocks of 128 tokens on a CPU.
    """
    generator = actor.generator
    prompts = make_prompts(len(SEEDS), longest=400, vocab_size=100, seed=77)  # beyond a block
    generate(actor, prompts, GREEDY)
    forget = generator._reset_prefixes
    generator._reset_prefixes = lambda: None
    update(actor, 8)
    sync(actor)
    kept = drift(actor, prompts)
    generator._reset_prefixes = forget
    forget()
    return kept, drift(actor, prompts)


def run(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    results = {}
    groups = GroupTable(rank, timeout_seconds=600)
    for name in names:
        actor = actor_of(CASES[name], folder, rank, groups)
        results[name] = check_rounds(actor)
        if name == names[0]:
            results["faults"] = check_faults(actor)
        actor.close()
        del actor
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2].split(","))
