"""CUDA kernels as this project calls them, each against float64 on the CPU.

Simulated devices have the CPU's kernels, and check what a call gives them (docs/lab/GPU.md).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from spmdflow.parallel.device import all_to_device, to_host
from spmdflow.weights.move import Storages
from spmdflow.workers.attention import (
    AttentionForm,
    PackedRows,
    SeenKeys,
    _varlen_attention,
    has_varlen_kernel,
)
from spmdflow.workers.context_group import RING, ContextGroup
from spmdflow.workers.partial_attention import attend_to_part, partial_gradients
from spmdflow.workers.ring_attention import RingSteps, join_result

pytestmark = pytest.mark.gpu
PLAIN = AttentionForm()
BFLOAT16_GAP = 2e-2
"""8 bits of mantissa, values up to 3; also relative, for gradients."""


def causal_rows(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Dense causal attention of each packed row, one row at a time."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    outputs = []
    parts = (tensor.split(lengths) for tensor in (query, key, value))
    for row in zip(*parts, strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in row)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["own heads", "grouped heads"])
def test_varlen_kernel_and_its_gradients_agree_with_dense_attention(kv_heads: int) -> None:
    torch.manual_seed(0)
    lengths = [100, 128, 1]
    shapes = [(sum(lengths), heads, 64) for heads in (4, kv_heads, kv_heads)]
    on_device = [torch.randn(shape).bfloat16().cuda().requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in on_device]
    rows = PackedRows.of(lengths).move_tensors(torch.Tensor.cuda)
    assert has_varlen_kernel(on_device[0])

    output = _varlen_attention(*on_device, rows, AttentionForm())
    expected = causal_rows(*exact, lengths)
    output.double().square().sum().backward()
    expected.square().sum().backward()

    assert float((output.cpu().double() - expected).detach().abs().max()) <= BFLOAT16_GAP
    for ours, reference in zip(on_device, exact, strict=True):
        assert ours.grad is not None and reference.grad is not None
        gap = (ours.grad.cpu().double() - reference.grad).norm() / reference.grad.norm()
        assert float(gap) <= BFLOAT16_GAP


@pytest.mark.parametrize("kv_heads", [8, 2], ids=["own heads", "grouped heads"])
def test_varlen_kernel_takes_fewer_queries_than_keys(kv_heads: int) -> None:
    """Rows behind one prompt: the queries are at the last of the keys' positions."""
    torch.manual_seed(0)
    prompt = 37
    answers = [21, 5, 64]
    total = prompt + sum(answers)
    query, key, value = (
        torch.randn(total, heads, 128).bfloat16() for heads in (8, kv_heads, kv_heads)
    )
    starts = [prompt + sum(answers[:number]) for number in range(len(answers))]
    visible = [torch.arange(prompt)]
    for start, length in zip(starts, answers, strict=True):
        visible.append(torch.cat([torch.arange(prompt), torch.arange(start, start + length)]))
    indices = torch.cat(visible)
    seen = SeenKeys.of([len(keys) for keys in visible], indices)
    lengths = [prompt, *answers]
    rows = PackedRows(tuple(lengths), PackedRows.of(lengths).offsets, seen)
    rows = rows.move_tensors(torch.Tensor.cuda)

    output = _varlen_attention(
        query.cuda(), key[indices].cuda(), value[indices].cuda(), rows, AttentionForm()
    )

    for part, keys in zip(output.cpu().double().split(lengths), visible, strict=True):
        full = causal_rows(*(tensor[keys].double() for tensor in (query, key, value)), [len(keys)])
        assert float((part - full[-len(part) :]).abs().max()) <= BFLOAT16_GAP


