"""Peak device memory of one rank of the train engines at any size, without weights or other ranks.

    python tests/simcuda/programs/traced_memory.py NAME ...      prints one line of JSON a case
    python tests/simcuda/programs/traced_memory.py --why NAME    and what is held at each peak

Runs on the simulated device. Tensors are fake (torch's FakeTensorMode): they have shapes, devices
and storages and no values, so that an engine of 70 B parameters is built and stepped in a minute.
Collectives go to torch's fake process group. `Ledger` counts the storages that are alive. What
fragments the memory, and what kernels and NCCL take for themselves, is not seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from tensordict import TensorDict
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools import fake_collectives  # noqa: F401  shapes of collectives
from torch.optim import optimizer as foreach
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

from spmdflow.blocks.box import Box
from spmdflow.config.leaf import defaults
from spmdflow.config.schema import ActorConfig, CriticConfig, ReferenceConfig, RewardConfig
from spmdflow.data.ragged import ragged
from spmdflow.kind.engine import engine_kind
from spmdflow.objectives.policy import PolicyLoss, ValueLoss
from spmdflow.parallel.group import GroupTable
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers import (
    attention,
    divided_experts,
    fsdp,
    megatron_experts,
    micro_batch,
    model,
    partial_attention,
)
from spmdflow.workers.engine import TrainEngine, engine_of
from tests.simcuda.memory_cases import CASES, CONFIGS, Case
from tests.simcuda.programs.ledger import Ledger

DEVICE = torch.device("cuda", 0)
TOTALS = {"tokens": 1.0, "sequences": 1.0}


class FakeGroups(GroupTable):
    """Groups of the fake process group, made when they are asked for."""

    def get(self, ranks: Any, lane: str = "compute", backend: str | None = None) -> Any:
        """See `GroupTable.get`."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            with unset_fake_temporarily():
                self._groups[ranks] = dist.new_group(list(ranks), backend="fake")
        return self._groups[ranks]

    get_or_none = get


def context_of(case: Case) -> WorkerContext:
    """Of the case's rank."""
    return WorkerContext("actor", case.layout, case.rank, FakeGroups(case.rank, 60.0), DEVICE, 0)


def write_config(case: Case, folder: Path) -> None:
    """config.json of a model whose weights nobody has."""
    import transformers

    if case.size in CONFIGS:
        (folder / "config.json").write_text(json.dumps(CONFIGS[case.size]))
        return
    shape = case.shape
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        attention_bias=shape.qkv_bias,
    ).save_pretrained(folder)


class FakeFolder:
    """Weights of any name and shape, in bfloat16 on the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `HuggingFaceFolder.read`."""
        return torch.empty(box.shape, dtype=torch.bfloat16)


def micro_batches_of(case: Case, engine: TrainEngine) -> list[micro_batch.MicroBatch]:
    """Those of one update, built by the package's own function, then made fake."""
    rows = case.rows * case.num_micro_batches
    with unset_fake_temporarily():
        prompts = torch.tensor(case.prompts * case.num_micro_batches)
        ids = torch.arange(rows) // case.samples  # every token of a prompt is its number
        responses = torch.full((rows,), case.response)
        names = ("old_log_probs", "advantages", "ref_log_probs", "values", "returns")
        columns = {name: ragged(torch.zeros(rows * case.response), responses) for name in names} | {
            "prompts": ragged(ids.repeat_interleave(prompts), prompts),
            "responses": ragged(torch.zeros(rows * case.response, dtype=torch.int64), responses),
        }
        batch = TensorDict(columns, batch_size=[rows])
        found = micro_batch.micro_batches(
            batch,
            num_micro_batches=case.num_micro_batches,
            by_tokens=False,
            device=torch.device("cpu"),
            # Megatron's packed rows need TransformerEngine; equally long, they are the same tensors
            packed=(case.kind != "megatron" or case.cp > 1) and "padded" not in case.options,
            shares_prompts=engine_kind(case.kind).shares_prompts,
            context_group=engine.context_group,
            multiple=engine.token_multiple,
        )
    return [_fake(micro) for micro in found]


