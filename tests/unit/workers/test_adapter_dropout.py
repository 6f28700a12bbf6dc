"""Dropout of adapters: how often, the same whatever the micro-batch, and another one every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged
from spmdflow.workers.lora_dropout import AdapterDropout, prefix_hashes
from spmdflow.workers.micro_batch import MicroBatch, micro_batches, pad_length

WIDTH = 64
LAYER = "model.layers.0.self_attn.q_proj"


def rows_of(prompts: list[list[int]], responses: list[list[int]]) -> TensorDict:
    columns = {}
    for name, rows in (("prompts", prompts), ("responses", responses)):
        lengths = torch.tensor([len(row) for row in rows])
        columns[name] = ragged(torch.tensor([x for row in rows for x in row]), lengths)
    return TensorDict(columns, batch_size=[len(prompts)])


def text_rows() -> TensorDict:
    """Six rows, of which three share a prompt and two are equal."""
    shared = [5, 6, 7, 8, 9, 10, 11, 12]
    prompts = [shared, [5, 6], shared, [1], shared, [1]]
    responses = [[3, 4, 5], [7], [3, 4], [2, 2, 2], [9], [2, 2, 2]]
    return rows_of(prompts, responses)


def micro_of(rows: TensorDict, **how: Any) -> list[MicroBatch]:
    settings: dict[str, Any] = {"num_micro_batches": 1, "by_tokens": False, **how}
    return micro_batches(rows, device=torch.device("cpu"), **settings)


def masks_of(micros: list[MicroBatch], dropout: AdapterDropout, step: int = 0) -> set[Any]:
    """(tokens of the row so far, mask) of every token that is no padding."""
    found = set()
    for micro in micros:
        dropout.start(micro, step)
        kept = dropout.drop(torch.ones(*micro.input_ids.shape, WIDTH), LAYER) != 0
        dropout.stop()
        for prefix, mask in zip(prefixes(micro), kept.flatten(0, 1), strict=True):
            if prefix is not None:
                found.add((prefix, tuple(mask.tolist())))
    return found


def prefixes(micro: MicroBatch) -> Iterator[tuple[int, ...] | None]:
    """The row up to each token, found token by token; None for padding."""
    ids = micro.input_ids.flatten().tolist()
    counts = micro.rows_of_token.flatten().tolist()
    seen: list[int] = []
    if micro.packed is None:
        length = micro.input_ids.shape[1]
        for number in range(len(ids)):
            row = ids[number - number % length : number + 1]
            yield tuple(row) if counts[number] else None
        return
    start = 0
    keys = micro.packed.seen
    visible = None if keys is None else keys.indices.split(list(keys.lengths))
    for row, size in enumerate(micro.packed.lengths):
        seen = list(range(start, start + size)) if visible is None else visible[row].tolist()
        for number in range(size):
            row_ids = [ids[i] for i in seen[: len(seen) - size + number + 1]]
            yield tuple(row_ids) if counts[start + number] else None
        start += size


@pytest.mark.parametrize(
    "how",
    [
        {"packed": True},
        {"packed": True, "shares_prompts": True},
        {"packed": True, "num_micro_batches": 3},
        {"num_micro_batches": 2},
        {"packed": True, "multiple": 16},
    ],
)
def test_masks_depend_on_the_text_and_not_on_the_micro_batches(how: dict[str, Any]) -> None:
    dropout = AdapterDropout(0.25, seed=3)

    expected = masks_of(micro_of(text_rows()), dropout)
    found = masks_of(micro_of(text_rows(), **how), dropout)

    assert found == expected
    assert len({prefix for prefix, _ in found}) == len(found)  # one mask for a prefix


def test_shared_prompts_are_packed_once_in_these_rows() -> None:
    (micro,) = micro_of(text_rows(), packed=True, shares_prompts=True)

    assert micro.packed is not None and micro.packed.seen is not None


def test_hash_changes_with_any_earlier_token_and_with_no_later_one() -> None:
    (plain,) = micro_of(rows_of([[1, 2, 3]], [[4, 5]]))
    (other,) = micro_of(rows_of([[1, 9, 3]], [[4, 5]]))
    (later,) = micro_of(rows_of([[1, 2, 3]], [[4, 6]]))

    assert (prefix_hashes(plain) == prefix_hashes(other)).tolist() == [[True] + [False] * 4]
    assert (prefix_hashes(plain) == prefix_hashes(later)).tolist() == [[True] * 4 + [False]]


def long_micro() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (400,), generator=generator).tolist()
    (micro,) = micro_of(rows_of([ids[:100]], [ids[100:]]), packed=True)
    return micro


def kept(probability: float, *, seed: int = 0, step: int = 0, layer: str = LAYER) -> Tensor:
    """(tokens, WIDTH) bool."""
    dropout = AdapterDropout(probability, seed)
    micro = long_micro()
    dropout.start(micro, step)
    return dropout.drop(torch.ones(*micro.input_ids.shape, WIDTH), layer)[0] != 0


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_elements_are_dropped_with_the_probability_and_independently(probability: float) -> None:
    drops = (~kept(probability)).double()
    variance = probability * (1 - probability)
    error = (variance / drops.numel()) ** 0.5

    assert abs(float(drops.mean()) - probability) < 5 * error
    # the variance of means over tokens and over elements is that of independent draws
    for axis, size in ((0, drops.shape[0]), (1, drops.shape[1])):
        means = drops.mean(axis)
        spread = (2 / len(means)) ** 0.5  # of a variance, relative
        assert abs(float(means.var()) / (variance / size) - 1) < 5 * spread
    neighbours = ((drops[1:] - probability) * (drops[:-1] - probability)).mean()
    assert abs(float(neighbours)) < 5 * variance / drops.numel() ** 0.5


def test_masks_of_seeds_steps_and_layers_are_independent() -> None:
    plain = kept(0.5)

    for other in (kept(0.5, seed=1), kept(0.5, step=1), kept(0.5, layer="another")):
        agreement = float((plain == other).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / plain.numel() ** 0.5
    assert torch.equal(plain, kept(0.5))


def test_the_mean_stays_and_nothing_is_dropped_outside_of_training() -> None:
    dropout = AdapterDropout(0.5, seed=0)
    micro = long_micro()
    x = torch.ones(*micro.input_ids.shape, WIDTH, requires_grad=True)

    assert dropout.drop(x, LAYER) is x
    dropout.start(micro, 0)
    y = dropout.drop(x, LAYER)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    dropout.stop()

    assert set(y.unique().tolist()) == {0.0, 2.0} and torch.equal(gradient, y)
    assert dropout.drop(x, LAYER) is x


def test_a_part_of_the_elements_has_the_masks_of_the_whole_and_so_has_another_order() -> None:
    dropout = AdapterDropout(0.5, seed=0)
    (micro,) = micro_of(text_rows())
    dropout.start(micro, 0)
    x = torch.rand(*micro.input_ids.shape, WIDTH)

    whole = dropout.drop(x, LAYER)
    half = dropout.drop(x[..., 32:], LAYER, first=32)
    turned = dropout.drop(x.transpose(0, 1), LAYER, tokens_first=True)

    assert torch.equal(half, whole[..., 32:]) and torch.equal(turned, whole.transpose(0, 1))


def test_padding_of_packed_rows_changes_no_mask() -> None:
    (micro,) = micro_of(text_rows(), packed=True, shares_prompts=True)
    padded = pad_length(micro, 64)
    dropout = AdapterDropout(0.5, seed=0)

    assert masks_of([padded], dropout) == masks_of([micro], dropout)
