"""The hybrid engine on GPUs: generation follows the trainer, faults show, memory is freed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdflow.blocks.hash import positional_hash
from spmdflow.rollout.sampling import Sampling, draw
from spmdflow.weights.move import Storages
from spmdflow.workers.attention import PackedRows, SeenKeys, packed_attention
from tests.distributed.ranks import run_ranks
from tests.gpu.rounds import KV_CACHE_BYTES, follow, phases, stale
from tests.rollout_reference import write_family

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 5e-3, "bfloat16": 0.1}
"""Log-prob gap to transformers in float32 on the CPU, which is shown the same rounded weights.

In float32 vLLM attends with Triton, whose products have 10 bits of mantissa (tf32) by default."""
MEGATRON = {"engine.kind": "megatron", "rollout.engine": "vllm"}
WAYS = {
    "fsdp, builtin": {},
    "fsdp, vllm": {"rollout.engine": "vllm"},
    "zero2, builtin": {"engine.kind": "zero2"},
    "megatron, copy": {**MEGATRON, "rollout.weights": "copy"},
    "megatron, blocks": {**MEGATRON, "rollout.weights": "blocks"},
    "megatron, flat": {**MEGATRON, "rollout.weights": "flat"},
}
TWO = {
    "fsdp, builtin": {},
    "fsdp, vllm t2": {"rollout.engine": "vllm", "rollout.layout": "t2"},
    "megatron t2, blocks t1": {**MEGATRON, "engine.layout": "t2", "rollout.layout": "t1"},
    "megatron t2, flat t2": {**MEGATRON, "engine.layout": "t2", "rollout.weights": "flat"},
    "megatron p2, copy t2": {**MEGATRON, "engine.layout": "p2", "rollout.layout": "t2"},
}


def need(settings: dict[str, str], *, num_devices: int = 1) -> None:
    """Skip with what this machine lacks."""
    for word, package in (("vllm", "vllm"), ("megatron", "megatron")):
        if word in settings.values() and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices here, {num_devices} needed")


def check(path: str, settings: dict[str, str], *, dtype: str, num_devices: int) -> None:
    precision = {"model.dtype": dtype, "rollout.dtype": dtype}
    for rank in run_ranks(follow, num_devices, "cuda", path, settings | precision):
        for found in rank:
            assert found["verified"] == 1
            assert found["gap"] <= TOLERANCE[dtype]
            assert found["worse"] <= TOLERANCE[dtype]
            assert found["ahead"] == ("vllm" in settings.values())


def test_rows_behind_one_prompt_attend_as_rows_that_each_have_it() -> None:
    """In half precision: the kernel for rows of any length, with fewer queries than keys."""
    torch.manual_seed(0)
    prompt = 37
    answers = (21, 5, 64)
    starts = [prompt + sum(answers[:number]) for number in range(len(answers))]
    rows = [
        torch.cat([torch.arange(prompt), torch.arange(start, start + size)])
        for start, size in zip(starts, answers, strict=True)
    ]
    keys = torch.cat([torch.arange(prompt), *rows])
    seen = SeenKeys.of([prompt, *map(len, rows)], keys)
    shared = replace(PackedRows.of([prompt, *answers]), seen=seen).move_tensors(torch.Tensor.cuda)
    alone = PackedRows.of([len(row) for row in rows]).move_tensors(torch.Tensor.cuda)
    size = prompt + sum(answers)
    parts = [torch.randn(size, heads, 64).bfloat16().cuda() for heads in (4, 2, 2)]
    places = torch.cat(rows).cuda()

    found = packed_attention(*parts, shared)[places]
    expected = packed_attention(*(x[places] for x in parts), alone)

    assert float((found - expected).abs().max()) <= 2e-2  # 8 bits of mantissa, numbers up to 3


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", WAYS)
def test_generation_follows_the_trainer_on_one_device(tmp_path: Path, way: str, dtype: str) -> None:
    need(WAYS[way])
    path = write_family(tmp_path / "model", "qwen3", max_position_embeddings=256)

    check(path, WAYS[way], dtype=dtype, num_devices=1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", TWO)
def test_generation_follows_the_trainer_over_nccl(tmp_path: Path, way: str, dtype: str) -> None:
    need(TWO[way], num_devices=2)
    path = write_family(tmp_path / "model", "llama", max_position_embeddings=256)

    check(path, TWO[way], dtype=dtype, num_devices=2)


@pytest.mark.parametrize("way", ["fsdp, builtin", "fsdp, vllm", "megatron, copy"])
def test_a_stale_tensor_on_the_device_stops_the_sync_and_is_named(tmp_path: Path, way: str) -> None:
    need(WAYS[way])
    path = write_family(tmp_path / "model", "llama", max_position_embeddings=256)
    name = "model.layers.1.mlp.down_proj.weight"

    (said,) = run_ranks(stale, 1, "cuda", path, WAYS[way])

    assert said.startswith("WeightSyncError") and f"got rollout tensor {name} with hash" in said


@pytest.mark.parametrize("offload", [[], ["optimizer"]], ids=["nothing", "optimizer"])
def test_kv_cache_and_moved_parts_leave_the_device_when_they_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], offload: list[str]
) -> None:
    way = {"rollout.engine": "vllm", "engine.offload": offload, "model.dtype": "bfloat16"}
    need(way)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048}
    path = write_family(tmp_path / "model", "llama", max_position_embeddings=256, **sizes)

    (found,) = run_ranks(phases, 1, "cuda", path, way | {"rollout.dtype": "bfloat16"})

    with capsys.disabled():
        print("\nbytes in use:", {name: f"{size:,}" for name, size in found.items()})
    assert found["asleep"] + KV_CACHE_BYTES * 9 // 10 <= found["generated"]
    # nothing of generation is there while a model trains: cache and a second copy of the weights
    weights = sum(path.stat().st_size for path in Path(path).glob("*.safetensors")) // 2
    assert found["trained again"] + (KV_CACHE_BYTES + weights) * 9 // 10 <= found["generated"]
    # nothing is left behind; 64 MiB for libraries' workspaces, made at their first use
    assert found["trained again"] <= found["trained"] + (64 << 20)


def test_hashes_draws_and_freed_storages_are_those_of_the_cpu() -> None:
    values = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    seeds = torch.arange(64) + 2**40
    positions = torch.arange(64)
    on_device = [tensor.cuda() for tensor in (logits, seeds, positions)]

    for dtype in (torch.float32, torch.bfloat16):
        assert positional_hash(values.to(dtype)) == positional_hash(values.cuda().to(dtype))
    expected, log_probs = draw(logits, Sampling(1, top_k=40), seeds, positions)
    tokens, found = draw(on_device[0], Sampling(1, top_k=40), *on_device[1:])
    weight = torch.ones(1 << 20, device="cuda")
    before = torch.cuda.memory_allocated()
    storages = Storages([weight])
    storages.free()
    freed = before - torch.cuda.memory_allocated()
    storages.restore()

    assert torch.equal(tokens.cpu(), expected)
    assert torch.allclose(found.cpu(), log_probs, atol=1e-5)
    assert freed >= weight.nbytes and not weight.any()
