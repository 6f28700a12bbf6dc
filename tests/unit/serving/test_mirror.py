"""The mirror's updates: receivers that lag, skip, or come new end with its bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import MODULUS, box_hash
from spmdflow.errors import WeightSyncError
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.mirror import KEPT_VERSIONS, BoxOf, WeightMirror
from spmdflow.serving.update import (
    PackedMessage,
    apply_update,
    check_facts,
    cut_into_messages,
    planned_bytes,
)

SHAPES = {"scale": (), "norm": (12,), "matrix": (8, 10), "experts": (3, 4, 6)}
BOXES: tuple[BoxOf, ...] = (
    ("scale", Box(())),
    ("norm", Box(((0, 12),))),
    ("matrix", Box(((0, 8), (0, 5)))),
    ("matrix", Box(((0, 8), (5, 10)))),
    ("experts", Box(((0, 2), (0, 4), (0, 6)))),
    ("experts", Box(((2, 3), (0, 4), (0, 3)))),
    ("experts", Box(((2, 3), (0, 4), (3, 6)))),
)
"""Each element is in one of them."""
BITS = {2: torch.int16, 4: torch.int32}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Receiver:
    """What a server has: the live views of its boxes, some of them columns of wider tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.version = NEVER
        self.num_bytes = 0
        self.views: list[Tensor] = []
        for number, (_, box) in enumerate(BOXES):
            shape = box.shape
            if number % 2 and shape:
                wider = torch.full((*shape[:-1], shape[-1] + 3), 5.0, dtype=dtype)
                self.views.append(wider[..., 1 : 1 + shape[-1]])
            else:
                self.views.append(torch.full(shape, 5.0, dtype=dtype))

    def follow(self, mirror: WeightMirror) -> None:
        """Take an update through packed messages, as a worker does."""
        messages = cut_into_messages(mirror.updates(BOXES, since=self.version))
        facts = [[list(each.facts) for each in message] for message in messages]
        assert check_facts(facts, [box.size for _, box in BOXES]) is None
        self.num_bytes = 0
        for message, its_facts in zip(messages, facts, strict=True):
            packed = PackedMessage.of(message, mirror.dtype)
            self.num_bytes += packed.num_bytes
            for update in packed.split(its_facts):
                apply_update(self.views[update.index], update.values, update.positions)
        self.version = mirror.version

    def hashes(self) -> dict[str, int]:
        """Of the complete tensors, summed over the boxes."""
        totals = dict.fromkeys(SHAPES, 0)
        for (name, box), view in zip(BOXES, self.views, strict=True):
            totals[name] = (totals[name] + box_hash(view, box)) % MODULUS
        return totals


