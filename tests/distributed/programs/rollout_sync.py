"""Three ranks, an FSDP engine on ranks 1 and 2, a generator on each: what syncing does.

Usage: torchrun --nproc-per-node 3 rollout_sync.py FOLDER
Ranks 1 and 2 write FOLDER/rank-N.json; rank 0 only belongs to the world.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_state import full_tensors, load_state, state_of
from fsdp_reference import make_batch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.config.schema import (
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyLossConfig,
    RolloutConfig,
)
from spmdflow.errors import SpmdflowError
from spmdflow.hybrid_engine.sync import BoxSync
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import (
    NEVER,
    Generator,
    Replica,
    generator_of,
    take_folder_weights,
)
from spmdflow.rollout.sampling import Sampling
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.fsdp import FSDPEngine
from spmdflow.workers.model import load_model
from tests.rollout_reference import (
    END,
    disagreements,
    load,
    make_prompts,
    num_close,
    reference,
    write_llama,
)

POOL = (1, 2)
VOCABULARY = 100  # no multiple of 64: vLLM pads it
CPU = torch.device("cpu")
GREEDY = Sampling(16, greedy=True)
SAMPLED = Sampling(16, temperature=0.8)
Blocks = list[tuple[str, Tensor, Box]]


def from_folder(cfg: RolloutConfig, path: str, replica: Replica | None = None) -> Generator:
    """A generator that has the folder's weights, and counts as never synced."""
    generator = generator_of(cfg, path, CPU, replica)
    take_folder_weights(generator, path, verify=False)
    generator.weights_version = NEVER
    return generator


@dataclass
class World:
    """What the checks share on one rank."""

    rank: int
    groups: GroupTable
    folder: Path

    def engine(self, model: str) -> FSDPEngine:
        """A trainer over the pool."""
        context = WorkerContext("actor", Layout.data_parallel(POOL), self.rank, self.groups, CPU, 0)
        loaded = load_model(ModelConfig(path=str(self.folder / model)), head="causal_lm")
        optimizer = OptimizerConfig(lr=0.02)
        return FSDPEngine(
            loaded, EngineConfig(), context, optimizer=optimizer, total_optimizer_steps=100
        )

    def generator(self, model: str, **settings: Any) -> Generator:
        """A generator of this rank."""
        return from_folder(RolloutConfig(**settings), str(self.folder / model))

    @property
    def seeds(self) -> list[int]:
        """Sixteen row seeds that differ between ranks."""
        return [2**62 + 100 * self.rank + row for row in range(16)]

    def prompts(self, **sizes: Any) -> Tensor:
        """Sixteen prompts that differ between ranks."""
        return make_prompts(16, vocab_size=VOCABULARY, seed=self.rank, **sizes)


def sync_of(
    world: World, engine: FSDPEngine, generator: Generator, *, verify_every: int
) -> BoxSync:
    """From the trainer to this rank's generator."""
    return BoxSync(engine, generator, rank=world.rank, seconds=600, verify_every=verify_every)


def update(engine: FSDPEngine, seed: int) -> None:
    """One optimizer step on random rows, other ones on each rank."""
    batch = make_batch(5, seed=10 * seed + engine.rank)
    engine.train_step(batch, PolicyLoss(PolicyLossConfig(), 1.0), num_micro_batches=1)


def trained_model(world: World, engine: FSDPEngine, model: str) -> Any:
    """A fresh transformers model with the engine's weights."""
    fresh = load(world.folder / model)
    state = dict(full_tensors(engine))
    missing, unexpected = fresh.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    fresh.tie_weights()
    return fresh


