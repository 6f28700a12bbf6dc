"""Attention over packed rows against a mask over all of their tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ModelConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.workers import model as models
from spmdflow.workers.attention import (
    AttentionForm,
    PackedRows,
    SeenKeys,
    packed_attention,
    rotate,
)
from spmdflow.workers.micro_batch import micro_batches
from spmdflow.workers.sharding import read_weights
from tests.rollout_reference import load, write_family


def masked(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None
) -> Tensor:
    """Softmax of all scores, with those of other rows, later tokens and beyond the window away."""
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    distance = place[:, None] - place
    seen = (row[:, None] == row) & (distance >= 0) & (distance < (window or 1000))
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.sampled_from([None, 1, 3]))
def test_packed_rows_attend_to_themselves_alone_and_only_within_the_window(
    lengths: list[int], window: int | None
) -> None:
    torch.manual_seed(len(lengths))
    inputs = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))

    found = packed_attention(*ours, PackedRows.of(lengths), AttentionForm(window=window))
    expected = masked(*theirs, lengths, window)
    for output in (found, expected):
        (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()

    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=2, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 1, 3]),
)
def test_rows_behind_one_prompt_equal_rows_that_each_have_it(
    groups: list[tuple[int, list[int]]], window: int | None
) -> None:
    """Prompts first, then what follows them; expected: every row whole, as one after the other."""
    torch.manual_seed(len(groups))
    at = sum(length for length, _ in groups)
    sizes = [(length, length) for length, _ in groups]
    keys = []
    whole = []
    prompt = 0
    for length, _ in groups:
        keys.append(torch.arange(prompt, prompt + length))
        prompt += length
    for own_prompt, (length, rows) in zip(list(keys), groups, strict=True):
        for size in rows:
            sizes.append((size, length + size))
            keys.append(torch.cat([own_prompt, torch.arange(at, at + size)]))
            whole.append(keys[-1])
            at += size
    lengths, seen = zip(*sizes, strict=True)
    packed = replace(PackedRows.of(lengths), seen=SeenKeys.of(seen, torch.cat(keys)))
    inputs = [torch.randn(at, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))

    found = packed_attention(*ours, packed, AttentionForm(window=window))[torch.cat(whole)]
    rows = [x[torch.cat(whole)] for x in theirs]
    expected = masked(*rows, [len(row) for row in whole], window)
    for output in (found, expected):
        (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()

    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_rotation_equals_that_of_transformers(family: str) -> None:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    angles = torch.randn(1, 7, 4, dtype=torch.float64).repeat(1, 1, 2)
    cos = angles.cos()
    sin = angles.sin()
    ours, theirs = (
        [x.clone().requires_grad_() for x in torch.randn(2, 1, 3, 7, 8, dtype=torch.float64)]
        for _ in range(2)
    )
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    signed = torch.cat([-sin[..., :4], sin[..., 4:]], -1)

    found = rotate(*ours, cos, signed)
    expected = module.apply_rotary_pos_emb(*theirs, cos, sin)
    for pair in (found, expected):
        sum((x * torch.arange(x.numel()).view_as(x).cos()).sum() for x in pair).backward()

    for a, b in zip(
        [*found, *(x.grad for x in ours)], [*expected, *(x.grad for x in theirs)], strict=True
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def test_gradient_of_a_rotations_gradient_is_refused() -> None:
    query, key = torch.randn(2, 1, 3, 7, 8).requires_grad_()
    angle = torch.randn(1, 7, 8)
    turned, _ = rotate(query, key, angle.cos(), angle.sin())
    (slope,) = torch.autograd.grad(turned.square().sum(), query, create_graph=True)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_loaded_model_rotates_by_itself_and_leaves_other_models_of_its_family_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=write_family(tmp_path / family, family), dtype="float32")
    rotated = []

    def counted(*parts: Tensor) -> tuple[Tensor, Tensor]:
        rotated.append(parts[0].shape)
        return rotate(*parts)

    monkeypatch.setattr(models, "rotate", counted)
    module = models.load_model(config, head="causal_lm")
    read_weights(module, torch.device("cpu"))
    columns = {
        name: ragged_from_rows([torch.arange(3, 9)] * 2) for name in ("prompts", "responses")
    }
    batch = TensorDict(columns, batch_size=[2])
    (micro,) = micro_batches(
        batch, num_micro_batches=1, by_tokens=True, device=torch.device("cpu"), packed=True
    )

    found = module.module(micro, lambda output, _: output.log_probs())

    assert len(rotated) == len(module.layers)
    row = torch.arange(3, 9).repeat(2)[None]
    logits = load(config.path)(input_ids=row).logits[0, 5:-1].log_softmax(-1)
    expected = logits.gather(-1, row[0, 6:, None])[:, 0].repeat(2)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert len(rotated) == len(module.layers)


def test_neighbours_of_equal_length_go_through_the_kernel_together() -> None:
    assert PackedRows.of([2, 2, 3, 2]).runs == [(2, 2, 2), (1, 3, 3), (1, 2, 2)]


@pytest.mark.parametrize("place", [0, 2, 5])
def test_row_has_the_same_bits_whatever_the_other_rows_hold(place: int) -> None:
    torch.manual_seed(0)
    lengths = [3, 3, 4, 7, 7, 7]
    start = sum(lengths[:place])
    own = slice(start, start + lengths[place])
    rows = PackedRows.of(lengths)
    first = [torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    second = [torch.randn_like(x) for x in first]
    for a, b in zip(first, second, strict=True):
        b[own] = a[own]

    assert torch.equal(packed_attention(*first, rows)[own], packed_attention(*second, rows)[own])
