"""Actors on any device: rounds of update, sync and generation, and the memory of each phase.

Every function runs on each rank of run_ranks. With device "cpu" they do the same on gloo, which is
how they were tried where no GPU was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed" / "programs"))

import torch
import torch.distributed as dist
from engine_state import full_tensors
from fsdp_reference import make_batch
from torch import Tensor

from spmdflow.config.leaf import defaults
from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import rows_of
from spmdflow.errors import SpmdflowError
from spmdflow.models.policy import ActorWorker
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.rollout.sampling import Sampling
from spmdflow.worker_api.worker import WorkerContext
from tests.rollout_reference import load, make_prompts

ROUNDS = 3
NUM_ROWS = 6
NEW_TOKENS = 8
KV_CACHE_BYTES = 1 << 26
SEEDS = [2**62 + row for row in range(NUM_ROWS)]


@contextmanager
def actor_on(device: str, path: str, settings: dict[str, str]) -> Iterator[ActorWorker]:
    """An actor over all ranks; settings: "engine.kind": "megatron" and the like."""
    cfg = defaults(ActorConfig)
    cfg.model.lora = cfg.rollout.lora = None
    cfg.model.path = path
    cfg.optimizer.lr = 5e-3
    cfg.rollout.max_batch_size = 8
    cfg.rollout.kv_cache_gib = KV_CACHE_BYTES / (1 << 30)
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(cfg, section), name, value)
    rank = dist.get_rank()
    ranks = tuple(range(dist.get_world_size()))
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    layout = ActorWorker.layout_of(cfg, ranks)
    groups = GroupTable(rank, timeout_seconds=600)
    backend = "nccl" if device == "cuda" else "gloo"
    needed = ActorWorker.needed_groups(cfg, layout)
    hosts = ActorWorker.host_groups(cfg, layout)
    groups.make([GroupSpec(group, "compute", backend) for group in needed])
    groups.make([GroupSpec(group, "compute", "gloo") for group in hosts])
    actor = ActorWorker(cfg, WorkerContext("actor", layout, rank, groups, place, 0, 0))
    try:
        yield actor
    finally:
        actor.close()


def follow(device: str, path: str, settings: dict[str, str]) -> list[dict[str, float]]:
    """Each round: largest log-prob gap to transformers, and where its greedy token is another.

    The gap of margins: how much better transformers finds its own token, 0 where they agree. ahead:
    most steps that vLLM has begun beyond the one whose tokens are known.
    """
    found = []
    with actor_on(device, path, settings) as actor:
        prompts = make_prompts(NUM_ROWS, vocab_size=100)
        ahead = steps_ahead(actor.generator)
        for number in range(ROUNDS):
            update(actor, number)
            model = trained_model(actor)
            synced = sync(actor)
            made = actor.hybrid.generate(prompts, Sampling(NEW_TOKENS, greedy=True), SEEDS)
            found.append(compared(model, prompts, made) | {"verified": synced})
            generated(actor, prompts)
            found[-1]["ahead"] = max(ahead, default=0)
    return found


def steps_ahead(generator: Any) -> list[int]:
    """Grows with each step of vLLM: how many more it has begun (async scheduling); else empty."""
    found: list[int] = []
    if hasattr(generator, "_llm"):
        engine = generator._llm.llm_engine
        core = generator._core
        stock = engine.step

        def step() -> Any:
            outputs = stock()
            found.append(len(core.batch_queue or ()))
            return outputs

        engine.step = step
    return found


def stale(device: str, path: str, settings: dict[str, str]) -> str:
    """The error of a sync after which one tensor still has its old values on one rank."""
    name = "model.layers.1.mlp.down_proj.weight"
    with actor_on(device, path, settings) as actor:
        update(actor, 0)
        sync(actor)
        view = next(view for held, view, _ in actor.generator.blocks() if held == name)
        old = view.clone()
        move = type(actor.hybrid)._move

        def spoiled(version: int) -> int:
            received = move(actor.hybrid, version)
            if actor.context.rank == 0:
                view.copy_(old)
            return received

        actor.hybrid._move = spoiled  # type: ignore[method-assign]
        update(actor, 1)
        try:
            sync(actor)
        except SpmdflowError as err:
            return f"{type(err).__name__}: {err}"
    return ""


def phases(device: str, path: str, settings: dict[str, str]) -> dict[str, int]:
    """Bytes in use on the device after each phase (0 on the CPU)."""
    found = {}
    with actor_on(device, path, settings) as actor:
        prompts = make_prompts(NUM_ROWS, vocab_size=100)
        for name, phase in (
            ("built", lambda: None),
            ("trained", lambda: update(actor, 0)),
            ("synced", lambda: sync(actor)),
            ("generated", lambda: generated(actor, prompts)),
            ("asleep", actor.generator.sleep),
            ("trained again", lambda: update(actor, 1)),
        ):
            phase()
            if name.startswith("trained") and device == "cuda":
                here = {part_of(n) for n, t, _ in actor.engine.state_blocks() if on_device(t)}
                assert here == {"parameters", "optimizer"} - set(
                    actor.cfg.engine.offloaded_parts
                ), here
            found[name] = used_bytes() if device == "cuda" else 0
    return found


def part_of(name: str) -> str:
    """Of an FSDP engine's block."""
    return "optimizer" if name.endswith((".exp_avg", ".exp_avg_sq")) else "parameters"


def on_device(tensor: Tensor) -> bool:
    """Whether its memory is there."""
    return tensor.is_cuda and tensor.untyped_storage().nbytes() > 0


def used_bytes() -> int:
    """Of the device, by the driver: torch's own counters do not see vLLM's sleep."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def update(actor: ActorWorker, seed: int) -> None:
    """One optimizer step on rows that differ between dp ranks."""
    actor.hybrid.release()
    dp = actor.context.layout.coordinate(actor.context.rank).dp
    with actor.resident("parameters", "gradients", "optimizer"):
        batch = make_batch(5, seed=10 * seed + dp)
        actor.engine.train_step(batch, actor.loss, num_micro_batches=1)


def sync(actor: ActorWorker) -> float:
    """Whether hashes were compared."""
    with actor.resident("parameters"):
        verified: Any = actor.hybrid.sync()["rollout/weights_verified"]
    return float(verified[0])


def generated(actor: ActorWorker, prompts: Tensor) -> Any:
    """Sampled responses."""
    actor.generator.wake()
    return actor.hybrid.generate(prompts, Sampling(NEW_TOKENS), SEEDS)


def trained_model(actor: ActorWorker) -> Any:
    """A transformers model in float32, on the CPU, with the trainer's weights as they generate."""
    model = load(actor.cfg.model.path)
    dtype = getattr(torch, actor.cfg.rollout.precision)
    with actor.resident("parameters"):
        weights = {n: t.to(dtype).float().cpu() for n, t in full_tensors(actor.engine)}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


@torch.no_grad()
def compared(model: Any, prompts: Tensor, made: Any) -> dict[str, float]:
    """Responses against transformers, which is shown the same tokens."""
    gap = worse = 0.0
    rows = zip(rows_of(prompts), rows_of(made["responses"]), rows_of(made["rollout_log_probs"]))
    for prompt, response, log_probs in rows:
        ids = torch.cat([prompt, response.cpu()])[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, response.cpu()[:, None])[:, 0]
        gap = max(gap, float((log_probs.cpu() - expected).abs().max()))
        chosen = logits.gather(1, response.cpu()[:, None])[:, 0]
        worse = max(worse, float((logits.max(-1).values - chosen).max()))
    return {"gap": gap, "worse": worse}
