"""Four ranks, vLLM on generation replicas of several ranks.

Usage: torchrun --nproc-per-node 4 rollout_tp.py FOLDER [all]
Every rank writes FOLDER/rank-N.json. With `all`: every family on every layout.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_state import full_tensors
from rollout_sync import update
from rollout_world import (
    CPU,
    DATA_PARALLEL,
    GREEDY,
    LAYOUTS,
    SAMPLED,
    SEEDS,
    Logits,
    World,
    compare,
    message,
    shards_of,
    trained,
    with_weights,
)
from torch import Tensor

from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.hybrid_engine.sync import BoxSync
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.vllm_contract import check_contract
from spmdflow.serving.backend import register_backend
from spmdflow.serving.receiver import ConnectionReceiver
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Storages
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.fsdp import FSDPEngine
from spmdflow.workers.model import load_model
from tests.rollout_reference import FAMILIES, load, make_prompts, put_weights, write_family


def check_load(world: World, generator: Any, layout: Layout, family: str) -> dict[str, Any]:
    """Other weights: the responses and the hashes are theirs."""
    weights = trained(world, family, 7)
    put_weights(generator, weights.items(), version=3)
    hashes = {name: positional_hash(tensor) for name, tensor in weights.items()}
    found = compare(world, generator, layout, with_weights(world, family, weights))
    return found | {
        "hashes": generator.hashes() == hashes,
        "version": generator.weights_version,
    }


def view_of(generator: Any, name: str) -> Tensor | None:
    """This rank's view of a tensor, if it reads a part of it."""
    views = (view for held, view, _ in generator._reading.blocks if held == name)
    return next(views, None)


def check_faults(world: World, generator: Any) -> dict[str, Any]:
    """One changed bit on one rank: in its own rows, in what all hold, in padding."""
    found = {}
    right = generator.hashes()
    changed = world.replica(LAYOUTS["t2 strided"]).tp_rank == 1
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        view = view_of(generator, name)
        kept = view.clone()
        if changed:
            view[3, 5] *= 1.5
        hashes = generator.hashes()
        found[name] = sorted(n for n in right if right[n] != hashes[n])
        view.copy_(kept)
    norm = view_of(generator, "model.layers.1.input_layernorm.weight")
    kept = norm.clone()
    if changed:
        norm[3] *= 1.5
    found["norm"] = message(generator.hashes)
    found["version after"] = generator.weights_version
    norm.copy_(kept)
    embedding = generator.model.model.embed_tokens.weight
    with torch.no_grad():
        if changed:
            embedding[100 - 64 :] += 1  # rows 64 to 127 of 128, of which 100 are tokens
    found["padding"] = [len(embedding), generator.hashes() == right]
    return found


def check_disagreement(world: World, generator: Any, layout: Layout) -> dict[str, Any]:
    """Ranks of a replica with other seeds."""
    prompts = world.prompts(layout)
    seeds = [seed + world.rank for seed in SEEDS]
    return {"seeds": message(lambda: generator.generate(prompts, GREEDY, seeds))}


def check_sleep(world: World, generator: Any, layout: Layout) -> dict[str, Any]:
    """Bytes of the KV cache and of the weights awake, asleep and half awake."""
    prompts = world.prompts(layout)
    weights = trained(world, "llama", 7)
    put_weights(generator, weights.items(), version=5)
    before = generator.generate(prompts, SAMPLED, SEEDS)["responses"].values().tolist()
    cache = Storages(generator._runner.kv_caches)
    held = Storages(generator.model.parameters())
    sizes = {"awake": (cache.num_bytes, held.num_bytes)}
    generator.sleep()
    sizes["cache asleep"] = (cache.num_bytes, held.num_bytes)
    generator.sleep(weights=True)
    sizes["all asleep"] = (cache.num_bytes, held.num_bytes)
    version = generator.weights_version
    generator.wake("weights")
    sizes["weights awake"] = (cache.num_bytes, held.num_bytes)
    put_weights(generator, weights.items(), version=6)
    sizes["loaded"] = (cache.num_bytes, held.num_bytes)
    after = generator.generate(prompts, SAMPLED, SEEDS)["responses"].values().tolist()
    return {"sizes": sizes, "version asleep": version, "same": before == after}