class Trainer:
    """Weights of each version, what changed with it, and the mirror that receives them."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.mirror = WeightMirror(SHAPES, dtype)
        self.weights: dict[str, Tensor] = {}
        for name, shape in SHAPES.items():
            self.weights[name] = torch.randn(shape, generator=self.random).to(dtype)
        self.differs: dict[int, dict[str, Tensor]] = {}

    def commit(self, version: int, share: float) -> None:
        """Draw a part of the values again, some of them special, and commit."""
        special = torch.tensor([-0.0, 0.0, math.nan, math.inf, -math.inf])
        differs = {}
        for name, old in self.weights.items():
            values = torch.randn(old.shape, generator=self.random)
            drawn = special[torch.randint(5, old.shape, generator=self.random)]
            is_special = torch.rand(old.shape, generator=self.random) < 0.5
            is_drawn = torch.rand(old.shape, generator=self.random) < share
            new = torch.where(is_special, drawn, values).to(old.dtype)
            self.weights[name] = torch.where(is_drawn, new, old)
            bits = BITS[old.element_size()]
            differs[name] = old.view(bits) != self.weights[name].view(bits)
        self.differs[version] = differs
        for name, view, box in self.mirror.next_blocks():
            view.copy_(self.weights[name][box.slices()])
        self.mirror.commit(version)

    def expected_bytes(self, since: int) -> int:
        """Of an update, by the formula and from what changed as torch says."""
        total = 0
        for name, box in BOXES:
            element_bytes = self.mirror.dtype.itemsize
            if since == NEVER or since < self.mirror.version - KEPT_VERSIONS:
                total += box.size * element_bytes
                continue
            changed = torch.zeros(SHAPES[name], dtype=torch.bool)
            for version in range(since + 1, self.mirror.version + 1):
                changed |= self.differs[version][name]
            num_changed = int(changed[box.slices()].sum())
            if 3 * int(changed.sum()) > changed.numel():
                total += box.size * element_bytes
            else:
                total += planned_bytes(num_changed, box.size, element_bytes)
        return total


def assert_same_bits(receiver: Receiver, trainer: Trainer) -> None:
    """All boxes of the receiver have the trainer's bits, and the mirror's hashes."""
    for (name, box), view in zip(BOXES, receiver.views, strict=True):
        bits = BITS[view.element_size()]
        expected = trainer.weights[name][box.slices()].contiguous().view(bits)
        assert torch.equal(view.contiguous().view(bits), expected)
    assert receiver.hashes() == trainer.mirror.hashes()


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    shares=st.lists(st.sampled_from((0.0, 0.01, 0.05, 0.2, 1.0)), min_size=1, max_size=24),
    lags=st.lists(st.integers(0, 10), min_size=1, max_size=4),
)
def test_receivers_that_lag_skip_or_come_new_have_the_mirrors_bits_and_the_planned_bytes(
    dtype: torch.dtype, seed: int, shares: Sequence[float], lags: Sequence[int]
) -> None:
    trainer = Trainer(dtype, seed)
    receivers = [Receiver(dtype) for _ in lags]

    for version, share in enumerate(shares):
        trainer.commit(version, share)
        for receiver, lag in zip(receivers, lags, strict=True):
            if version % (lag + 1):
                continue
            since = receiver.version
            receiver.follow(trainer.mirror)
            assert_same_bits(receiver, trainer)
            if trainer.mirror.has_changes_since(since) or since == NEVER:
                assert receiver.num_bytes == trainer.expected_bytes(since)

    newcomer = Receiver(dtype)
    newcomer.follow(trainer.mirror)
    assert_same_bits(newcomer, trainer)
    assert newcomer.num_bytes == trainer.expected_bytes(NEVER)


@pytest.mark.parametrize("next_version", [0, 2, 3, 5, 9])
def test_version_that_does_not_follow_gives_everything_to_everybody(next_version: int) -> None:
    trainer = Trainer(torch.bfloat16, seed=1)
    receivers = []
    for version in range(4):
        trainer.commit(version, share=0.05)
        receivers.append(Receiver(torch.bfloat16))
        receivers[-1].follow(trainer.mirror)

    trainer.commit(next_version, share=0.05)

    for receiver in receivers:
        if receiver.version != next_version:  # those of one version are the same by contract
            receiver.follow(trainer.mirror)
            assert receiver.num_bytes == trainer.expected_bytes(NEVER)
            assert_same_bits(receiver, trainer)
    assert trainer.mirror.changed_fraction == 1.0


def test_first_version_is_compared_with_nothing_also_if_it_is_zero_like_new_memory() -> None:
    mirror = WeightMirror({"one": (8,)}, torch.bfloat16)

    mirror.commit(0)

    assert mirror.changed_fraction == 1.0
    assert not mirror.has_changes_since(NEVER)
    (update,) = mirror.updates([("one", Box(((0, 8),)))], since=NEVER)
    assert update.positions is None


def test_changes_are_kept_for_the_last_versions_and_no_longer() -> None:
    trainer = Trainer(torch.bfloat16, seed=3)
    for version in range(30):
        trainer.commit(version, share=0.01)

    kept = [each for each in range(-1, 32) if trainer.mirror.has_changes_since(each)]

    assert kept == list(range(29 - KEPT_VERSIONS, 30))
    assert trainer.mirror.updates(BOXES, since=29) == []


def test_changes_of_earlier_versions_take_at_most_the_memory_of_one_copy() -> None:
    shape = (300, 100)
    mirror = WeightMirror({"matrix": shape}, torch.bfloat16)
    for version in range(6):
        ((_, view, _),) = mirror.next_blocks()
        view.fill_(0.0)
        view[version * 50 : version * 50 + 50] = 1.0  # a third changes: the old fifty, the new
        mirror.commit(version)

    kept = [each for each in range(6) if mirror.has_changes_since(each)]

    assert kept == [4, 5]  # 4 bytes each for a third: two thirds of a copy for each version


def test_changed_fraction_counts_also_what_is_sent_whole() -> None:
    mirror = WeightMirror({"one": (8,), "other": (8,)}, torch.float32)
    mirror.commit(0)
    for name, view, _ in mirror.next_blocks():
        view[: 6 if name == "one" else 1] = 1.0

    mirror.commit(1)

    assert mirror.changed_fraction == 7 / 16


@pytest.mark.parametrize("since", [NEVER, 0])
@pytest.mark.parametrize(
    "box",
    [
        ("matrix", Box(((0, 8), (0, 11)))),
        ("matrix", Box(((8, 9), (0, 10)))),
        ("matrix", Box(((0, 8),))),
        ("matrix", Box(())),
        ("matrix", Box(((0, 0), (0, 1), (0, 1)))),
        ("scale", Box(((0, 1),))),
        ("stranger", Box(((0, 1),))),
    ],
)
def test_box_outside_a_tensor_is_refused_with_its_name(box: BoxOf, since: int) -> None:
    trainer = Trainer(torch.bfloat16, seed=4)
    trainer.commit(0, share=0.1)
    trainer.commit(1, share=0.1)

    with pytest.raises(WeightSyncError, match=f"of {box[0]}.*serve the folder"):
        trainer.mirror.updates([box], since=since)
