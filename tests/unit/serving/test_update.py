"""Updates of boxes: positions, messages, bytes, facts from another program."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import WeightSyncError
from spmdflow.serving import update as module
from spmdflow.serving.update import (
    FULL_BOX,
    BoxUpdate,
    PackedMessage,
    TensorChanges,
    apply_update,
    check_facts,
    cut_into_messages,
    find_changes,
    is_sent_whole,
    is_too_many,
    join_changes,
    message_sizes,
    planned_bytes,
    positions_in_box,
    update_of_box,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {2: torch.int16, 4: torch.int32}
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.0)


@dataclass(frozen=True)
class Case:
    """Two versions of a tensor, and a box in it."""

    old: Tensor
    new: Tensor
    box: Box

    @property
    def differs(self) -> Tensor:
        """Where their bits differ, in the tensor's shape."""
        bits = BITS[self.old.element_size()]
        return self.old.view(bits) != self.new.view(bits)

    @property
    def positions(self) -> Tensor:
        """The flat positions that changed, by torch alone."""
        return self.differs.reshape(-1).nonzero().squeeze(-1).int()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tensors of 0 to 3 dimensions with special values, of which a part is drawn again."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    bounds = []
    for size in shape:
        start = draw(st.integers(0, size))
        bounds.append((start, draw(st.integers(start, size))))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    old = torch.randn(shape, generator=generator).to(dtype)
    new = old.clone()
    share = draw(st.sampled_from((0.0, 0.1, 0.3, 1.0)))
    drawn = torch.rand(shape, generator=generator) < share
    values = torch.tensor(SPECIAL, dtype=dtype)
    chosen = values[torch.randint(len(SPECIAL), shape, generator=generator)]
    return Case(old, torch.where(drawn, chosen, new), Box(tuple(bounds)))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    bits = BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def strided_view(values: Tensor) -> Tensor:
    """A view with these values that is not contiguous, if it has dimensions."""
    if not values.ndim:
        return values.clone()
    wider = torch.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1), dtype=values.dtype)
    view = wider[..., 1::2]
    view.copy_(values)
    return view


@given(cases())
def test_found_changes_are_the_elements_whose_bits_differ(case: Case) -> None:
    changes = find_changes(case.old, case.new)

    assert changes.count == len(case.positions)
    if is_too_many(changes.count, case.old.numel()):
        assert changes.positions is None
    else:
        assert changes.positions is not None
        assert changes.positions.dtype == torch.int32
        assert torch.equal(changes.positions, case.positions)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 12_289])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.33, 0.5, 1.0])
