"""What the simulated device does as CUDA does it; run by `test_device.py` in a process with one.

python tests/simcuda/behaviours.py      prints {name: "" or why not} as JSON
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from tests.simcuda import order_of_work
from tests.simcuda.order_of_work import refused


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """What the host waited for in the block."""
    import surface

    found: Counter[str] = Counter()
    surface.native.on_sync(lambda what, size: found.update([what]))
    try:
        yield found
    finally:
        surface.native.on_sync(None)


def tensors_say_that_they_are_on_the_device() -> None:
    made = torch.randn(4, 5, device="cuda")
    assert made.is_cuda and str(made.device) == "cuda:0" and (made + made).is_cuda
    assert torch.cuda.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    assert str(torch.ones(2).cuda(3).device) == "cuda:3"


def values_are_those_of_the_host() -> None:
    values = torch.randn(6, 7)
    on_device = values.cuda()
    assert torch.equal((on_device @ on_device.T).cpu(), values @ values.T)
    assert torch.equal(on_device.t()[2:].contiguous().cpu(), values.t()[2:])
    assert torch.equal(on_device[on_device > 0].cpu(), values[values > 0])
    assert torch.equal(torch.sort(on_device, dim=1)[1].cpu(), torch.sort(values, dim=1)[1])


def products_may_be_wider_than_their_factors() -> None:
    a = torch.randn(4, 5).bfloat16()
    b = torch.randn(5, 6).bfloat16()
    wide = torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32)
    assert torch.equal(wide.cpu(), a.float() @ b.float())


def host_and_device_are_not_mixed() -> None:
    on_device = torch.ones(3, 3, device="cuda")
    for operator in (torch.add, torch.mm, torch.maximum):
        with refused("same device", "cuda:0", "cpu"):
            operator(on_device, torch.ones(3, 3))


def two_devices_are_not_mixed() -> None:
    with refused("same device", "cuda:0", "cuda:1"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")


def host_scalars_and_host_indices_are_taken() -> None:
    on_device = torch.arange(5.0, device="cuda")
    assert (on_device * torch.tensor(2.0))[torch.tensor([1, 3])].tolist() == [2, 6]
    with refused("same device"):
        on_device[torch.tensor([1, 3])] = torch.ones(2)


def device_memory_is_not_read_by_numpy() -> None:
    with refused("cuda:0", "numpy"):
        torch.ones(3, device="cuda").numpy()


def memory_that_nobody_wrote_is_nan() -> None:
    assert torch.empty(100, device="cuda").isnan().all()
    assert torch.empty_strided((3, 4), (4, 1), device="cuda").isnan().all()
    assert not torch.zeros(3, device="cuda").any()


def freed_storage_comes_back_as_nan() -> None:
    weight = torch.ones(64, device="cuda")
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(256)
    assert weight.isnan().all()


def memory_is_counted_by_device() -> None:
    before = torch.cuda.memory_allocated(2)
    torch.cuda.reset_peak_memory_stats(2)
    made = torch.zeros(1 << 20, device="cuda:2")
    assert torch.cuda.memory_allocated(2) == before + (4 << 20)
    assert torch.cuda.memory_allocated(1) == 0
    del made
    assert torch.cuda.memory_allocated(2) == before
    assert torch.cuda.max_memory_allocated(2) == before + (4 << 20)
    free, whole = torch.cuda.mem_get_info(2)
    assert whole - free == before


def results_of_kernels_are_counted_too() -> None:
    left = torch.ones(256, 256, device="cuda:4")
    before = torch.cuda.memory_allocated(4)
    made = left @ left
    assert torch.cuda.memory_allocated(4) - before == made.nbytes


def memory_of_a_pool_sleeps_under_its_address() -> None:
    import surface

    pool = torch.cuda.MemPool()
    handles = []
    surface.native.on_segment(handles.append)
    free = torch.cuda.mem_get_info(5)[0]
    with torch.cuda.use_mem_pool(pool):
        weight = torch.ones(1 << 20, device="cuda:5")
    (handle,) = handles
    surface.native.unmap(*handle)
    assert torch.cuda.mem_get_info(5)[0] == free
    surface.native.map_again(*handle)
    assert weight.data_ptr() == handle[2] and weight.isnan().all()
    assert torch.cuda.mem_get_info(5)[0] == free - (4 << 20)


def pool_keeps_what_was_freed_until_it_is_unmapped() -> None:
    import surface

    pool = torch.cuda.MemPool()
    handles = []
    surface.native.on_segment(handles.append)
    free = torch.cuda.mem_get_info(6)[0]
    with torch.cuda.use_mem_pool(pool):
        weight = torch.ones(1 << 20, device="cuda:6")
    del weight
    (segment,) = pool.snapshot()
    assert segment["allocated_size"] == 0 and torch.cuda.memory_allocated(6) == 0
    assert torch.cuda.mem_get_info(6)[0] == free - (4 << 20)
    surface.native.unmap(*handles[0])
    assert torch.cuda.mem_get_info(6)[0] == free and pool.snapshot() == []


def generators_belong_to_a_device() -> None:
    with refused("Expected a 'cuda' device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with refused("Expected a 'cpu' device type for generator"):
        torch.randn(3, generator=torch.Generator("cuda"))
    one = torch.Generator("cuda").manual_seed(5)
    other = torch.Generator("cuda").manual_seed(5)
    first = torch.randn(3, device="cuda", generator=one)
    assert torch.equal(first, torch.randn(3, device="cuda", generator=other))


def invalid_device_is_refused() -> None:
    with refused("invalid device ordinal"):
        torch.ones(3, device="cuda:63")


def backward_runs_on_the_device_of_its_tensors() -> None:
    layer = nn.Linear(8, 8).to("cuda:3")
    layer(torch.randn(2, 8, device="cuda:3")).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert str(layer.weight.grad.device) == "cuda:3"


def streams_and_events_can_be_used() -> None:
    stream = torch.cuda.Stream()
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        event.record()
    assert torch.cuda.current_stream() != stream
    torch.cuda.current_stream().wait_event(event)
    torch.ones(3, device="cuda").record_stream(stream)


def reading_a_value_makes_the_host_wait() -> None:
    made = torch.ones(3, device="cuda")
    with waits() as found:
        made.sum().item()
        made.nonzero()
        made[made > 0]
        made[made > 0] = torch.ones(3, device="cuda")
        made[made > 0] = 2
        made.cpu()
        _ = made * 2
    assert found == {
        "aten::_local_scalar_dense": 1,
        "aten::nonzero": 2,
        "aten::_index_put_impl_": 1,
        "copy to the host (pageable) and wait": 1,
    }


def only_pinned_memory_is_copied_behind() -> None:
    pinned = torch.ones(8, pin_memory=True)
    pageable = torch.ones(8)
    assert pinned.is_pinned() and pinned[3:].is_pinned() and not pageable.is_pinned()
    with waits() as found:
        pinned.to("cuda", non_blocking=True)
        pageable.to("cuda", non_blocking=True)
        pinned.to("cuda")
    assert found == {
        "copy to the device": 1,
        "copy to the device (pageable) and wait": 1,
        "copy to the device and wait": 1,
    }


def memory_is_limited() -> None:
    used = torch.cuda.memory_allocated(7)
    os.environ["SIMCUDA_MEMORY"] = str(used + (8 << 20))
    try:
        kept = torch.zeros(1 << 20, device="cuda:7")
        for allocate in (
            lambda: torch.zeros((1 << 20) + 1, device="cuda:7"),
            lambda: torch.cat([kept, kept]),  # a kernel's result
        ):
            try:
                allocate()
            except torch.OutOfMemoryError as err:
                assert "CUDA out of memory. Tried to allocate" in str(err)
            else:
                raise AssertionError("was not refused")
        torch.zeros(1 << 20, device="cuda:7")
    finally:
        del os.environ["SIMCUDA_MEMORY"]


def blocks_of_memory_are_counted() -> None:
    before = torch.cuda.memory_stats(3)["allocation.all.current"]
    made = [torch.zeros(4, device="cuda:3"), torch.ones(4, device="cuda:3") + 1]
    assert torch.cuda.memory_stats(3)["allocation.all.current"] == before + 2
    del made
    assert torch.cuda.memory_stats(3)["allocation.all.current"] == before


def fused_optimizers_take_no_step_counter_on_the_host() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones(4, device="cuda")
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    state = optimizer.state[weight]
    state["step"] = state["step"].cpu()
    with refused("_fused_adamw_", "cpu", "state_steps"):
        optimizer.step()


def packed_attention_takes_what_flash_takes() -> None:
    def attend(dtype: torch.dtype = torch.bfloat16, offsets: torch.dtype = torch.int32) -> None:
        rows = torch.randn(5, 2, 8, device="cuda", dtype=dtype)
        starts = torch.tensor([0, 2, 5], device="cuda", dtype=offsets)
        varlen_attn(rows, rows, rows, starts, starts, 3, 3, window_size=(-1, 0))

    attend()
    with refused("cu_seqlens_q must have dtype int32"):
        attend(offsets=torch.int64)
    with refused("fp16 and bf16"):
        attend(dtype=torch.float32)


def attention_that_stores_its_scores_is_told() -> None:
    def attend(dtype: torch.dtype, key_heads: int) -> Counter[str]:
        query = torch.randn(1, 4, 6, 8, device="cuda", dtype=dtype)
        key = torch.randn(1, key_heads, 6, 8, device="cuda", dtype=dtype)
        with waits() as found:
            nn.functional.scaled_dot_product_attention(
                query, key, key, is_causal=True, enable_gqa=True
            )
        return found

    assert attend(torch.float32, key_heads=2) == {"attention by the math kernel": 1}
    assert not attend(torch.bfloat16, key_heads=2) and not attend(torch.float32, key_heads=4)


def results_given_by_out_may_grow() -> None:
    result = torch.empty(0, device="cuda")
    torch.add(torch.ones(4, device="cuda"), 1, out=result)
    assert result.tolist() == [2, 2, 2, 2]


def nccl_takes_what_nccl_takes() -> None:
    with nccl_group() as group:
        sums = torch.ones(4, device="cuda")
        dist.all_reduce(sums, op=dist.ReduceOp.AVG, group=group)
        whole = torch.empty(4, device="cuda")
        dist.all_gather_into_tensor(whole, sums, group=group)
        assert whole.tolist() == [1, 1, 1, 1]


def nccl_refuses_what_nccl_refuses() -> None:
    with nccl_group() as group:
        for bad, words in (
            (torch.ones(4), ("cpu",)),
            (torch.ones(4, device="cuda:1"), ("cuda:1", "current device is 0")),
            (torch.ones(4, 4, device="cuda")[:, ::2], ("contiguous",)),
            (torch.ones(4, device="cuda", dtype=torch.int16), ("NCCL type",)),
        ):
            with refused(*words):
                dist.broadcast(bad, 0, group=group)


def gloo_refuses_device_memory() -> None:
    gloo = dist.new_group(backend="gloo")
    with refused("cuda"):
        dist.broadcast(torch.ones(4, device="cuda"), 0, group=gloo)
    sums = torch.ones(2)
    dist.all_reduce(sums, group=gloo)
    assert math.isclose(float(sums.sum()), 2)


@contextmanager
def nccl_group() -> Iterator[dist.ProcessGroup | None]:
    """A group of this rank alone."""
    torch.cuda.set_device(0)
    yield dist.new_group(backend="nccl")


def main() -> int:
    """Run all, and print what failed."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name, behaviour in BEHAVIOURS.items():
        try:
            behaviour()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    dist.destroy_process_group()
    print(json.dumps(found))
    return 0


_HELPERS = (refused, waits, nccl_group, main)
BEHAVIOURS: dict[str, Callable[[], None]] = {
    name: value
    for name, value in [*globals().items(), *vars(order_of_work).items()]
    if getattr(value, "__module__", "") in (__name__, order_of_work.__name__)
    and callable(value)
    and value not in _HELPERS
    and not name.startswith("_")
}

if __name__ == "__main__":
    sys.exit(main())
