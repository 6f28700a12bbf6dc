"""Adapters on FSDP and ZeRO against peft with torch's AdamW: steps, merged weights, what is held.

Four gloo ranks measure, tests judge. Float32 sums differ in their order only; weights are compared
where the gradient is no rounding error, as Adam's first step is its sign.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.config.model import LoRAConfig
from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.weights.move import Block, Blocks
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.lora import add_adapters
from spmdflow.workers.model import load_model

PROGRAMS = str(Path(__file__).parent / "programs")
RANK = 4
ALPHA = 8.0
LR = 1e-3
SAVING = {
    "fsdp-head": ("fsdp", "untied", "lm_head"),
    "zero2-table": ("zero2", "tied", "embed_tokens"),
    "zero1-norm": ("zero1", "untied", "model.norm"),
}
"""Pools with rslora and a module that is trained whole: engine, model, module."""
SOME = (("fsdp", 1), ("fsdp", 4), ("zero1", 2), ("fsdp-head", 2))
OTHERS = (
    *(("zero2-table", 2), ("zero1-norm", 3)),
    *(("fsdp", 2), ("fsdp", 3), ("fsdp-s2", 4), ("zero1", 4), ("zero2", 3)),
)
"""Drills."""
ADAPTED = 2 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 48) * 3)
"""Of two layers: in + out of q and o, k and v, the three of the feed-forward network."""


def measure(folder: str, pools: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """On every rank of four; what this one found, by pool."""
    sys.path.insert(0, PROGRAMS)
    from fsdp_reference import write_models

    rank = dist.get_rank()
    groups = GroupTable(rank, timeout_seconds=600)
    members = [tuple(range(dp)) for dp in (1, 2, 3, 4)] + [(member,) for member in (1, 2, 3)]
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3)]
    groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in members + pairs])
    if rank == 0:
        write_models(Path(folder))
    dist.barrier()
    found: dict[str, Any] = {}
    for kind, dp in pools:
        if rank < dp:
            case = Case(Path(folder), groups, kind, dp)
            found[f"{kind} {dp}"] = case.step()
    if pools != SOME:
        return found
    found["counts"] = {r: Case(Path(folder), groups, "fsdp", 4, r).counts() for r in (4, 8, 16)}
    found["whole"] = Case(Path(folder), groups, "fsdp", 4, 0).counts()
    found["bfloat16"] = Case(Path(folder), groups, "fsdp", 2).in_bfloat16() if rank < 2 else None
    return found


class Case:
    """One engine with adapters, and the same five rows for all."""

    def __init__(
        self, folder: Path, groups: GroupTable, kind: str, dp: int, lora_rank: int = RANK
    ) -> None:
        from engine_world import split
        from fsdp_reference import make_batch

        self.folder = folder
        self.groups = groups
        self.kind = kind
        self.layout_of = dp
        self.rank = dist.get_rank()
        self.model = "tied"
        self.lora = LoRAConfig(rank=lora_rank, alpha=ALPHA) if lora_rank else None
        if kind in SAVING:
            self.kind, self.model, module = SAVING[kind]
            self.lora = LoRAConfig(RANK, ALPHA, rslora=True, modules_to_save=[module])
        self.batch = make_batch(5)
        self.share, self.parts = split(self.batch, dp, self.rank, 2, None)

    def engine(self, dtype: str = "float32") -> Any:
        name, _, shard = self.kind.partition("-s")
        layout = Layout.data_parallel(tuple(range(self.layout_of)), shard_size=int(shard or 0))
        place = layout, self.rank, self.groups
        context = WorkerContext("actor", *place, torch.device("cpu"), seed=3)
        model = load_model(
            ModelConfig(path=str(self.folder / self.model), dtype=dtype), head="causal_lm"
        )
        if self.lora is not None:
            model = add_adapters(model, self.lora, seed=3, key="actor.model.lora")
        cfg = OptimizerConfig(lr=LR, betas=[0.0, 0.95], weight_decay=0.1, clip_norm=1e9)
        cls = resolve(engine_kind(name).implementation)
        return cls(model, EngineConfig(kind=name), context, optimizer=cfg)

    def train(self, engine: Any) -> None:
        from engine_world import loss_of

        engine.train_step(self.share, loss_of("tied"), num_micro_batches=self.parts)

    def step(self) -> dict[str, Any]:
        """One step from a B that is not zero, so that A has a gradient; then what is merged."""
        engine = self.engine()
        first = state_of(engine)
        _fill_b(engine)
        start = state_of(engine)
        before = self.log_probs(engine)
        self.train(engine)
        state = state_of(engine)
        merged = whole(engine, engine.own_blocks(), engine.shapes)
        hashes = {name: positional_hash(x.bfloat16()) for name, x in merged.items()}
        hashed = hashes == engine.shard_hashes(torch.bfloat16)
        same_off = torch.equal(before[1], self.log_probs(engine)[1])
        if self.rank:
            return {}
        from fsdp_measure import largest, weight_error

        from tests.distributed.lora_reference import peft_model, peft_step

        names = [name for name in start if name.endswith(".weight")]
        assert self.lora is not None
        model = peft_model(self.folder / self.model, {n: start[n] for n in names}, self.lora)
        gradients, weights = peft_step(model, self.batch, lr=LR)
        plain = dict(model.merge_and_unload().named_parameters())
        return {
            "gradient": largest({n: state[f"{n}.exp_avg"] for n in names}, gradients),
            "weight": max(weight_error(state[n], weights[n], gradients[n]) for n in names),
            "moved": min(float((state[n] - start[n]).abs().max()) for n in names),
            "merged": largest(merged, plain) if merged.keys() == plain.keys() else None,
            "hashed": hashed,
            # a module to save has no other weights to go back to
            "off": same_off == (not self.lora.modules_to_save) and not torch.equal(*before),
            "first": {name: float(x.double().sum()) for name, x in first.items()},
        }

    def log_probs(self, engine: Any) -> tuple[Tensor, Tensor]:
        """With adapters, and without."""
        from fsdp_measure import log_prob_columns

        def values() -> Tensor:
            made = engine.forward(self.share, log_prob_columns, num_micro_batches=self.parts)
            return made["log_probs"].values().clone()

        with engine.without_adapters():
            off = values()
        return values(), off

    def counts(self) -> dict[str, int]:
        """Elements that this rank has of moments and saves, and sends to reduce gradients."""
        from engine_world import Collectives

        engine = self.engine()
        with Collectives() as sent:
            self.train(engine)
        return {
            "moments": sum(x.numel() for x in engine.optimizer.moments()),
            "saved": sum(view.numel() for _, view, _ in engine.own_state_blocks()),
            "reduced": sent.elements["_reduce_scatter_base_"],
            "parts": self.parts,
        }

    def in_bfloat16(self) -> dict[str, Any]:
        """What is stored in which precision after a step, and how far the adapters moved."""
        engine = self.engine("bfloat16")
        start = state_of(engine)
        self.train(engine)
        state = state_of(engine)
        found = {str(shard.local.dtype) for shard in engine._shards().values()}
        moved = max(float((state[n] - x).abs().max()) for n, x in start.items())
        dtypes = {str(view.dtype) for _, view, _ in engine.state_blocks()}
        return {"stored": sorted(found), "trained": sorted(dtypes), "moved": moved}


def state_of(engine: Any) -> dict[str, Tensor]:
    """Every whole tensor that is saved, on every rank."""
    shapes = dict(engine.trained_shapes)
    moments = engine.optimizer.moment_names
    shapes |= {f"{name}.{each}": x for name, x in shapes.items() for each in moments}
    return whole(engine, engine.own_state_blocks(), shapes)


def whole(engine: Any, blocks: Iterable[Block], shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Whole tensors out of the blocks of all ranks, on every rank."""
    ranks = engine.layout.ranks
    parts: list[Any] = [[(name, view.clone(), box) for name, view, box in blocks]]
    if len(ranks) > 1:
        (mine,) = parts
        parts = [None] * len(ranks)
        dist.all_gather_object(parts, mine, group=engine.groups.get(ranks))
    joined = Blocks(block for part in parts for block in part)
    return {name: joined.read(name, Box.of_shape(shape)).clone() for name, shape in shapes.items()}