def check_versions(world: World, generator: Generator) -> dict[str, Any]:
    """Generation is refused before the first sync, after an update and after a restore."""
    engine = world.engine("untied")
    hybrid = sync_of(world, engine, generator, verify_every=1)
    generate = lambda: hybrid.generate(world.prompts(), GREEDY, world.seeds)  # noqa: E731
    found: dict[str, Any] = {"new": (hybrid.needs_sync, message(generate))}
    hybrid.sync()
    found["synced"] = (hybrid.needs_sync, message(generate))
    update(engine, 1)
    found["updated"] = (hybrid.needs_sync, message(generate))
    metrics = hybrid.sync()
    found["synced again"] = (hybrid.needs_sync, message(generate))
    load_state(engine, state_of(engine), steps_done=1)
    found["restored"] = (hybrid.needs_sync, message(generate))
    whole = sum(tensor.numel() * 4 for _, tensor in full_tensors(engine))
    num_bytes = whole - sum(tensor.nbytes for _, tensor, _ in engine.blocks())
    found["bytes"] = (metrics["rollout/synced_bytes"].total, num_bytes)  # type: ignore[union-attr]
    return {"versions": found}


def check_updates(world: World, generator: Generator, *, model: str = "untied") -> dict[str, Any]:
    """After updates the responses are those of a fresh model with the trainer's weights."""
    engine = world.engine(model)
    hybrid = sync_of(world, engine, generator, verify_every=1)
    faults = []
    close = 0
    responses = []
    for number in range(3):
        update(engine, 2 * number)
        update(engine, 2 * number + 1)
        hybrid.sync()
        fresh = trained_model(world, engine, model)
        for sampling in (GREEDY, SAMPLED):
            found = hybrid.generate(world.prompts(), sampling, world.seeds)
            expected = reference(fresh, world.prompts(), sampling, world.seeds, (END,))
            faults += disagreements(found, expected, tolerance=1e-5)
            close += num_close(expected)
        responses.append(found["responses"].values().tolist())
    distinct = len({tuple(tokens) for tokens in responses})
    return {f"updates of {model}": {"faults": faults, "close": close, "distinct": distinct}}


def weights_of(generator: Any) -> Mapping[str, Tensor]:
    """The tensors that a generator's forward reads."""
    if hasattr(generator, "_reading"):
        return {name: view for name, view, _ in generator._reading.blocks}
    return generator._forward.weights


VICTIM = "model.layers.1.self_attn.k_proj.weight"
TWIN = "model.layers.0.self_attn.k_proj.weight"


def flip_a_bit(weights: Mapping[str, Tensor]) -> None:
    weights[VICTIM].view(torch.int32)[3, 5] ^= 1


def negate_a_zero(weights: Mapping[str, Tensor]) -> None:
    weights[VICTIM][0, 0] = -0.0


def swap_two_tensors(weights: Mapping[str, Tensor]) -> None:
    kept = weights[VICTIM].clone()
    weights[VICTIM].copy_(weights[TWIN])
    weights[TWIN].copy_(kept)


def shift_rows(weights: Mapping[str, Tensor]) -> None:
    weights[VICTIM].copy_(weights[VICTIM].roll(1, 0))


def nothing(weights: Mapping[str, Tensor]) -> None:
    del weights


def without_victim(blocks: Blocks) -> Blocks:
    """The victim keeps old values."""
    next(view for name, view, _ in blocks if name == VICTIM).mul_(1.5)
    return [block for block in blocks if block[0] != VICTIM]


def with_stale_victim(blocks: Blocks) -> Blocks:
    return [(n, tensor * (1 - 1e-6 * (n == VICTIM)), box) for n, tensor, box in blocks]


FAULTS: dict[str, tuple[Callable, Callable, Callable]] = {
    "none": (list, list, nothing),
    "flip": (list, list, flip_a_bit),
    "negative zero": (list, list, negate_a_zero),
    "swap": (list, list, swap_two_tensors),
    "shift": (list, list, shift_rows),
    "skip": (list, without_victim, nothing),
    "stale": (with_stale_victim, list, nothing),
}
"""What becomes of the trainer's blocks, of the generator's, and of its weights afterwards."""