def test_changes_over_many_slices_are_found_and_counted_also_when_they_are_too_many(
    size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 4096)
    old = torch.zeros(size, dtype=torch.bfloat16)
    differs = torch.arange(size) < round(share * size)
    differs = differs[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
    new = torch.where(differs, -0.0, old)

    changes = find_changes(old, new)

    assert changes.count == int(differs.sum())
    if 3 * changes.count <= size:
        assert changes.positions is not None
        assert torch.equal(changes.positions.long(), differs.nonzero().squeeze(-1))
    else:
        assert changes.positions is None


@given(st.lists(st.sets(st.integers(0, 29)), max_size=4))
def test_joined_changes_are_the_union_unless_one_of_them_or_the_union_is_too_many(
    sets: list[set[int]],
) -> None:
    changes = []
    for each in sets:
        positions = None if 3 * len(each) > 30 else torch.tensor(sorted(each), dtype=torch.int32)
        changes.append(TensorChanges(len(each), positions))

    joined = join_changes(changes, 30)

    union = sorted(set().union(*sets))
    if 3 * len(union) > 30:
        assert joined.positions is None
    else:
        assert joined.positions is not None
        assert joined.positions.tolist() == union
        assert joined.count == len(union)


@given(cases())
def test_positions_in_a_box_are_those_that_numpy_finds_there(case: Case) -> None:
    shape = tuple(case.old.shape)
    inside, own = positions_in_box(case.positions, shape, case.box)

    in_box = case.differs[case.box.slices()].reshape(-1)
    assert torch.equal(own.long(), in_box.nonzero().squeeze(-1))
    everywhere = np.arange(math.prod(shape)).reshape(shape)[case.box.slices()].reshape(-1)
    assert inside.tolist() == everywhere[in_box.numpy()].tolist()


@given(cases(), st.integers(1, 5))
def test_positions_in_a_box_do_not_depend_on_how_many_are_looked_at_together(
    case: Case, number: int
) -> None:
    shape = case.old.shape
    expected = positions_in_box(case.positions, shape, case.box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE", number)
        found = positions_in_box(case.positions, shape, case.box)

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_positions_in_a_box_of_a_tensor_without_elements_are_none() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)

    inside, own = positions_in_box(nothing, (0, 4), Box(((0, 0), (0, 2))))

    assert len(inside) == len(own) == 0


def test_positions_in_a_tensor_of_more_than_2_to_the_31_elements_are_exact() -> None:
    shape = (1 << 20, 1 << 14)
    first_column = 5
    positions = torch.tensor([first_column, (1 << 33) + first_column, (1 << 34) - 1])

    rows = positions_in_box(positions, shape, Box(((1 << 19, 1 << 20), (0, 1 << 14))))
    columns = positions_in_box(positions, shape, Box(((0, 1 << 20), (4, 8))))

    assert rows[1].tolist() == [first_column, (1 << 33) - 1]
    assert columns[0].tolist() == positions[:2].tolist()
    assert columns[1].tolist() == [1, (1 << 19) * 4 + 1]


@given(cases(), st.booleans())
def test_applied_update_of_a_box_gives_its_new_bits_in_any_view(case: Case, strided: bool) -> None:
    old = case.old[case.box.slices()]
    view = strided_view(old) if strided else old.clone()

    update = update_of_box(3, case.new, case.box, case.positions)
    apply_update(view, update.values, update.positions)

    assert same_bits(view, case.new[case.box.slices()])
    num_changed = int(case.differs[case.box.slices()].sum())
    assert update.num_bytes == planned_bytes(num_changed, case.box.size, case.old.element_size())
    assert (update.positions is None) == is_sent_whole(num_changed, case.box.size)


@given(cases(), st.booleans())
def test_update_without_positions_has_all_values(case: Case, strided: bool) -> None:
    shape = case.new[case.box.slices()].shape
    view = torch.full(shape, 7.0, dtype=case.new.dtype)
    if strided:
        view = strided_view(view)

    update = update_of_box(0, case.new, case.box, None)
    apply_update(view, update.values, update.positions)

    assert same_bits(view, case.new[case.box.slices()])
    assert update.num_bytes == case.box.size * case.new.element_size()


def test_update_that_is_written_in_parts_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITTEN", 3)
    expected = torch.arange(40.0).view(4, 10)
    positions = torch.arange(1, 40, 4, dtype=torch.int32)
    views = (torch.zeros(4, 10), strided_view(torch.zeros(4, 10)))

    for view in views:
        apply_update(view, expected.view(-1)[positions], positions)

    for view in views:
        assert torch.equal(view.reshape(-1)[positions], expected.view(-1)[positions])
        assert int(view.count_nonzero()) == len(positions)


@pytest.mark.parametrize("position", [-1, 6, 2**31 - 1, -(2**31)])
def test_position_outside_a_box_is_refused_before_anything_is_written(position: int) -> None:
    view = torch.zeros(2, 3)

    with pytest.raises(WeightSyncError, match=f"{position}.* expected 0 to 5; send it again"):
        apply_update(view, torch.ones(2), torch.tensor([1, position], dtype=torch.int32))

    assert not view.any()


@pytest.mark.parametrize(
    ("num_changed", "num_elements", "whole"),
    [
        *((0, 0, False), (0, 9, False), (1, 2, True), (1, 3, False), (2, 5, True)),
        *((0, 2**31, False), (1, 2**31, True), (1, 2**31 - 1, False)),
        *((10**15, 3 * 10**15 + 1, True), (2**29, 3 * 2**29, False), (2**29 + 1, 3 * 2**29, True)),
    ],
)
def test_box_is_sent_whole_above_a_third_or_if_positions_need_more_than_32_bits(
    num_changed: int, num_elements: int, whole: bool
) -> None:
    assert is_sent_whole(num_changed, num_elements) == whole
    expected = num_elements * 2 if whole else num_changed * 6
    assert planned_bytes(num_changed, num_elements, 2) == expected


@st.composite
def lists_of_updates(draw: st.DrawFn) -> list[BoxUpdate]:
    """Updates of boxes with numbers of their own."""
    result = []
    for index in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, 20))
        values = torch.randn(number).bfloat16()
        positions = None
        if draw(st.booleans()):
            positions = torch.arange(number, dtype=torch.int32) * 2
        result.append(BoxUpdate(index, values, positions))
    return result