def check_blocks(
    world: World, generator: Any, layout: Layout, family: str, tp_size: int
) -> dict[str, Any]:
    """The trainer's shards instead of vLLM's weights, then an update of them in place."""
    arch = Architecture.from_folder(world.path(family))
    replica = world.replica(layout)
    weights = trained(world, family, 8)
    shards = shards_of(weights, arch, replica, tp_size)
    generator.share(shards, tp_size=tp_size, vocab_multiple=128)
    generator.mark_shared(1)
    model = with_weights(world, family, weights)
    found = {"first": compare(world, generator, layout, model)}
    hashes = {name: positional_hash(tensor) for name, tensor in weights.items()}
    found["hashes"] = generator.hashes() == hashes
    renewed = trained(world, family, 9)
    for key, views in shards_of(renewed, arch, replica, tp_size).items():
        for view, values in zip(shards[key], views, strict=True):
            view.copy_(values)
    generator.mark_shared(2)
    model = with_weights(world, family, renewed)
    found["second"] = compare(world, generator, layout, model)
    shared = {view.data_ptr() for views in shards.values() for view in views}
    parameters = generator.model.parameters()
    found["own"] = sum(p.numel() for p in parameters if p.data_ptr() not in shared)
    key = next(name for name in shards if name.endswith("qkv_proj.weight"))
    wrong = {**shards, key: [shards[key][0][1:]]}
    found["wrong"] = message(lambda: generator.share(wrong, tp_size=tp_size, vocab_multiple=128))
    found["vocabulary"] = message(
        lambda: generator.share(shards, tp_size=tp_size, vocab_multiple=96)
    )
    return found


@contextmanager
def sent_bytes() -> Iterator[Counter[int]]:
    """What this rank sends to each other one."""
    found: Counter[int] = Counter()
    batch = dist.batch_isend_irecv
    broadcast = dist.broadcast

    def counting_batch(messages: list[dist.P2POp]) -> Any:
        for each in messages:
            if each.op is dist.isend:
                found[each.peer] += each.tensor.nbytes
        return batch(messages)

    def counting_broadcast(tensor: Tensor, source: int, *, group: Any, async_op: bool) -> Any:
        others = set(dist.get_process_group_ranks(group)) - {source}
        if source == dist.get_rank():
            found.update(dict.fromkeys(others, tensor.nbytes))
        return broadcast(tensor, source, group=group, async_op=async_op)

    dist.batch_isend_irecv = counting_batch
    dist.broadcast = counting_broadcast
    try:
        yield found
    finally:
        dist.batch_isend_irecv = batch
        dist.broadcast = broadcast


def check_trainer(world: World, generator: Any, layout: Layout) -> dict[str, Any]:
    """An FSDP trainer on all ranks: updates, verified syncs, responses."""
    path = world.path("llama")
    context = WorkerContext("actor", DATA_PARALLEL, world.rank, world.groups, CPU, 0)
    engine = FSDPEngine(
        load_model(ModelConfig(path=str(path)), head="causal_lm"),
        EngineConfig(),
        context,
        optimizer=OptimizerConfig(lr=0.02),
        total_optimizer_steps=10,
    )
    node = world.rank // 2  # so that both ranks of a node have the same shard of the generator
    hybrid = BoxSync(engine, generator, rank=world.rank, seconds=600, verify_every=1, node=node)
    found: dict[str, Any] = {"new": message(hybrid.sync)}
    update(engine, 1)
    generator.sleep(weights=True)
    with sent_bytes() as sent:
        metrics = hybrid.sync()
    # type: ignore[union-attr]
    found["sent"] = sent
    found["synced"] = metrics["rollout/synced_bytes"].total
    found["verified"] = metrics["rollout/weights_verified"].value  # type: ignore[union-attr]
    model = with_weights(world, "llama", dict(full_tensors(engine)))
    found["responses"] = compare(world, generator, layout, model)
    view = view_of(generator, "lm_head.weight")
    renew = generator.renew

    def renew_and_damage(version: int) -> None:
        renew(version)
        view[5, 3] += world.replica(layout).tp_rank  # type: ignore[index]

    generator.renew = renew_and_damage
    update(engine, 2)
    found["damaged"] = (message(hybrid.sync), hybrid.needs_sync)
    generator.renew = renew
    return found


def check_contract_moves() -> dict[str, Any]:
    """What is said when a name that is used has moved, and of an untried version."""
    import vllm

    found = {"as installed": message(lambda: check_contract())}
    for module, path in (
        ("vllm.distributed.parallel_state", "_DCP"),
        ("vllm.distributed.utils", "get_pp_indices"),
        ("vllm.model_executor.layers.logits_processor", "LogitsProcessor._gather_logits"),
    ):
        owner: Any = import_module(module)
        *inner, name = path.split(".")
        for part in inner:
            owner = getattr(owner, part)
        kept = getattr(owner, name)
        delattr(owner, name)
        found[f"{module}.{path}"] = message(lambda: check_contract())
        setattr(owner, name, kept)
    state: Any = import_module("vllm.distributed.parallel_state")
    with ExitStack() as undo:
        undo.callback(setattr, state, "GroupCoordinator", state.GroupCoordinator)
        undo.callback(setattr, vllm, "__version__", vllm.__version__)
        state.GroupCoordinator = type("Moved", (), {"all_gather": 0, "__init__": lambda self: None})
        vllm.__version__ = "0.99.1"
        found["arguments"] = message(lambda: check_contract())
    return found


