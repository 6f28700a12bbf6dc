"""Where the messages of an update lie in a worker's staging memory."""

from __future__ import annotations

import itertools

import pytest

from spmdflow.serving.nixl import places_of


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_messages_lie_beside_each_other_when_their_sizes_are_odd(element_bytes: int) -> None:
    sizes = [(3, 5), (0, 7), (1, 1), (0, 0), (17, 17)]

    places, num_bytes = places_of(sizes, element_bytes)

    taken = []
    for place, (num_positions, num_values) in zip(places, sizes, strict=True):
        assert place.positions % 4 == 0
        assert place.values % element_bytes == 0
        taken.append((place.positions, place.positions + 4 * num_positions))
        taken.append((place.values, place.values + element_bytes * num_values))
    taken = sorted(each for each in taken if each[0] != each[1])
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(taken))
    assert taken[-1][1] == num_bytes


def test_a_whole_update_fits_when_the_memory_is_that_of_the_boxes() -> None:
    sizes = [(0, 1001), (0, 3)]

    _, num_bytes = places_of(sizes, 2)

    assert num_bytes == 2 * 1004


def test_a_delta_fits_beside_its_positions_when_it_has_the_most_elements() -> None:
    num_elements = 999

    _, num_bytes = places_of([(num_elements // 3, num_elements // 3)], 2)

    assert num_bytes <= 2 * num_elements + 64