@given(lists_of_updates(), st.integers(1, 200))
def test_messages_have_all_updates_in_order_and_split_into_the_same(
    updates: list[BoxUpdate], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MESSAGE_BYTES", most)
        messages = cut_into_messages(updates)

    received = []
    for message in messages:
        size = sum(each.num_bytes for each in message)
        assert size <= most or len(message) == 1
        packed = PackedMessage.of(message, torch.bfloat16)
        facts = [list(each.facts) for each in message]
        assert packed.num_bytes == size
        assert (len(packed.positions), len(packed.values)) == message_sizes(facts)
        received += packed.split(facts)
    assert [each.facts for each in received] == [each.facts for each in updates]
    for ours, theirs in zip(received, updates, strict=True):
        assert same_bits(ours.values, theirs.values)
        if theirs.positions is not None:
            assert ours.positions is not None
            assert torch.equal(ours.positions, theirs.positions)


SIZES = (4, 0, 9)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)
NEARLY = st.lists(st.lists(st.lists(st.integers(-2, 10), min_size=3, max_size=3)))


def is_well_formed(messages: object) -> bool:
    """Whether facts fit boxes of SIZES, written out a second time."""
    indices = []
    if type(messages) is not list:
        return False
    for message in messages:
        if type(message) is not list:
            return False
        for facts in message:
            if type(facts) is not list or list(map(type, facts)) != [int, int, int]:
                return False
            if facts[0] not in range(len(SIZES)):
                return False
            size = SIZES[facts[0]]
            deltas = [[count, count] for count in range(size + 1)]
            if facts[1:] not in [*deltas, [FULL_BOX, size]]:
                return False
            indices.append(facts[0])
    return len(set(indices)) == len(indices)


@given(PLAIN | NEARLY)
def test_facts_of_another_program_are_taken_only_if_they_fit_the_boxes(messages: object) -> None:
    problem = check_facts(messages, SIZES)

    assert (problem is None) == is_well_formed(messages)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "messages of type NoneType"),
        ([3], "a message of type int"),
        ([[[0, 1]]], "'[0, 1]' as the facts of a box"),
        ([[[True, 1, 1]]], "'[True, 1, 1]' as the facts of a box"),
        ([[[3, 1, 1]]], "box 3 of 3"),
        ([[[-1, 1, 1]]], "box -1 of 3"),
        ([[[0, 5, 5]]], "5 values at 5 positions of 4"),
        ([[[0, -2, 4]]], "4 values at -2 positions of 4"),
        ([[[0, FULL_BOX, 3]]], "3 values at -1 positions of 4"),
        ([[[0, 1, 1]], [[0, FULL_BOX, 4]]], "box 0 twice"),
        ([[[0, FULL_BOX, 4], [1, FULL_BOX, 0]], [[2, 9, 9]]], None),
        ([], None),
    ],
)
def test_wrong_facts_are_named(messages: object, problem: str | None) -> None:
    assert check_facts(messages, SIZES) == problem
