"""Megatron with TransformerEngine's layers and Adam (stand-ins) against Megatron without.

    torchrun --nproc-per-node 4 tests/simcuda/programs/transformer_engine_rounds.py FOLDER

On simulated devices with tests/simcuda/device/te on PYTHONPATH. The last line is what was found, as
JSON: differences from torch's own modules, from the branch without TransformerEngine, and from
transformers after each sync.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed" / "programs"))

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from engine_state import full_tensors, load_state, state_of
from megatron.core import optimizer as megatron_optimizer
from megatron_reference import write_models
from megatron_world import Case, World, largest, whole_outputs
from torch import Tensor, nn
from torch.nn import functional

from spmdflow.parallel.group import GroupTable
from spmdflow.workers import megatron_model
from tests.gpu.rounds import follow
from tests.rollout_reference import write_family

CASES = (
    Case("qwen3-tied", 2, 2, 1, ("sequence_parallel",)),
    Case("llama-biased", 1, 2, 2, ("sequence_parallel", "recompute")),
    Case("mistral", 1, 4, 1),  # a sliding window, and four ranks to one key-value head
)
BFLOAT16 = Case("llama", 2, 2, 1, ("sequence_parallel",))
LENGTH = 6
ROWS = 2
HIDDEN = 16
OUT = 24
HEADS = 4
GROUPS = 2


# -- stand-ins against torch's own modules ----------------------------------------------------


def module_gaps(group: dist.ProcessGroup) -> dict[str, float]:
    """Name -> largest difference of results and gradients; on two ranks."""
    return {
        "rms norm": norm_gap(),
        "attention": attention_gap(None),
        "attention in a window": attention_gap((2, 0)),
        "adam": adam_gap(),
        **{
            f"{kind}, {mode}, sequence {split}": linear_gap(kind, mode, group, split=split)
            for kind in ("Linear", "LayerNormLinear")
            for mode in ("column", "row")
            for split in (False, True)
            if not (kind == "LayerNormLinear" and mode == "row")
        },
    }


def gap(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return float((a - b).abs().max())


def drawn(*size: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).cuda()


def norm_gap() -> float:
    """RMSNorm, its input's and its weight's gradient."""
    ours = te.RMSNorm(HIDDEN, eps=1e-6)
    theirs = nn.RMSNorm(HIDDEN, eps=1e-6).cuda()
    xs = []
    for norm in (ours, theirs):
        norm.weight.data.copy_(drawn(HIDDEN, seed=1))
        xs.append(drawn(LENGTH, ROWS, HIDDEN).requires_grad_())
        norm(xs[-1]).square().sum().backward()
    return max(gap(xs[0].grad, xs[1].grad), gap(ours.weight.grad, theirs.weight.grad))


def attention_gap(window: tuple[int, int] | None) -> float:
    """Attention and the gradients of query, key and value."""
    attend = te.DotProductAttention(
        HEADS, 8, num_gqa_groups=GROUPS, attention_dropout=0.0, window_size=window
    )
    sizes = (HEADS, GROUPS, GROUPS)
    ours = [drawn(LENGTH, ROWS, n, 8, seed=i).requires_grad_() for i, n in enumerate(sizes)]
    theirs = [x.detach().permute(1, 2, 0, 3).requires_grad_() for x in ours]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance <= (LENGTH if window is None else window[0]))
    y = attend(*ours)
    expected = functional.scaled_dot_product_attention(*theirs, seen.cuda(), enable_gqa=True)
    y.square().sum().backward()
    expected.square().sum().backward()
    gaps = [gap(y, expected.permute(2, 0, 1, 3).flatten(2))]
    gaps += [gap(a.grad, b.grad.permute(2, 0, 1, 3)) for a, b in zip(ours, theirs)]
    return max(gaps)


def linear_gap(kind: str, mode: str, group: dist.ProcessGroup, *, split: bool) -> float:
    """A layer of two ranks against the whole one: output, input's and parameters' gradients."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    normed = kind == "LayerNormLinear"
    extra = {"normalization": "RMSNorm"} if normed else {}
    layer = getattr(te, kind)(
        HIDDEN, OUT, parallel_mode=mode, tp_group=group, tp_size=size, sequence_parallel=split,
        **extra,
    )  # fmt: skip
    plain = nn.Sequential(nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, OUT)).cuda()
    norm = plain[0]
    whole = plain[1]
    norm.weight.data.copy_(drawn(HIDDEN, seed=1))
    whole.weight.data.copy_(drawn(OUT, HIDDEN, seed=2))
    whole.bias.data.copy_(drawn(OUT, seed=3))
    dim = 1 if mode == "row" else 0
    layer.weight.data.copy_(whole.weight.chunk(size, dim)[rank])
    layer.bias.data.copy_(whole.bias if dim else whole.bias.chunk(size)[rank])
    x, other = (drawn(LENGTH, ROWS, HIDDEN).requires_grad_() for _ in range(2))
    mine = x.chunk(size, 2)[rank] if dim else x.chunk(size)[rank] if split else x
    mine = mine.detach().requires_grad_()
    if normed:
        layer.layer_norm_weight.data.copy_(norm.weight)
    y = layer(mine)
    expected = (plain if normed else whole)(other)
    (expected * drawn(*expected.shape, seed=4)).sum().backward()

    def own(t: Tensor, *, output: bool) -> Tensor:
        if output is not bool(dim):  # features are split on the parallel side
            return t.chunk(size, 2)[rank] if output or dim else t.chunk(size)[rank] if split else t
        return t.chunk(size)[rank] if split else t

    factor = own(drawn(*expected.shape, seed=4), output=True)
    (y * factor).sum().backward()
    bias = whole.bias.grad if dim else whole.bias.grad.chunk(size)[rank]
    gaps = [gap(y, own(expected, output=True)), gap(mine.grad, own(other.grad, output=False))]
    gaps.append(gap(layer.weight.grad, whole.weight.grad.chunk(size, dim)[rank]))
    if not (dim and split):  # else a sum over ranks is missing, as the parameter's mark says
        gaps.append(gap(layer.bias.grad, bias))
    if normed and not split:
        gaps.append(gap(layer.layer_norm_weight.grad, norm.weight.grad))
    return max(gaps)