@pytest.mark.parametrize("kv_heads", [8, 2], ids=["own heads", "grouped heads"])
def test_parts_of_a_ring_add_up_to_dense_attention(kv_heads: int) -> None:
    """Three rows over two ranks: results, and gradients with the sums of all parts."""
    torch.manual_seed(0)
    lengths = [70, 21, 37]
    tensors = [torch.randn(128, heads, 128).bfloat16() for heads in (8, kv_heads, kv_heads)]
    gradient = torch.randn(128, 8, 128).bfloat16()
    whole = [x.double().requires_grad_() for x in tensors]
    expected = causal_rows(*whole, lengths)
    expected.backward(gradient.double())
    query, key, value, gradient = (x.cuda() for x in (*tensors, gradient))

    found = [torch.zeros_like(x, dtype=torch.float32) for x in (gradient, query, key, value)]
    for rank in range(2):
        group = ContextGroup(rank, SimpleNamespace(size=lambda: 2), RING)  # sends nothing
        columns = [group.columns(128, each) for each in range(2)]
        owners = torch.empty(128, dtype=torch.int64)
        owners[columns[1]] = 1
        owners[columns[0]] = 0
        steps = RingSteps.of(group, PackedRows.of(lengths), owners).move_tensors(torch.Tensor.cuda)
        columns = [each.cuda() for each in columns]
        own = columns[rank]
        output = found[0][own]
        lse = output.new_full((8, len(own)), -torch.inf)
        parts = []
        for step, of_step in enumerate(steps.parts):
            for part in of_step:
                keys = columns[(rank - step) % 2][part.rows.seen.indices]
                queries = part.of_queries(own)
                result = attend_to_part(query[queries], key[keys], value[keys], part, PLAIN)
                join_result(output, lse, part, *result)
                parts.append((part, queries, keys))
        found[0][own] = output
        output = output.bfloat16()
        for part, queries, keys in parts:
            gradients = partial_gradients(
                gradient[queries], query[queries], key[keys], value[keys],
                part.of_queries(output), part.of_queries(lse, 1), part, PLAIN,
            )  # fmt: skip
            for total, index, added in zip(found[1:], (queries, keys, keys), gradients):
                total.index_add_(0, index, added.float())

    for own, full in zip(found, (expected, *(x.grad for x in whole)), strict=True):
        gap = (own.cpu().double() - full.detach()).abs().max()
        assert float(gap) <= 2 * BFLOAT16_GAP  # each part is rounded


def test_product_of_bfloat16_is_summed_and_returned_in_float32() -> None:
    """As rollout.vllm_blocks calls it."""
    torch.manual_seed(0)
    left = torch.randn(300, 4096).bfloat16()
    right = torch.randn(4096, 300).bfloat16()

    product = torch.mm(left.cuda(), right.cuda(), out_dtype=torch.float32)

    assert product.dtype == torch.float32
    assert float((product.cpu().double() - left.double() @ right.double()).abs().max()) <= 1e-2


def test_fused_adamw_takes_the_steps_of_the_plain_one() -> None:
    torch.manual_seed(0)
    values = [torch.randn(size, device="cuda") for size in (1, 1000, 1 << 20)]
    fused = [torch.nn.Parameter(value.clone()) for value in values]
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    optimizers = [
        torch.optim.AdamW(fused, lr=1e-3, fused=True),
        torch.optim.AdamW(plain, lr=1e-3, foreach=False),
    ]

    for _ in range(3):
        for one, other in zip(fused, plain, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    for one, other in zip(fused, plain, strict=True):
        gap = float((one - other).detach().abs().max())
        assert gap <= 3e-6  # some last bits (4.8e-7) of weights up to 5; measured 1.4e-6


def test_norms_of_many_tensors_are_those_in_float64() -> None:
    torch.manual_seed(0)
    dtypes = {3: torch.float32, 1 << 20: torch.float32, 77: torch.bfloat16}
    tensors = [torch.randn(size).to(dtype) for size, dtype in dtypes.items()]

    norms = torch._foreach_norm([tensor.cuda() for tensor in tensors], 2, dtype=torch.float64)

    for norm, tensor in zip(norms, tensors, strict=True):
        assert float((norm.cpu() - tensor.double().norm()).abs()) <= 1e-9


def test_columns_return_from_the_device_as_they_went() -> None:
    columns = [torch.randn(1 << 20), torch.arange(1 << 18), torch.rand(3) > 0.5, torch.zeros(0)]

    returned = [to_host(column) for column in all_to_device(columns, torch.device("cuda", 0))]
    torch.cuda.synchronize()

    for before, after in zip(columns, returned, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)


def test_an_offloaded_weight_returns_although_its_memory_was_overwritten() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1 << 26, device="cuda")
    expected = weight.cpu()
    storages = Storages([weight])

    for _ in range(5):
        storages.to_host()
        torch.empty(1 << 26, device="cuda").fill_(float("nan"))  # takes the memory that was freed
        storages.restore()

    assert torch.equal(weight.cpu(), expected)