def _fill_b(engine: Any) -> None:
    """Values for B under any layout; zeros would give A no gradient."""
    generator = torch.Generator().manual_seed(1)
    values = {n: torch.randn(x, generator=generator) for n, x in engine.trained_shapes.items()}
    with torch.no_grad():
        for name, view, box in engine.state_blocks():
            if name.endswith("lora_B.weight"):
                view.copy_(0.1 * values[name][box.slices()])


@pytest.fixture(scope="module")
def measured(
    spawn_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    return spawn_ranks(measure, 4, str(tmp_path_factory.mktemp("models")), SOME)


@pytest.fixture(scope="module")
def others(
    spawn_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The same on the other pools."""
    return spawn_ranks(measure, 4, str(tmp_path_factory.mktemp("models")), OTHERS)


@pytest.fixture(params=[*SOME, *(pytest.param(pool, marks=pytest.mark.drill) for pool in OTHERS)])
def step(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The step on one pool."""
    kind, dp = request.param
    found = request.getfixturevalue("measured" if request.param in SOME else "others")
    return found[0][f"{kind} {dp}"]


def test_one_step_equals_peft_with_adamw(step: dict[str, Any]) -> None:
    assert step["gradient"] < 1e-6
    assert step["weight"] < 1e-6
    assert step["moved"] > LR / 2  # every A and every B


def test_merged_weights_equal_those_of_peft_and_are_what_is_hashed(step: dict[str, Any]) -> None:
    assert step["merged"] is not None and step["merged"] < 1e-6
    assert step["hashed"]


def test_without_adapters_log_probs_stay_those_of_the_folder(step: dict[str, Any]) -> None:
    assert step["off"]


def test_first_values_do_not_depend_on_the_layout(measured: list[dict[str, Any]]) -> None:
    pools = [pool for pool in SOME if pool[0] not in SAVING]
    firsts = [measured[0][f"{kind} {dp}"]["first"] for kind, dp in pools]

    assert all(first == firsts[0] for first in firsts)
    a = {n: x for n, x in firsts[0].items() if n.endswith("lora_A.weight")}
    assert len(a) == 14 and len(set(a.values())) == 14
    assert all(x == 0 for n, x in firsts[0].items() if n not in a)


def test_moments_gradients_and_checkpoints_grow_with_the_rank_of_the_adapters(
    measured: list[dict[str, Any]],
) -> None:
    for rank in (4, 8, 16):
        counts = [each["counts"][rank] for each in measured]
        total = {name: sum(count[name] for count in counts) for name in counts[0]}
        assert total["moments"] == 2 * rank * ADAPTED
        assert total["saved"] == 3 * rank * ADAPTED
        each = rank * ADAPTED  # of a reduce-scatter's tensors: all, and a quarter
        assert total["reduced"] == 4 * (each + each // 4) * counts[0]["parts"]
    assert measured[0]["whole"]["moments"] > measured[0]["counts"][4]["moments"]


def test_base_weights_are_kept_in_bfloat16_and_adapters_in_float32(
    measured: list[dict[str, Any]],
) -> None:
    found = measured[0]["bfloat16"]

    assert found["stored"] == ["torch.bfloat16", "torch.float32"]
    assert found["trained"] == ["torch.float32"]
    assert found["moved"] > LR / 2