def adam_gap() -> float:
    """Weights after five steps of Adam with decay."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    weights = [nn.Parameter(drawn(OUT, HIDDEN)) for _ in range(2)]
    ours = sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam([weights[0]], **settings)
    theirs = torch.optim.AdamW([weights[1]], **settings)
    for step in range(5):
        for weight, optimizer in zip(weights, (ours, theirs)):
            weight.grad = drawn(OUT, HIDDEN, seed=step)
            optimizer.step()
    return gap(*weights)


def marks_on_the_meta_device() -> list[bool]:
    """Whether a weight is marked as one rank's part: before and after it gets memory."""
    layer = te.Linear(HIDDEN, OUT, parallel_mode="column", device="meta")
    before = hasattr(layer.weight, "partition_dim")
    layer.reset_parameters()
    return [before, hasattr(layer.weight, "partition_dim")]


# -- engines ----------------------------------------------------------------------------------


@contextmanager
def without() -> Iterator[None]:
    """Engines built inside have Megatron's local layers and torch's AdamW."""
    before = megatron_optimizer.Adam
    megatron_model.HAVE_TE = False
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    megatron_optimizer.Adam = torch.optim.AdamW
    try:
        yield
    finally:
        megatron_model.HAVE_TE = True
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        megatron_optimizer.Adam = before


def engine_gaps(world: World, case: Case, dtype: str) -> dict[str, Any]:
    """Outputs, metrics and weights of two steps, and of a third after an exchange of states."""
    ours = world.engine(case, dtype=dtype, betas=[0.9, 0.95])
    with without():
        theirs = world.engine(case, dtype=dtype, betas=[0.9, 0.95])
    if ours is None or theirs is None:
        return {}
    layers = {type(module).__name__ for part in ours._modules for module in part.modules()}
    outputs, others = (whole_outputs(engine, case, world) for engine in (ours, theirs))
    found: dict[str, Any] = {
        "layers": sorted(name for name in layers if name.startswith("TE") or name == "RMSNorm"),
        "adams": [type(engine.optimizer.inner).__name__ for engine in (ours, theirs)],
        "outputs": max((gap(x, others[row]) for row, x in outputs.items()), default=0.0),
        "metrics": 0.0,
    }
    for seed in range(2):
        one, other = (world.train(engine, case, seed=seed) for engine in (ours, theirs))
        gaps = [abs(one[name] - other[name]) for name in ("loss", "grad_norm")]
        found["metrics"] = max(found["metrics"], *gaps)
    found["weights"] = largest(dict(full_tensors(ours)), dict(full_tensors(theirs)))
    states = [state_of(engine) for engine in (ours, theirs)]
    load_state(ours, states[1], steps_done=2)
    load_state(theirs, states[0], steps_done=2)
    for engine in (ours, theirs):
        world.train(engine, case, seed=2)
    found["exchanged"] = largest(dict(full_tensors(ours)), dict(full_tensors(theirs)))
    return found


def main() -> int:
    """Measure everything."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = World(rank, dist.get_world_size(), GroupTable(rank, timeout_seconds=600), folder)
    world.make_groups([case.layout for case in (*CASES, BFLOAT16)])
    if rank == 0:
        write_models(folder)
        write_family(folder / "followed", "qwen3", max_position_embeddings=256)
    dist.barrier()
    found: dict[str, Any] = {}
    if rank < 2:
        found["modules"] = module_gaps(world.groups.get((0, 1)))
    found["meta"] = marks_on_the_meta_device()
    for case in CASES:
        found[str(case)] = engine_gaps(world, case, "float32")
    found["bfloat16"] = engine_gaps(world, BFLOAT16, "bfloat16")
    settings: Any = {"engine.kind": "megatron", "engine.layout": "t2p2"}
    options = {"engine.options": ["sequence_parallel"]}
    found["followed"] = follow("cuda", str(folder / "followed"), settings | options)
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        print(json.dumps(everywhere))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
