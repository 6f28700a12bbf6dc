"""Adapters under Megatron: against peft, on other layouts, and with the dropout of FSDP."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_state import full_tensors, whole_state
from engine_world import loss_of, message
from fsdp_reference import make_batch
from megatron_reference import outputs_of
from megatron_world import LR, Case, World, largest, whole_outputs
from torch import Tensor

from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import EngineConfig, LoRAConfig, ModelConfig, OptimizerConfig
from spmdflow.weights.adapter import adapter_names, is_adapter
from spmdflow.weights.move import Block
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.fsdp import FSDPEngine
from spmdflow.workers.lora import add_adapters
from spmdflow.workers.model import load_model

RANK = 4
SOME = (
    (Case("qwen3", 1, 2, 1), LoRAConfig(RANK, 8.0, rslora=True)),
    (Case("llama", 1, 1, 1), LoRAConfig(RANK, 8.0, modules_to_save=["lm_head"])),
    (Case("llama", 1, 2, 2), LoRAConfig(RANK, 8.0, ["k_proj", "down_proj", "up_proj"])),
)
MORE = (
    (Case("qwen2", 1, 2, 2, ("recompute",)), LoRAConfig(RANK, 8.0)),
    (
        Case("qwen2", 1, 2, 1, ("overlap",)),
        LoRAConfig(RANK, 8.0, rslora=True, modules_to_save=["embed_tokens"]),
    ),
    (Case("llama-biased", 1, 2, 2, ("plain_optimizer",)), LoRAConfig(RANK, 8.0)),
    (
        Case("llama", 1, 2, 1),
        LoRAConfig(RANK, 8.0, ["o_proj"], modules_to_save=["lm_head", "model.norm"]),
    ),
)
"""Drills."""


def check_adapters(world: World) -> None:
    """`SOME` of the cases."""
    for case, lora in SOME:
        _check_step(world, case, lora)


def check_more_adapters(world: World) -> None:
    """`MORE` of the cases."""
    for case, lora in MORE:
        _check_step(world, case, lora)


def _check_step(world: World, case: Case, lora: LoRAConfig) -> None:
    """A step against peft's; the merged weights, their hashes, and those of separate adapters."""
    engine = world.engine(case, lora=lora)
    if engine is None:
        return
    _fill_b(engine)
    start = whole_state(engine)
    outputs = whole_outputs(engine, case, world)
    with engine.without_adapters():
        off = whole_outputs(engine, case, world)
    metrics = world.train(engine, case)
    state = whole_state(engine)
    merged = dict(full_tensors(engine))
    hashed = engine.shard_hashes(torch.float32)
    engine.merges_adapters = False
    separate = dict(full_tensors(engine))
    if world.rank != case.layout.ranks[0]:
        return
    from tests.distributed.lora_reference import peft_model, peft_step

    names = [name for name in start if name.endswith(".weight")]
    model = peft_model(world.folder / case.model, {n: start[n] for n in names}, lora)
    batch = make_batch(case.rows)
    expected = dict(enumerate(outputs_of(model, case.model, batch)))
    gradients, weights = peft_step(model, batch, lr=LR)
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    with model.disable_adapter():
        plain = dict(enumerate(outputs_of(model, case.model, batch)))
    trained = peft_model(world.folder / case.model, {n: state[n] for n in names}, lora)
    theirs = dict(trained.merge_and_unload().named_parameters())
    steps = [(state[n] - x).abs() * (gradients[n].abs() > 1e-5) for n, x in weights.items()]
    found = {
        "logits": max(float((x - expected[row]).abs().max()) for row, x in outputs.items()),
        "gradient": largest({n: state[f"{n}.exp_avg"] for n in names}, gradients),
        "step": max(float(x.max()) for x in steps),
        "moved": min(float((state[n] - start[n]).abs().max()) for n in names),
        "norm": abs(metrics["grad_norm"] / float(norm) - 1),
        "merged": largest(merged, theirs) if merged.keys() == theirs.keys() else None,
        "hashed": hashed == {n: positional_hash(x) for n, x in merged.items()},
        "separate": largest(_add_separate(separate), merged),
    }
    if not lora.modules_to_save:
        found["off"] = max(float((x - plain[row]).abs().max()) for row, x in off.items())
    world.note(f"adapters {case} {lora.modules_to_save}", found)


