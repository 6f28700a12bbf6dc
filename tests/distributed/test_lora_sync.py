"""Adapters on their way to a generator: merged into the weights, or in vLLM's LoRA layers.

Ranks 1 and 2 of three train one model together, each has a generator of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdflow.config.model import LoRAConfig
from spmdflow.config.objective import PolicyLossConfig
from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig, RolloutConfig
from spmdflow.hybrid_engine.sync import BoxSync
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import Replica, generator_of
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.fsdp import FSDPEngine
from spmdflow.workers.lora import adapt_source, add_adapters
from spmdflow.workers.model import load_model, open_model

pytestmark = pytest.mark.drill

RANK = 4
ALPHA = 16.0
VICTIM = "model.layers.1.self_attn.k_proj.lora_B.weight"
WHOLE = "model.layers.1.self_attn.k_proj.weight"
CPU = torch.device("cpu")


def measure(
    folder: str,
    generator: str,
    weights: str,
    targets: list[str],
    gen_tp: int = 1,
    kind: str = "fsdp",
    saved: str = "",
) -> dict[str, Any] | None:
    """Three updates, each with a sync and greedy responses; then faults. None: an idle rank.

    gen_tp: ranks that generate together, with the same prompts. kind: of the engine; megatron is
    t2. saved: a module that is trained whole; rslora then.
    """
    sys.path.insert(0, str(Path(__file__).parent / "programs"))
    import rollout_sync
    from rollout_sync import GREEDY, POOL, VOCABULARY, World, faulty, make_batch, message

    from tests.distributed.lora_reference import merged_model
    from tests.distributed.test_lora_engine import whole
    from tests.rollout_reference import END, disagreements, num_close, reference, write_llama

    rank = dist.get_rank()
    world = World(rank, GroupTable(rank, timeout_seconds=600), Path(folder))
    members = [POOL, *((rank,) for rank in POOL)]
    world.groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in members])
    if rank == 0:
        changes = {"num_key_value_heads": 2} if kind == "megatron" else {}
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
        write_llama(world.folder / "untied", **sizes, **changes)
    dist.barrier()
    if rank not in POOL:
        return None
    path = str(world.folder / "untied")
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, targets=targets)
    if saved:
        lora = replace(lora, rslora=True, modules_to_save=[saved])
    layout = replace(Layout.data_parallel(POOL), gen_tp_size=gen_tp)
    if kind == "megatron":
        layout = Layout(POOL, tp_size=2, gen_tp_size=gen_tp)
    dp_rank = layout.coordinate(rank).dp

    def update(engine: TrainEngine, seed: int) -> None:
        """One optimizer step on random rows, other ones on each data-parallel rank."""
        batch = make_batch(5, seed=10 * seed + dp_rank)
        engine.train_step(batch, PolicyLoss(PolicyLossConfig(), 1.0), num_micro_batches=1)

    context = WorkerContext("actor", layout, rank, world.groups, CPU, seed=0)
    engine = (engine_of if kind == "fsdp" else megatron_of)(path, lora, context)
    engine.merges_adapters = weights != "adapter"
    rollout = RolloutConfig(engine=generator, weights=weights, lora=lora)
    replica = Replica.of(layout, rank, world.groups) if gen_tp > 1 else Replica.alone()
    target = generator_of(rollout, path, CPU, replica)
    world = replace(world, rank=replica.ranks[0])
    hybrid = BoxSync(engine, target, rank=rank, seconds=600, verify_every=1)
    found: dict[str, Any] = {"faults": [], "close": 0, "bytes": [], "responses": []}
    for number in range(3):
        update(engine, 2 * number)
        update(engine, 2 * number + 1)
        found["bytes"].append(hybrid.sync()["rollout/synced_bytes"].total)  # type: ignore[union-attr]
        answer = hybrid.generate(world.prompts(), GREEDY, world.seeds)
        state = whole(engine, engine.own_state_blocks(), engine.trained_shapes)
        fresh = merged_model(Path(path), state, lora)
        expected = reference(fresh, world.prompts(), GREEDY, world.seeds, (END,))
        found["faults"] += disagreements(answer, expected, tolerance=1e-5)
        found["close"] += num_close(expected)
        found["responses"].append(answer["responses"].values().tolist())
        hybrid.release()
    victim = VICTIM if weights == "adapter" else WHOLE

    def without_victim(blocks: Any) -> Any:
        """It never arrives."""
        return [block for block in blocks if block[0] != victim]

    update(engine, 7)
    with faulty(engine, target, list, without_victim, rollout_sync.nothing):
        said = message(hybrid.sync), hybrid.needs_sync
    found["never arrives"] = *said, message(hybrid.sync)
    if weights == "adapter":
        target._adapter._manager.deactivate_adapter(1)  # type: ignore[attr-defined]
        found["not in use"] = message(hybrid.sync)
    dist.barrier(world.groups.get(POOL))
    return found


def engine_of(path: str, lora: LoRAConfig, context: WorkerContext) -> FSDPEngine:
    """A trainer of adapters."""
    model = load_model(ModelConfig(path=path), head="causal_lm")
    model = add_adapters(model, lora, seed=0, key="actor.model.lora")
    return FSDPEngine(model, EngineConfig(), context, optimizer=OptimizerConfig(lr=0.02))


def megatron_of(path: str, lora: LoRAConfig, context: WorkerContext) -> TrainEngine:
    """The same under Megatron."""
    from spmdflow.workers.megatron import MegatronEngine

    model = adapt_source(
        open_model(ModelConfig(path=path), head="causal_lm"), lora, seed=0, key="actor.model.lora"
    )
    cfg = EngineConfig(kind="megatron")
    return MegatronEngine(model, cfg, context, optimizer=OptimizerConfig(lr=0.02))


def judge(ranks: list[dict[str, Any] | None], *, victim: str) -> list[dict[str, Any]]:
    """The responses are those of transformers with the merged model; faults are named."""
    assert ranks[0] is None
    found = [each for each in ranks if each is not None]
    for each in found:
        assert each["faults"] == [] and each["close"] <= 2
        assert len({tuple(tokens) for tokens in each["responses"]}) == 3
        said, needs_sync, repaired = each["never arrives"]
        assert said.startswith("WeightSyncError: ") and victim in said, said
        assert needs_sync and repaired == ""
    return found


@pytest.mark.slow
def test_merged_adapters_generate_as_transformers_with_the_merged_model(
    spawn_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    targets = ["q_proj", "k_proj", "down_proj"]
    judge(spawn_ranks(measure, 3, str(tmp_path), "builtin", "copy", targets), victim=WHOLE)


@pytest.mark.slow
def test_merged_adapters_generate_the_same_in_vllm(
    spawn_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    targets = ["all-linear"]
    found = spawn_ranks(measure, 3, str(tmp_path), "vllm", "copy", targets)
    judge(found, victim=WHOLE)


def test_adapters_in_vllm_generate_as_transformers_with_the_merged_model(
    spawn_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    targets = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
    ranks = spawn_ranks(measure, 3, str(tmp_path), "vllm", "adapter", targets)
    for found in judge(ranks, victim=VICTIM):
        hidden = 64
        queries = 64
        keys = 32
        ffn = 96
        sizes = 2 * (hidden + queries) + (hidden + keys) + 2 * (hidden + ffn)
        assert found["bytes"] == [RANK * sizes * 2 * 4 // 2] * 3  # two layers, half is here
        assert "slots [None], expected the policy's, 1" in found["not in use"]


@pytest.mark.slow
def test_adapters_of_a_model_that_vllm_cuts_over_two_ranks_generate_the_same(
    spawn_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    words = str(tmp_path), "vllm", "adapter", ["all-linear"], 2
    judge(spawn_ranks(measure, 3, *words), victim=VICTIM)


def test_merged_adapters_of_two_tensor_parallel_ranks_generate_the_same(
    spawn_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pytest.importorskip("megatron", reason="the megatron extra is not installed")
    targets = ["q_proj", "k_proj", "down_proj"]
    words = str(tmp_path), "builtin", "copy", targets, 1, "megatron"
    judge(spawn_ranks(measure, 3, *words), victim=WHOLE)


def test_modules_to_save_reach_the_generator_with_merged_adapters(
    spawn_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    words = str(tmp_path), "builtin", "copy", ["all-linear"], 1, "fsdp", "lm_head"
    judge(spawn_ranks(measure, 3, *words), victim=WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "kind", "saved", "gen_tp"),
    [
        ("copy", "megatron", "lm_head", 2),
        ("copy", "fsdp", "lm_head", 1),
        ("adapter", "megatron", "", 1),
        ("adapter", "megatron", "", 2),
    ],
)
def test_vllm_generates_the_same_from_megatron_and_with_modules_to_save(
    spawn_ranks: Callable[..., list[Any]],
    tmp_path: Path,
    weights: str,
    kind: str,
    saved: str,
    gen_tp: int,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    pytest.importorskip("megatron", reason="the megatron extra is not installed")
    words = str(tmp_path), "vllm", weights, ["all-linear"], gen_tp, kind, saved
    victim = VICTIM if weights == "adapter" else WHOLE
    judge(spawn_ranks(measure, 3, *words), victim=victim)
