"""Ranks run the Megatron engine on pools of 1 to 8 ranks; what they measured goes to a JSON file.

Usage: torchrun --nproc-per-node 4 megatron_engine.py FOLDER [equality|all]
"""

from __future__ import annotations

import json
import sys
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
from engine_world import loss_of, message
from fsdp_reference import make_batch
from megatron_adapters import MORE as MORE_ADAPTERS
from megatron_adapters import SOME as ADAPTERS
from megatron_adapters import (
    check_adapter_layouts,
    check_adapter_start,
    check_adapters,
    check_more_adapters,
)
from megatron_reference import FAMILIES, load, outputs_of, write_models
from megatron_world import Case, World, largest, whole_outputs
from torch import Tensor

from spmdflow.blocks.hash import positional_hash
from spmdflow.parallel.group import GroupTable
from spmdflow.weights import ranks

SOME = (
    Case("llama", 1, 1, 1, first=3),
    Case("mistral", 1, 4, 1),
    Case("llama-tied", 2, 1, 2, rows=1),
    Case("qwen3", 2, 2, 1),
    Case("qwen2", 2, 2, 1, ("sequence_parallel", "recompute")),
    Case("reward", 1, 2, 2),
)
"""Every family and kind of layout once."""
MORE = (
    Case("qwen3-tied", 2, 1, 2, ("plain_optimizer",)),
    Case("llama-tied", 2, 1, 2, ("overlap", "recompute")),
    Case("llama-deep", 3, 1, 1, virtual=2),
    Case("qwen2", 1, 2, 1, first=1, step=2),
    Case("mistral", 1, 2, 2, ("overlap", "plain_optimizer")),
    Case("llama-tied", 2, 1, 2),
    Case("qwen3-tied", 1, 4, 1, ("sequence_parallel",)),
    Case("llama-biased", 1, 2, 1, ("sequence_parallel", "recompute"), first=2),
    Case("llama", 1, 2, 2, ("plain_optimizer",)),
    Case("reward", 2, 2, 1, ("sequence_parallel",)),
    Case("qwen2", 1, 1, 4, ("overlap", "selective_recompute")),
    Case("llama-deep", 3, 1, 1),
    Case("llama-deep", 4, 1, 1, ("overlap", "recompute"), virtual=2),
    Case("llama-deep", 3, 1, 1, ("plain_optimizer",), rows=1, first=1, virtual=3),
)
"""Further ones, as a drill."""
LAYOUTS = ((1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2))
OPTIONS = ((), ("plain_optimizer",), ("sequence_parallel", "recompute"))
ALL = tuple(
    Case(model, *sizes, options=options)
    for model in FAMILIES
    for sizes in LAYOUTS
    for options in OPTIONS
    if not (model == "llama-biased" and options == OPTIONS[1])
)


