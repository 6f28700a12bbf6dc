"""Four ranks run data-parallel engines on pools of 1-4 ranks; rank 0 writes what it measured.

Usage: torchrun --nproc-per-node 4 fsdp_engine.py FOLDER [KIND:all | KIND:some]...
KIND: an engine's, with its groups of shards: fsdp-s2. FOLDER/results.json: kind -> check ->
figures. "some": a covering part of the pool sizes, numbers of rows and variants.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_state import (
    exported,
    full_tensors,
    load_state,
    rounded,
    state_of,
    whole_state,
    write_folder,
)
from engine_world import (
    MAX_DP,
    VARIANTS,
    Collectives,
    World,
    copies_differ,
    engine_config,
    loss_of,
    message,
    split,
)
from fsdp_measure import (
    errors,
    forward_error,
    largest,
    log_prob_columns,
    output_gap,
    score_columns,
)
from fsdp_reference import (
    Reference,
    load,
    make_batch,
    write_models,
)

from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import (
    EngineConfig,
    ModelConfig,
)
from spmdflow.data.ragged import lengths_of, rows_of
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.workers import sharding
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights

WHOLE_MODEL = sharding.UNIT_BYTES


def main(folder: Path, kinds: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = GroupTable(rank, timeout_seconds=600)
    pools = [tuple(range(dp)) for dp in range(1, MAX_DP + 1)]
    alone = [(member,) for member in range(1, MAX_DP)]
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3)]
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in pools + alone + pairs])
    if rank == 0:
        write_models(folder)
    dist.barrier()
    references: dict[tuple[str, int], Reference] = {}
    results = {}
    for name, _, extent in (kind.partition(":") for kind in kinds):
        engine, _, shard = name.partition("-s")
        if name in ("fsdp", "zero2"):  # a unit for each layer, as larger models have
            sharding.UNIT_BYTES = 1
        extent_and_shard = extent == "all", int(shard or 0)
        world = World(rank, groups, folder, {}, references, engine, *extent_and_shard)
        for check in CHECKS:
            check(world)
            dist.barrier()
        results[name] = world.results
        sharding.UNIT_BYTES = WHOLE_MODEL
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def check_gradients(world: World) -> None:
    """Every pool size, 1-9 rows, micro-batches of 1-4 rows or a token budget, both heads."""
    found = []
    for dp, name, row_counts in world.gradient_cases():
        kind, reshard, recompute, budget = VARIANTS[name]
        if world.rank >= dp:
            continue
        cfg = engine_config(reshard=reshard, recompute=recompute, budget=budget)
        engine = world.engine(kind, dp, cfg)
        start = state_of(engine)
        for rows in row_counts:
            load_state(engine, start, steps_done=0)
            share, parts = split(make_batch(rows), dp, world.rank, 1 + rows % 4, budget)
            metrics = engine.train_step(share, loss_of(kind), num_micro_batches=parts)
            state = whole_state(engine)
            if world.rank == 0:
                expected = world.reference(kind, rows)
                found.append({"variant": name, "dp": dp, "rows": rows, "parts": parts})
                found[-1] |= errors(metrics, state, expected)
    world.note("gradients", found)


def check_trajectory(world: World) -> None:
    """Four clipped steps with warm-up and cosine, on 4 ranks and on 1: equal weights.

    Groups of shards are compared with shards over all ranks too.
    """
    weights = {}
    for dp, shard in dict.fromkeys([(1, 0), (MAX_DP, 0), (MAX_DP, world.shard)]):
        if world.rank >= dp:
            continue
        engine = replace(world, shard=shard).engine(
            "tied", dp, EngineConfig(), clip_norm=0.05, schedule="cosine", warmup_steps=2
        )
        rates = []
        for step in range(4):
            share, parts = split(make_batch(6, seed=step), dp, world.rank, 2, None)
            metrics = engine.train_step(share, loss_of("tied"), num_micro_batches=parts)
            rates.append(metrics["lr"])
        weights[dp, shard] = dict(full_tensors(engine))
        world.note("rates", rates)
    if world.rank == 0:
        one, *others = weights.values()
        world.note("trajectory_error", max(largest(one, other) for other in others))
        world.note("shards_error", max(largest(others[0], other) for other in others))


def check_forward(world: World) -> None:
    """Columns come back in row order, ragged like the responses, also on ranks without rows."""
    for rows in (2, 9):
        for budget in (None, 20):
            world.note(f"forward_{rows}_{budget}", forward_gap(world, rows, budget))


def check_real_models(world: World) -> None:
    """The same with the pre-trained model and reward model that SPMDFLOW_DATA holds."""
    data = os.environ.get("SPMDFLOW_DATA")
    if not data:
        return
    real = replace(world, folder=world.folder / f"real-{world.kind}-{world.shard}", references={})
    if world.rank == 0:
        real.folder.mkdir()
        for kind, name in (("tied", "stories260K-hd64"), ("reward", "stories260K-hd64-rm-vader")):
            (real.folder / kind).symlink_to(Path(data).resolve() / "models" / name)
    dist.barrier()
    world.note("real_forward", forward_gap(real, 9, None))


def forward_gap(world: World, rows: int, budget: int | None) -> float:
    """Largest difference from plain Hugging Face of log-probs and scores on four ranks."""
    batch = make_batch(rows)
    share, parts = split(batch, MAX_DP, world.rank, 2, budget)
    cfg = engine_config(budget=budget)
    policy = world.engine("tied", MAX_DP, cfg)
    answer = policy.forward(share, log_prob_columns, num_micro_batches=parts)
    assert torch.equal(lengths_of(answer["log_probs"]), lengths_of(share["responses"]))
    reward = world.engine("reward", MAX_DP, cfg)
    answer["scores"] = reward.forward(share, score_columns, num_micro_batches=parts)["scores"]
    joined: list[Any] = [None] * MAX_DP
    dist.all_gather_object(
        joined, (rows_of(answer["log_probs"]), answer["scores"], answer.batch_size[0])
    )
    return forward_error(world.folder, batch, joined) if world.rank == 0 else 0.0


def check_state(world: World) -> None:
    """Saved after one step and loaded into a new engine, the second step is the same, bitwise."""
    batch = make_batch(7)
    share, parts = split(batch, MAX_DP, world.rank, 2, None)
    first = world.engine("untied", MAX_DP, EngineConfig())
    first.train_step(share, loss_of("untied"), num_micro_batches=parts)
    saved = state_of(first)
    first.forward(share, log_prob_columns, num_micro_batches=parts)
    first.train_step(share, loss_of("untied"), num_micro_batches=parts)
    second = world.engine("untied", MAX_DP, EngineConfig())
    second.forward(share, log_prob_columns, num_micro_batches=parts)  # loading must undo a gather
    load_state(second, saved, steps_done=1)
    second.train_step(share, loss_of("untied"), num_micro_batches=parts)
    for part in ("parameters", "gradients", "optimizer"):
        second.residency("host", part)
        second.residency("device", part)
    one = whole_state(first)
    two = whole_state(second)
    different = [name for name, whole in one.items() if not torch.equal(whole, two[name])]
    copies = copies_differ(second)
    world.note("state", {"blocks": len(one), "different": different, "copies": copies})


def check_hashes(world: World) -> None:
    """Hashes of shards equal hashes of whole tensors, for each pool size and dtype."""
    found = {}
    before = hashes_of(world.folder)
    for dp in range(1, MAX_DP + 1):
        if world.rank >= dp:
            continue
        engine = world.engine("reward", dp, EngineConfig())
        for dtype in (torch.float32, torch.bfloat16):
            hashes = engine.shard_hashes(dtype)
            whole = {n: positional_hash(x.to(dtype)) for n, x in full_tensors(engine)}
            found[f"{dp} {dtype}"] = hashes == whole
            world.note("hashed", list(hashes))
        name = "model.layers.0.mlp.up_proj.weight"
        last = (47, 31)
        for block_name, block, box in engine.blocks():
            if block_name == name and box.bounds[0][1] == last[0] + 1:
                block[-1, -1] += 1e-6
        changed = engine.shard_hashes(torch.float32)
        names = [n for n, x in full_tensors(engine) if changed[n] != before[n]]
        found[f"{dp} changed"] = names == ["model.layers.0.mlp.up_proj.weight"]
    world.note("hashes", found)
    engine = world.engine("reward", MAX_DP, EngineConfig())
    next(iter(engine.blocks()))[1].add_(world.rank)
    world.note("copies", message(lambda: engine.shard_hashes(torch.bfloat16)))


def check_export(world: World) -> None:
    """A folder written from shards loads in Hugging Face and gives the same logits."""
    for kind in ("tied", "untied", "reward"):
        engine = world.engine(kind, MAX_DP, EngineConfig())
        share, parts = split(make_batch(5), MAX_DP, world.rank, 2, None)
        engine.train_step(share, loss_of(kind), num_micro_batches=parts)
        target = world.folder / f"export-{world.kind}-{world.shard}"
        write_folder(engine, target / kind)
        dist.barrier()
        full = dict(full_tensors(engine))
        columns = score_columns if kind == "reward" else log_prob_columns
        answer = engine.forward(share, columns, num_micro_batches=parts)
        if world.rank == 0:
            model = load(target, kind)
            same = {n: torch.equal(p, full[n]) for n, p in model.named_parameters()}
            untrained = load(world.folder, kind)
            moved = largest(dict(untrained.named_parameters()), full)
            gap = output_gap(model, kind, share, answer)
            files = sorted(path.name for path in (target / kind).iterdir())
            world.note(f"export_{kind}", {"same": all(same.values()), "moved": moved, "gap": gap})
            world.note("export_files", files)


def check_bfloat16(world: World) -> None:
    """bfloat16 compute: near the float32 gradient; master weights and moments stay float32."""
    found = {}
    for kind in ("tied", "reward"):
        engine = world.engine(kind, 2, EngineConfig(), dtype="bfloat16") if world.rank < 2 else None
        if engine is None:
            continue
        share, parts = split(make_batch(8), 2, world.rank, 2, None)
        metrics = engine.train_step(share, loss_of(kind), num_micro_batches=parts)
        state = whole_state(engine)
        files = exported(engine, world.folder / f"export-{world.kind}-bfloat16" / kind)
        if world.rank == 0:
            expected = world.reference(kind, 8)
            a = torch.cat([state[f"{n}.exp_avg"].flatten() for n in expected.gradients])
            b = torch.cat([g.flatten() for g in expected.gradients.values()])
            dtypes = {str(x.dtype) for x in state.values()}
            found[kind] = {
                "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
                "loss_error": errors(metrics, state, expected)["loss"],
                "dtypes": sorted(dtypes),
                "exported": all(torch.equal(rounded(n, state[n]), x) for n, x in files.items()),
                "names": sorted(set(engine.shapes) ^ set(files)),
            }
    world.note("bfloat16", found)


def check_division(world: World) -> None:
    """What each rank holds of parameters and moments, and the collectives of a step."""
    engine = world.engine("tied", MAX_DP, EngineConfig())
    blocks = {n: x.numel() for n, x, _ in engine.blocks()}
    moments = sum(x.numel() for n, x, _ in engine.own_state_blocks() if n.endswith(".exp_avg"))
    held: list[Any] = [None] * MAX_DP
    dist.all_gather_object(held, (sum(blocks.values()), moments))
    counts = {}
    for parts in (1, 3):
        share, _ = split(make_batch(12), MAX_DP, world.rank, 1, None)
        with Collectives() as collectives:
            engine.train_step(share, loss_of("tied"), num_micro_batches=parts)
        counts[parts] = collectives.elements
    whole = 0
    root = 0
    for name, x in full_tensors(engine):
        whole += x.numel()
        if ".layers." not in name:
            root += x.numel()
    found = {"whole": whole, "root": root, "held": held, "counts": counts}
    world.note("division", found)


def check_refusals(world: World) -> None:
    """A gradient that is not finite stops the run and changes nothing; other misuse is named."""
    engine = world.engine("tied", MAX_DP, EngineConfig())
    batch = make_batch(4)
    batch["advantages"].values()[0] = float("inf")
    share, parts = split(batch, MAX_DP, world.rank, 2, None)
    before = state_of(engine)
    text = message(lambda: engine.train_step(share, loss_of("tied"), num_micro_batches=parts))
    after = state_of(engine)
    world.note("not_finite", text)
    world.note("unchanged", all(torch.equal(before[name], after[name]) for name in before))
    critic = load_model(ModelConfig(path=str(world.folder / "tied")), head="critic")
    head = read_weights(critic, torch.device("cpu")).get_parameter("score.weight")
    world.note("zero_head", bool((head == 0).all()) and tuple(head.shape) == (1, 32))
    causal = ModelConfig(path=str(world.folder / "tied"))
    world.note("no_head", message(lambda: load_model(causal, head="scalar")))
    world.note(
        "no_folder", message(lambda: load_model(ModelConfig(path="/nowhere"), head="causal_lm"))
    )


def hashes_of(folder: Path) -> dict[str, int]:
    model = load(folder, "reward")
    return {name: positional_hash(p) for name, p in model.named_parameters()}


CHECKS = (
    check_gradients,
    check_trajectory,
    check_forward,
    check_real_models,
    check_state,
    check_hashes,
    check_export,
    check_bfloat16,
    check_division,
    check_refusals,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