def _fake(micro: micro_batch.MicroBatch) -> micro_batch.MicroBatch:
    """The same shapes on the device."""

    def like(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
        if value is None:  # no routes
            return None
        return {name: like(column) for name, column in value.items()}

    kept = {f.name: getattr(micro, f.name) for f in fields(micro)}
    packed = kept["packed"] and kept["packed"].move_tensors(like)
    shard = kept["shard"] and kept["shard"].move_tensors(like)
    moved = ("index", "packed", "shard")
    made = {name: like(x) for name, x in kept.items() if name not in moved}
    return replace(micro, **made, packed=packed, shard=shard)


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that a GPU takes; fake tensors take the one that keeps all scores."""
    assert attn_mask is None, attn_mask
    if q.dtype == torch.float32:  # flash attention takes half precision alone
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, None, q.requires_grad, dropout_p, is_causal, scale=scale)[0]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(q, k, v, dropout_p, is_causal, False, scale=scale)[0]


def _gather_plain(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """All other ranks say the same; a metric from another stage is any number."""
    return [mine] * group.size()


@contextmanager
def answered() -> Iterator[None]:
    """What fake tensors cannot do: give numbers to the host, and take a GPU's attention."""
    aten = torch.ops.aten
    c10d = torch.ops.c10d
    operators = {
        aten._pin_memory.default: lambda *x, **_: x[2],
        aten._local_scalar_dense.default: lambda *x: 1.0 if x[-1].is_floating_point() else 1,
        aten.masked_select.default: lambda _mode, _operator, x, _mask: x.new_empty(_routed[-1]),
        c10d.reduce_scatter_tensor_coalesced_.default: lambda *_: FakeWork().boxed(),
        c10d.allgather_into_tensor_coalesced_.default: lambda *_: FakeWork().boxed(),
    }
    places: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "tolist", _tolist),
        (FakeTensor, "tolist", _tolist),
        (torch.Tensor, "__float__", lambda x: 1.0),
        (torch.nn.functional, "scaled_dot_product_attention", flash),
        (attention, "has_varlen_kernel", lambda q: q.dtype == torch.bfloat16),
        (partial_attention, "has_varlen_kernel", lambda q: q.dtype == torch.bfloat16),
        *((module, "all_gather_plain", _gather_plain) for module in _gathering()),
        (fsdp, "mesh_of", _real(fsdp.mesh_of)),
        (fsdp, "expert_mesh_of", _real(fsdp.expert_mesh_of)),
        (divided_experts, "_run_where_the_experts_are", _with_even_shares),
        (megatron_experts.ExpertRouter, "reset_parameters", _make_router_on_device),
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess", _divide_evenly),
        (token_dispatcher, "sort_chunks_by_idxs", _sort_chunks),
        (
            token_dispatcher.MoEAlltoAllTokenDispatcher,
            "_maybe_dtoh_and_synchronize",
            lambda dispatcher, point, tokens_per_expert: tokens_per_expert,
        ),
        (model, "folder_of", FakeFolder),
        (model, "HuggingFaceFolder", FakeFolder),
        (foreach, "_foreach_supported_types", [torch.nn.Parameter, FakeTensor, torch.Tensor]),
        (masking_utils, "is_tracing", lambda *_: False),
        # fake tensors are remembered, and a plain module swaps what nobody remembers
        (weakref, "getweakrefs", lambda _: []),
    ]
    stock = [getattr(owner, name) for owner, name, _ in places]
    known = fake_impls.op_implementations_dict
    before = {key: known[key] for key in operators if key in known}
    known.update(operators)
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for key in operators:
            del known[key]
        known.update(before)
        for (owner, name, _), value in zip(places, stock):
            setattr(owner, name, value)


@contextmanager
def one_kernel() -> Iterator[None]:
    """SiLU's backward stays one operator, as where CUDA has a kernel of it, instead of seven."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("silu_backward", lambda gradient, x: torch.empty_like(x), "CUDA")
        yield


def _gathering() -> list[Any]:
    """Modules that know `all_gather_plain`, by that name."""
    loaded = [sys.modules[name] for name in sys.modules if name.startswith("spmdflow.")]
    return [module for module in loaded if "all_gather_plain" in vars(module)]


_STOCK_TOLIST = torch.Tensor.tolist
_STOCK_RUN = divided_experts._run_where_the_experts_are
_routed: list[int] = []
"""Pairs of a token and an expert in the layer that runs, where experts are divided."""


def _tolist(x: torch.Tensor) -> Any:
    """Numbers that nobody has: tokens are spread evenly over ranks, anything else is 1."""
    if not isinstance(x, FakeTensor):
        return _STOCK_TOLIST(x)
    if _routed:
        return [_routed[-1] // x.numel()] * x.numel()
    return [1.0] * x.numel()


def _make_router_on_device(router: Any) -> None:
    """A router's weight, which Megatron makes on the host."""
    shape = (router.config.num_moe_experts, router.config.hidden_size)
    router.weight = torch.nn.Parameter(torch.empty(shape, device=DEVICE))