def main(folder: Path, part: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = World(rank, dist.get_world_size(), GroupTable(rank, timeout_seconds=600), folder)
    ranks.OVERLAP_BUCKET = 4000  # elements: several buckets in a tiny model
    cases = {"some": SOME, "more": MORE, "all": ALL}[part]
    more = ADAPTERS + MORE_ADAPTERS if part != "all" else ()
    world.make_groups([case.layout for case in (*cases, *(case for case, _ in more))])
    if rank == 0:
        write_models(folder)
    dist.barrier()
    for case in cases:
        check_equality(world, case)
    for check in {"some": CHECKS, "more": MORE_CHECKS, "all": ()}[part]:
        check(world)
        dist.barrier()
    joined: list[Any] = [None] * world.size
    dist.all_gather_object(joined, world.results)
    if rank == 0:
        results = {name: value for found in joined for name, value in found.items()}
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def check_equality(world: World, case: Case) -> None:
    """Logits, gradient, loss, norm and the weights after a step, against Hugging Face."""
    engine = world.engine(case)
    if engine is None:
        return
    group = world.groups.get(case.layout.ranks)
    outputs: list[Any] = [None] * case.layout.size
    dist.all_gather_object(outputs, whole_outputs(engine, case, world), group=group)
    metrics = world.train(engine, case)
    everywhere: list[Any] = [None] * case.layout.size
    dist.all_gather_object(everywhere, metrics, group=group)
    state = whole_state(engine)
    full = dict(full_tensors(engine))
    if world.rank != case.layout.ranks[0]:
        return
    expected = world.reference(case)
    gaps = [
        (rows[i] - x).abs() for rows in outputs for i, x in enumerate(expected.outputs) if i in rows
    ]
    gradients = {name: state[f"{name}.exp_avg"] for name in expected.gradients}
    norm = torch.stack([g.double().norm() for g in expected.gradients.values()]).norm()
    steps = [
        (full[name] - weight).abs() * (expected.gradients[name].abs() > 1e-6)
        for name, weight in expected.weights.items()
    ]
    world.note(
        f"equality {case}",
        {
            "rows": len({row for rows in outputs for row in rows}),
            "logits": max(float(gap.max()) for gap in gaps),
            "gradient": largest(gradients, expected.gradients),
            "loss": abs(metrics["loss"] - expected.loss),
            "norm": abs(metrics["grad_norm"] / float(norm) - 1),
            "step": max(float(step.max()) for step in steps),
            "same_metrics": all(found == metrics for found in everywhere),
            "saved": largest(state, full),
        },
    )


def check_trajectory(world: World) -> None:
    """Four clipped steps with warm-up and cosine: the same in two layouts."""
    weights = {}
    for case in (Case("llama-tied", 2, 1, 2), Case("llama-tied", 1, 1, 1)):
        engine = world.engine(case, clip_norm=0.05, schedule="cosine", warmup_steps=2)
        if engine is None:
            continue
        rates = [world.train(engine, case, seed=seed)["lr"] for seed in range(4)]
        weights[case.d] = dict(full_tensors(engine))
        world.note("rates", rates)
    if world.rank == 0:
        world.note("trajectory", largest(weights[1], weights[2]))


def check_options(world: World) -> None:
    """Two steps with and without options that change no number, read at once: the same bits."""
    for sizes in ((2, 1, 2), (1, 1, 2)):
        weights = []
        for options in ((), ("overlap",), ("selective_recompute",), ("overlap", "recompute")):
            case = Case("qwen3", *sizes, options)
            engine = world.engine(case)
            if engine is None:
                continue
            metrics = [world.train(engine, case, seed=seed) for seed in (0, 1)]
            weights.append((metrics, dict(full_tensors(engine)), engine))
        if not weights:
            continue
        buckets = [len(e.optimizer.ddps[0].bucket_groups) for *_, e in weights if e.optimizer]
        world.note(f"buckets {sizes} {world.rank}", buckets)
        (first, plain, _), *others = weights
        for metrics, found, engine in others:
            same = [torch.equal(x, plain[name]) for name, x in found.items()]
            for one, other in zip(metrics, first):  # overlap cuts and sums other shards of a norm
                same.append(abs(one.pop("grad_norm") / other["grad_norm"] - 1) < 1e-6)
                same.append(one == {k: x for k, x in other.items() if k != "grad_norm"})
            world.note(f"same {sizes} {engine.cfg.options} {world.rank}", all(same))


def check_parts(world: World) -> None:
    """Two steps with one part of the model on each of three stages, and with two: the same bits."""
    found = []
    for virtual in (1, 2):
        case = Case("llama-deep", 3, 1, 1, virtual=virtual)
        engine = world.engine(case)
        if engine is None:
            return
        losses = [world.train(engine, case, seed=seed)["loss"] for seed in (0, 1)]
        found.append((losses, dict(full_tensors(engine))))
    (losses, plain), (others, weights) = found
    same = all(torch.equal(x, plain[name]) for name, x in weights.items())
    world.note(f"parts {world.rank}", same and losses == others)


def check_state(world: World) -> None:
    """Saved after a step and loaded into a new engine, the next step is the same, bitwise."""
    found = {}
    for case, dtype in (
        (Case("qwen3", 2, 1, 2), "float32"),
        (Case("llama-deep", 4, 1, 1, ("overlap",), virtual=2), "bfloat16"),
        (Case("qwen2", 1, 2, 2), "bfloat16"),
        (Case("reward", 2, 2, 1, ("plain_optimizer",)), "bfloat16"),
    ):
        first, second = (world.engine(case, dtype=dtype, betas=[0.9, 0.95]) for _ in range(2))
        assert first is not None and second is not None
        world.train(first, case)
        saved = state_of(first)
        load_state(second, saved, steps_done=1)
        for engine in (first, second):
            for part in ("gradients", "optimizer", "parameters"):
                engine.residency("host", part)
                engine.residency("device", part)
            world.train(engine, case, seed=1)
        pairs: dict[Any, Tensor] = {**dict(full_tensors(first)), **state_of(first)}
        others: dict[Any, Tensor] = {**dict(full_tensors(second)), **state_of(second)}
        found[f"{case} {dtype}"] = {
            "different": [str(n) for n, x in pairs.items() if not torch.equal(x, others[n])],
            "moved": any(not torch.equal(x, saved[n]) for n, x in state_of(first).items()),
            "dtypes": sorted({str(x.dtype) for x in saved.values()}),
        }
    world.note(f"state of rank {world.rank}", found)


def check_bfloat16(world: World) -> None:
    """bfloat16 compute near float32; weights are the rounded float32 masters, read once."""
    cases = Case("llama", 1, 2, 2), Case("llama-tied", 2, 2, 1)
    for case in (*cases, Case("reward", 2, 2, 1, ("sequence_parallel",))):
        engine = world.engine(case, dtype="bfloat16")
        read = world.share_read(engine)
        held = whole_state(engine)
        metrics = world.train(engine, case)
        state = whole_state(engine)
        full = dict(full_tensors(engine))
        files = exported(engine, world.folder / "export-bfloat16" / case.model)
        if world.rank == 0:
            expected = world.reference(case)
            a = torch.cat([state[f"{n}.exp_avg"].flatten() for n in expected.gradients])
            b = torch.cat([g.flatten() for g in expected.gradients.values()])
            named = load(world.folder, case.model).named_parameters()
            same = {n: torch.equal(rounded(n, state[n]), x) for n, x in files.items()}
            world.note(
                f"bfloat16 {case.model}",
                {
                    "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
                    "loss": abs(metrics["loss"] - expected.loss),
                    "exported": all(same.values()) and same.keys() == full.keys(),
                    "rounded": largest({n: rounded(n, x).float() for n, x in state.items()}, full),
                    "masters": largest(held, dict(named)),
                    "read": read / case.d,
                },
            )


def check_weights_out(world: World) -> None:
    """Hashes, blocks and exported folders after a step."""
    for case in (Case("llama-tied", 2, 1, 2), Case("mistral", 1, 4, 1), Case("reward", 2, 2, 1)):
        engine = world.engine(case)
        assert engine is not None
        world.train(engine, case)
        full = dict(full_tensors(engine))
        before = {dtype: engine.shard_hashes(dtype) for dtype in (torch.float32, torch.bfloat16)}
        same = all(
            found == {n: positional_hash(x.to(dtype)) for n, x in full.items()}
            for dtype, found in before.items()
        )
        held = all(torch.equal(x, full[n][box.slices()]) for n, x, box in engine.blocks())
        write_folder(engine, world.folder / "export" / case.model)
        dist.barrier()
        if world.rank == 3:  # last stage or last tensor-parallel rank
            block = next(x for n, x, _ in engine.blocks() if n.endswith("up_proj.weight"))
            block[-1, -1] += 1e-6
        after = engine.shard_hashes(torch.float32)
        changed = [name for name, value in after.items() if before[torch.float32][name] != value]
        world.note(f"hashes {case.model} {world.rank}", {"same": same, "held": held})
        if world.rank == 3:
            world.note(f"changed {case.model}", changed)
        if world.rank == 0:
            model = load(world.folder / "export", case.model)
            equal = all(torch.equal(p, full[n]) for n, p in model.named_parameters())
            files = sorted(p.name for p in (world.folder / "export" / case.model).iterdir())
            world.note(f"export {case.model}", {"equal": equal, "files": files})


def check_critic(world: World) -> None:
    """A critic from a tied causal model: a zero head that learns, exported as a scalar model."""
    case = Case("qwen2", 2, 2, 1)
    engine = world.engine(case, head="critic")
    assert engine is not None
    head = dict(full_tensors(engine))["score.weight"]
    share, parts = world.share(case)
    engine.train_step(share, loss_of("reward"), num_micro_batches=parts)
    full = dict(full_tensors(engine))
    write_folder(engine, world.folder / "export" / "critic")
    dist.barrier(engine.groups.get(engine.layout.ranks))
    if world.rank == 0:
        model = load(world.folder / "export", "critic")
        equal = all(torch.equal(p, full[n]) for n, p in model.named_parameters())
        found = [bool((head == 0).all()), bool((full["score.weight"] != 0).all()), equal]
        world.note("critic", [*found, type(model).__name__, model.config.num_labels])


def check_two_models(world: World) -> None:
    """Two models in other layouts take turns in one process; each is as if it were alone."""
    cases = (Case("qwen3", 1, 4, 1), Case("reward", 2, 1, 2))
    engines = [world.engine(case) for case in cases]
    frozen = world.engine(Case("llama", 2, 2, 1), trains=False)
    assert frozen is not None
    for engine, case in zip(engines, cases, strict=True):
        assert engine is not None
        whole_outputs(frozen, Case("llama", 2, 2, 1), world)
        whole_outputs(engine, case, world)
    for seed in (0, 1):
        for engine, case in zip(engines, cases, strict=True):
            assert engine is not None
            world.train(engine, case, seed=seed)
    for engine, case in zip(engines, cases, strict=True):
        assert engine is not None
        alone = world.engine(case)
        assert alone is not None
        for seed in (0, 1):
            world.train(alone, case, seed=seed)
        other = dict(full_tensors(alone))
        same = [torch.equal(x, other[n]) for n, x in full_tensors(engine)]
        world.note(f"turns {case.model} {world.rank}", all(same))
    outputs = whole_outputs(frozen, Case("llama", 2, 2, 1), world)
    if world.rank == 3:
        model = load(world.folder, "llama")
        plain = outputs_of(model, "llama", make_batch(5))
        gaps = [float((outputs[i] - x).abs().max()) for i, x in enumerate(plain)]
        world.note("frozen", max(gaps))


def check_adopted_storage(world: World) -> None:
    """Storage given between DDP and optimizer is what trains, with the same result."""
    case = Case("llama", 2, 1, 2)
    kept = []

    def adopt(ddp: Any, names: Any) -> None:
        (buffer,) = ddp.buffers
        storage = torch.zeros(2, buffer.numel)
        row = storage[1]
        row.copy_(buffer.param_data)
        for bucket in buffer.buckets:
            bucket.param_data = row[bucket.offset : bucket.offset + bucket.param_data.numel()]
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            parameter.data = row[start:stop].view(parameter.shape)
        buffer.param_data = row
        kept.append(storage)

    ours = world.engine(case, adopt=adopt)
    plain = world.engine(case)
    assert ours is not None and plain is not None
    before = kept[0].clone()
    for engine in (ours, plain):
        world.train(engine, case)
    other = dict(full_tensors(plain))
    inside = {
        kept[0].data_ptr() <= x.data_ptr() < kept[0].data_ptr() + kept[0].nbytes
        for _, x, _ in ours.blocks()
    }
    found = [
        all(torch.equal(x, other[n]) for n, x in full_tensors(ours)),
        inside == {True},
        bool((kept[0][1] != before[1]).any()) and bool((kept[0][0] == 0).all()),
    ]
    world.note(f"adopted {world.rank}", found)


def check_refusals(world: World) -> None:
    """What cannot work is refused; a gradient that is not finite changes nothing."""
    case = Case("llama", 2, 1, 2)
    engine = world.engine(case)
    assert engine is not None
    share, parts = world.share(case)
    share["advantages"].values().fill_(float("inf"))
    before = state_of(engine)
    world.note(
        "not_finite",
        message(lambda: engine.train_step(share, loss_of("policy"), num_micro_batches=parts)),
    )
    same = [torch.equal(before[name], x) for name, x in state_of(engine).items()]
    world.note(f"unchanged {world.rank}", all(same))
    frozen = world.engine(case, trains=False)
    assert frozen is not None
    world.note("frozen_step", message(lambda: world.train(frozen, case)))
    world.make_groups([Case("llama", 1, 3, 1).layout, Case("llama", 4, 1, 1).layout])
    if world.rank == 0:
        for name, wrong in {
            "tp": Case("llama", 1, 3, 1),
            "stages": Case("llama", 4, 1, 1),
            "option": Case("llama", 1, 1, 1, ("keep_gathered",)),
        }.items():
            world.note(f"refused_{name}", message(lambda case=wrong: world.engine(case)))
        alone = Case("llama", 1, 1, 1)
        world.note("refused_head", message(lambda: world.engine(alone, head="scalar")))


CHECKS = (
    check_trajectory,
    check_state,
    check_bfloat16,
    check_weights_out,
    check_critic,
    check_adopted_storage,
    check_refusals,
    check_adapters,
    check_adapter_layouts,
    check_adapter_start,
)
MORE_CHECKS = (check_options, check_parts, check_two_models, check_more_adapters)
"""Drills."""

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "some")