@contextmanager
def faulty(
    engine: FSDPEngine, generator: Any, source: Callable, target: Callable, damage: Callable
) -> Iterator[None]:
    """A trainer and a generator between which weights go wrong."""
    give = engine.blocks
    take = generator.blocks
    renew = generator.renew

    def renew_wrongly(version: int) -> None:
        renew(version)
        with torch.no_grad():
            damage(weights_of(generator))

    engine.blocks = lambda: source(give())  # type: ignore[method-assign]
    generator.blocks = lambda: target(take())
    generator.renew = renew_wrongly
    try:
        yield
    finally:
        engine.blocks = give  # type: ignore[method-assign]
        generator.blocks = take
        generator.renew = renew


def check_faults(world: World, generator: Generator) -> dict[str, Any]:
    """Each fault's message, what generating says after it, and the next good sync's."""
    engine = world.engine("untied")
    with torch.no_grad():
        victim = next(tensor for name, tensor, _ in engine.blocks() if name == VICTIM)
        victim.normal_()[0, 0] = 0.0  # so that -0.0 is a fault
    hybrid = sync_of(world, engine, generator, verify_every=1)
    found = {}
    for name, fault in FAULTS.items():
        with faulty(engine, generator, *fault):
            said = message(hybrid.sync)
        found[name] = (said, hybrid.needs_sync, message(hybrid.sync))
    unverified = sync_of(world, engine, generator, verify_every=0)
    with faulty(engine, generator, *FAULTS["flip"]):
        found["flip, never verified"] = (message(unverified.sync), unverified.needs_sync, "")
    return {"faults": found}


def check_every(world: World, generator: Generator) -> dict[str, Any]:
    """Which of seven syncs compare hashes, when every third should."""
    hybrid = sync_of(world, world.engine("untied"), generator, verify_every=3)
    verified = [hybrid.sync()["rollout/weights_verified"].value for _ in range(7)]  # type: ignore[union-attr]
    return {"verified": verified}


def check_bfloat16(world: World, generator: Generator) -> dict[str, Any]:
    """A bfloat16 generator has the trainer's weights, rounded, and says if a bit differs."""
    engine = world.engine("untied")
    update(engine, 3)
    hybrid = sync_of(world, engine, generator, verify_every=1)
    said = message(hybrid.sync)

    def flip(weights: Mapping[str, Tensor]) -> None:
        weights[VICTIM].view(torch.int16)[0, 0] ^= 1

    with faulty(engine, generator, list, list, flip):
        return {"bfloat16": (str(generator.dtype), said, message(hybrid.sync))}


def message(action: Callable[[], object]) -> str:
    """The text of the error that action raises, or nothing."""
    try:
        action()
    except SpmdflowError as err:
        return f"{type(err).__name__}: {err}"
    return ""


def builtin_checks(world: World) -> dict[str, Any]:
    """Every check, with the built-in generator."""
    untied = world.generator("untied")
    tied = world.generator("tied")
    return (
        check_versions(world, world.generator("untied"))
        | check_updates(world, untied)
        | check_updates(world, tied, model="tied")
        | check_faults(world, untied)
        | check_every(world, untied)
        | check_bfloat16(world, world.generator("untied", dtype="bfloat16"))
    )


def main(folder: Path, checks: Callable[[World], dict[str, Any]]) -> None:
    """Make the models and groups, run checks on the pool, write what each rank found."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = World(dist.get_rank(), GroupTable(dist.get_rank(), timeout_seconds=600), folder)
    world.groups.make([GroupSpec(POOL, "compute", "gloo")])
    if world.rank == 0:
        write_llama(folder / "untied", vocab_size=VOCABULARY, max_position_embeddings=512)
        write_llama(folder / "tied", vocab_size=VOCABULARY, tie_word_embeddings=True, seed=1)
        write_llama(folder / "narrow", head_dim=16, seed=2)
    dist.barrier()
    results = checks(world) if world.rank in POOL else {}
    everyone = torch.ones(1)
    dist.all_reduce(everyone)  # the default group has survived
    (folder / f"rank-{world.rank}.json").write_text(json.dumps({"world": int(everyone), **results}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), builtin_checks)