def _divide_evenly(dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
    """Megatron's dispatcher, with the same number of tokens for every expert."""
    pairs = len(routing_map) * dispatcher.config.moe_router_topk
    _routed[:] = [pairs]
    num_own = dispatcher.num_local_experts
    of_expert = pairs // dispatcher.num_experts
    num_ranks = dispatcher.tp_size * dispatcher.ep_size
    dispatcher.num_out_tokens = pairs
    dispatcher.input_splits = dispatcher.output_splits = [of_expert * num_own] * dispatcher.ep_size
    with unset_fake_temporarily():
        dispatcher.output_splits_tp = torch.full((dispatcher.tp_size,), pairs)
        chunks = torch.full((num_ranks, num_own), of_expert)
        dispatcher.num_global_tokens_per_local_expert = chunks
        return torch.full((num_own,), of_expert * num_ranks)


def _sort_chunks(
    rows: torch.Tensor,
    sizes: torch.Tensor,
    order: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Megatron's sorting of chunks, into any order."""
    parts = [len(rows) // len(sizes)] * len(sizes)
    sorted_rows = torch.cat(rows.split(parts))
    return sorted_rows, None if probs is None else torch.cat(probs.split(parts))


def _with_even_shares(
    compute: Any, hidden: torch.Tensor, experts: torch.Tensor, *more: Any
) -> torch.Tensor:
    """A layer of divided experts whose tokens are spread evenly over the ranks."""
    _routed.append(experts.numel())
    try:
        return _STOCK_RUN(compute, hidden, experts, *more)
    finally:
        _routed.pop()


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return call


def engine_for(case: Case, folder: Path) -> TrainEngine:
    """The engine as a role builds it."""
    head = case.head if not (case.trained and case.head == "scalar") else "critic"
    cfg = defaults(_ROLES[head, case.trained])
    cfg.model.lora = None
    cfg.model.path = str(folder)
    cfg.model.dtype = case.dtype
    cfg.engine.kind = case.kind
    if case.trained:
        cfg.engine.options = list(case.options)
    cfg.engine.context_attention = case.context_attention
    return engine_of(cfg, context_of(case), head=head)


_ROLES = {
    ("causal_lm", True): ActorConfig,
    ("causal_lm", False): ReferenceConfig,
    ("critic", True): CriticConfig,
    ("scalar", False): RewardConfig,
}


def steps(engine: TrainEngine, case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(phase, what runs in it): those of a step that this model has."""
    micros = micro_batches_of(case, engine)
    scalar = case.shape.head == "scalar"

    def answer(output: Any, micro: micro_batch.MicroBatch) -> Mapping[str, torch.Tensor]:
        if scalar:
            return {"values": micro.spread(output.at(micro.predicting)).cpu()}
        found = output.log_probs_and_entropy() if case.trained else (output.log_probs(),)
        return {str(place): micro.spread(x).cpu() for place, x in enumerate(found)}

    def forward() -> None:
        with torch.no_grad():
            engine.outputs(micros, answer)

    yield "infer", forward
    if case.trained:
        cfg = defaults(CriticConfig if scalar else ActorConfig)
        cfg.loss = replace(cfg.loss, **({"entropy_coef": case.entropy} if case.entropy else {}))
        loss = ValueLoss(cfg.loss) if scalar else PolicyLoss(cfg.loss, 1.0, budget=case.response)

        def update() -> None:
            engine.accumulate(micros, loss, TOTALS)
            engine.update(engine.gradient_norm())

        yield "train", update
        yield "save", lambda: save(engine)


def save(engine: TrainEngine) -> None:
    """What of a save is on the device: this rank's part of the state; it is exported from files."""
    for _, view, _ in engine.own_state_blocks():
        view.to("cpu")


def trace(case: Case, *, why: bool = False) -> dict[str, Any]:
    """Bytes of the rank: start (most while it is built), resident (afterwards), infer, train (most
    in a pass), save (of a trained model), and the seconds that this took."""
    began = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.num_ranks)
    found: dict[str, Any] = {"case": case.name}
    ledger = Ledger()
    try:
        with tempfile.TemporaryDirectory() as folder, answered(), one_kernel():
            write_config(case, Path(folder))
            with FakeTensorMode(allow_non_fake_inputs=True), ledger, ledger.counting_resizes():
                engine = engine_for(case, Path(folder))
                gc.collect()
                found |= {"start": ledger.peak, "resident": ledger.now}
                for phase, run in steps(engine, case):
                    ledger.begin()
                    run()
                    found[phase] = ledger.peak
                    if why:
                        _print_lines(f"{case.name}, {phase}", ledger)
    finally:
        dist.destroy_process_group()
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def _print_lines(title: str, ledger: Ledger) -> None:
    print(f"{title}: {ledger.peak / 2**30:.3f} GiB, afterwards {ledger.now / 2**30:.3f}")
    for line, size in ledger.at_peak.most_common(22):
        print(f"  {size / 2**30:9.3f}  {line}")


def main() -> int:
    """Trace the cases that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--why", action="store_true")
    words = parser.parse_args()
    for name in words.names:
        print(json.dumps(trace(CASES[name], why=words.why)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