def _fill_b(engine: TrainEngine) -> None:
    """Values for B under any layout; zeros would give A no gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = engine.trained_shapes
    values = {n: 0.1 * torch.randn(shapes[n], generator=generator) for n in sorted(shapes)}

    def load(blocks: Iterable[Block]) -> None:
        for name, view, box in blocks:
            if name.endswith("lora_B.weight"):
                view.copy_(values[name][box.slices()])

    engine.load_blocks(load, 0)


def _add_separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """W + B A of the tensors that a generator with adapters gets."""
    result = {}
    for name, values in tensors.items():
        a, b = adapter_names(name)
        if a in tensors:
            values = values + tensors[b] @ tensors[a]
        if not is_adapter(name):
            result[name] = values
    return result


def check_adapter_layouts(world: World) -> None:
    """A state of t2 goes on under t1 and under FSDP, with dropout: the same next step."""
    lora = LoRAConfig(RANK, 8.0, dropout=0.3)
    two = Case("qwen3", 1, 2, 1)
    engine = world.engine(two, lora=lora, betas=[0.0, 0.95])
    if engine is None:
        return
    _fill_b(engine)
    world.train(engine, two)
    saved = whole_state(engine)
    world.train(engine, two, seed=1)
    expected = whole_state(engine)
    if world.rank != 0:
        return
    one = Case("qwen3", 1, 1, 1)
    others = {"t1": world.engine(one, lora=lora), "fsdp": _fsdp(world, one, lora)}
    plain = world.engine(one, lora=LoRAConfig(RANK, 8.0))
    found = {}
    for name, other in {**others, "without": plain}.items():
        assert other is not None
        other.load_blocks(lambda blocks: _fill(blocks, saved), 1)
        share, parts = world.share(one, seed=1)
        other.train_step(share, loss_of("policy"), num_micro_batches=parts)
        state = whole_state(other)
        moments = [n for n in expected if n.endswith("exp_avg")]
        found[name] = largest(state, {n: expected[n] for n in moments})
    world.note("adapter layouts", found)


def _fill(blocks: Iterable[Block], saved: dict[str, Tensor]) -> None:
    for name, view, box in blocks:
        view.copy_(saved[name][box.slices()])


def _fsdp(world: World, case: Case, lora: LoRAConfig) -> FSDPEngine:
    """The same adapters in FSDP on one rank."""
    context = WorkerContext("actor", case.layout, 0, world.groups, world.device, seed=3)
    model = load_model(ModelConfig(path=str(world.folder / case.model)), head="causal_lm")
    model = add_adapters(model, lora, seed=3, key="actor.model.lora")
    cfg = OptimizerConfig(lr=LR, betas=[0.0, 0.95], weight_decay=0.1, clip_norm=1e9)
    return FSDPEngine(model, EngineConfig(), context, optimizer=cfg)


def check_adapter_start(world: World) -> None:
    """An engine that starts from peft's folder has its values; what does not fit is refused."""
    case = Case("qwen3", 1, 2, 1)
    folder = world.folder / "peft"
    if world.rank == 0:
        _write_peft(world.folder / case.model, folder)
    if world.rank not in case.layout.ranks:
        return
    dist.barrier(world.groups.get(case.layout.ranks))
    lora = LoRAConfig(RANK, 8.0, ["q_proj", "up_proj"], adapter=str(folder))
    engine = world.engine(case, lora=lora)
    assert engine is not None
    state = whole_state(engine)
    if world.rank:
        return
    from safetensors.torch import load_file

    files = load_file(folder / "adapter_model.safetensors")
    values = {n.removeprefix("base_model.model."): x for n, x in files.items()}
    world.note("adapter start", largest(state, values))
    for name, wrong, bad in (
        ("stages", Case("llama", 2, 1, 1), LoRAConfig()),
        ("sequence", Case("llama", 1, 2, 1, ("sequence_parallel",)), LoRAConfig()),
        ("heads", Case("qwen2", 1, 4, 1), LoRAConfig()),
        ("target", case, LoRAConfig(targets=["nothing"])),
        ("part", case, LoRAConfig(modules_to_save=["k_proj"])),
        ("module", case, LoRAConfig(modules_to_save=["nothing"])),
        ("tied", Case("qwen2", 1, 1, 1), LoRAConfig(modules_to_save=["lm_head"])),
        ("adapter", Case("llama", 1, 1, 1), lora),
    ):
        world.note(
            f"adapter refused {name}", message(lambda c=wrong, x=bad: world.engine(c, lora=x))
        )


def _write_peft(model: Path, folder: Path) -> None:
    """An adapter with random values."""
    import peft
    import transformers

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    adapted = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