def check_transfer_contract_moves() -> dict[str, Any]:
    """The same for what a backend of vLLM's weight-transfer interface needs (serving)."""
    transfer: Any = import_module("vllm.distributed.weight_transfer")
    stock = transfer.WeightTransferEngine
    found = {}
    wider = type("Wider", (stock,), {"send": abstractmethod(lambda self: None)})
    for case, name, changed in (
        ("installed", "WeightTransferEngine", stock),
        ("moved", "WeightTransferEngineFactory", object()),
        ("wider", "WeightTransferEngine", wider),
    ):
        kept = getattr(transfer, name)
        setattr(transfer, name, changed)
        found[case] = message(lambda: register_backend("for this test", ConnectionReceiver))
        found[f"{case}, unused"] = message(check_contract)
        setattr(transfer, name, kept)
    return found


def check_block_logits(world: World, family: str, *, dtype: str = "float32") -> dict[str, Any]:
    """Logits of one rank with its stock weights, and with 1, 2 and 4 shards of the same."""
    layout = Layout((world.rank,))
    generator = world.generator(family, layout, dtype=dtype)
    logits = Logits(generator)
    prompts = make_prompts(len(SEEDS), vocab_size=100)
    weights = {n: p.detach() for n, p in load(world.path(family)).named_parameters()}
    arch = Architecture.from_folder(world.path(family))
    generator.generate(prompts, GREEDY, SEEDS)
    stock = logits.take()
    gaps = {}
    hashes = generator.hashes()
    for tp_size in (1, 2, 4):
        shards = shards_of(weights, arch, Replica.alone(), tp_size)
        shards = {k: [v.to(generator.dtype) for v in views] for k, views in shards.items()}
        generator.share(shards, tp_size=tp_size, vocab_multiple=128)
        generator.mark_shared(tp_size)
        generator.generate(prompts, GREEDY, SEEDS)
        found = logits.take()
        gaps[tp_size] = (
            float((found - stock).abs().max()) if found.shape == stock.shape else 1e9,
            generator.hashes() == hashes,
        )
    largest = float(stock.abs().max())
    generator.close()
    return {"gaps": gaps, "largest": largest, "draws": len(stock)}


def one_layout(world: World, family: str, name: str) -> dict[str, Any]:
    """A family on a layout: the folder's weights, then others, then those of a trainer's shards."""
    layout = LAYOUTS[name]
    if world.rank not in layout.ranks:
        return {}
    generator = world.generator(family, layout)
    replica = world.replica(layout)
    found = {"ranks": [replica.tp_ranks, replica.pp_ranks]}
    found["folder"] = compare(world, generator, layout, load(world.path(family)))
    found["loaded"] = check_load(world, generator, layout, family)
    found["blocks"] = check_blocks(world, generator, layout, family, layout.tp_size)
    generator.close()
    return found


def default_checks(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of every day: each family and each kind of layout once."""
    strided = LAYOUTS["t2 strided"]
    generator = world.generator("llama", strided)
    yield "llama", compare(world, generator, strided, load(world.path("llama")))
    yield "llama loaded", check_load(world, generator, strided, "llama")
    yield "faults", check_faults(world, generator)
    yield "disagreement", check_disagreement(world, generator, strided)
    yield "sleep", check_sleep(world, generator, strided)
    yield "trainer", check_trainer(world, generator, strided)
    yield "blocks of t4", check_blocks(world, generator, strided, "llama", 4)
    generator.close()
    yield "t2p2", one_layout(world, "qwen2", "t2p2")
    t4 = LAYOUTS["t4"]
    generator = world.generator("qwen3", t4)
    yield "qwen3", compare(world, generator, t4, load(world.path("qwen3")))
    yield "qwen3 loaded", check_load(world, generator, t4, "qwen3")
    yield "blocks with few kv heads", check_blocks(world, generator, t4, "qwen3", 4)
    generator.close()
    yield "contract", check_contract_moves()
    yield "transfer contract", check_transfer_contract_moves()


def all_checks(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every family on every layout, and the block-wise layers of each."""
    for family in FAMILIES:
        for name in LAYOUTS:
            yield f"{family} on {name}", one_layout(world, family, name)
        if world.rank == 0:
            yield f"logits of {family}", check_block_logits(world, family)
        if world.rank == 1:
            yield f"bfloat16 of {family}", check_block_logits(world, family, dtype="bfloat16")


def main(folder: Path, checks: Callable[[World], Iterator[tuple[str, dict[str, Any]]]]) -> None:
    """Make models and groups, run the checks, write what each rank found."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    torch.set_num_threads(1)
    world = World(dist.get_rank(), GroupTable(dist.get_rank(), timeout_seconds=600), folder)
    for layout in (*LAYOUTS.values(), DATA_PARALLEL):
        axes = ("gen_tp", "gen_pp", "gen_replica", "dp")
        groups = [group for axis in axes for group in layout.axis_groups(axis)]
        world.groups.make(GroupSpec(group, "compute", "gloo") for group in groups)
    if world.rank == 0:
        for family in FAMILIES:
            write_family(world.path(family), family)
    dist.barrier()
    results = dict(checks(world))
    everyone = torch.ones(1)
    dist.all_reduce(everyone)  # the default group has survived
    results["world"] = {"size": int(everyone)}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), all_checks if sys.argv[2:] else default_checks)
