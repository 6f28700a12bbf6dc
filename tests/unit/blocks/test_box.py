"""Box algebra against sets of elements."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.blocks.box import Box, flat_range, make_disjoint, merge_neighbours, subtract_all
from tests.unit.block_reference import elements


@st.composite
def boxes(draw, num_dims, largest=6):
    ends = [sorted(draw(st.tuples(*[st.integers(0, largest)] * 2))) for _ in range(num_dims)]
    return Box(tuple((start, stop) for start, stop in ends))


@st.composite
def box_lists(draw, max_size=5):
    num_dims = draw(st.integers(0, 3))
    return draw(st.lists(boxes(num_dims), min_size=2, max_size=max_size))


def assert_disjoint(parts):
    assert sum(part.size for part in parts) == len(elements(parts))
    assert all(part.size for part in parts)


@given(box_lists())
def test_intersection_has_the_common_elements(some):
    first, second = some[:2]

    common = first.intersect(second)

    assert elements([common] if common else []) == elements([first]) & elements([second])
    assert first.contains(second) == (elements([second]) <= elements([first]))


@given(box_lists())
def test_difference_has_the_other_elements_in_at_most_two_boxes_a_dimension(some):
    first, second = some[:2]

    rest = first.subtract(second)

    assert_disjoint(rest)
    assert elements(rest) == elements([first]) - elements([second])
    assert len(rest) <= max(1, 2 * len(first.bounds))


@given(box_lists())
def test_disjoint_boxes_have_the_same_elements(some):
    parts = make_disjoint(some)

    assert_disjoint(parts)
    assert elements(parts) == elements(some)


@given(box_lists())
def test_merging_keeps_the_elements_sorts_and_never_adds_boxes(some):
    parts = make_disjoint(some)

    joined = merge_neighbours(parts)

    assert_disjoint(joined)
    assert elements(joined) == elements(parts)
    assert len(joined) <= len(parts)
    assert joined == sorted(joined)


@given(box_lists())
def test_difference_of_lists_has_the_other_elements(some):
    rest = subtract_all(make_disjoint(some[:2]), some[2:])

    assert_disjoint(rest)
    assert elements(rest) == elements(some[:2]) - elements(some[2:])


@given(st.lists(st.integers(0, 5), max_size=3), st.data())
def test_flat_range_has_its_elements_in_row_major_order(shape, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    flat = np.arange(prod(shape)).reshape(shape)

    parts = flat_range(shape, start, stop)

    values = [value for part in parts for value in np.ravel(flat[part.slices()]).tolist()]
    assert values == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    assert all(part.size for part in parts)


def test_flat_range_of_a_matrix_is_part_of_a_row_whole_rows_part_of_a_row():
    assert flat_range((4, 5), 3, 17) == [
        Box(((0, 1), (3, 5))),
        Box(((1, 3), (0, 5))),
        Box(((3, 4), (0, 2))),
    ]


def test_quarters_of_a_matrix_merge_to_the_whole():
    quarters = [Box(((i, i + 2), (j, j + 3))) for i in (0, 2) for j in (0, 3)]

    assert merge_neighbours(quarters) == [Box.of_shape((4, 6))]


def test_slices_find_a_box_inside_a_shard():
    full = np.arange(24).reshape(4, 6)
    shard = Box(((2, 4), (0, 6)))
    part = Box(((3, 4), (2, 5)))

    local = full[shard.slices()]

    assert np.array_equal(local[part.slices(shard)], full[part.slices()])


def test_scalar_is_a_box_without_dimensions():
    scalar = Box.of_shape(())

    assert scalar.size == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []


def test_cut_gives_both_sides():
    assert Box(((1, 5), (0, 2))).cut(0, 3) == (Box(((1, 3), (0, 2))), Box(((3, 5), (0, 2))))


@pytest.mark.parametrize("bounds", [((2, 1),), ((-1, 1),)])
def test_range_that_ends_before_it_starts_is_our_mistake(bounds):
    with pytest.raises(AssertionError, match="expected 0 <= start <= stop"):
        Box(bounds)
