"""What several ranks hold counts once, and about as much of it on each of them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.blocks.box import Box, describe_boxes, own_boxes

Held = list[tuple[str, Box]]
bounds = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: tuple(sorted(pair)))
boxes = st.lists(st.tuples(st.sampled_from("ab"), st.tuples(bounds, bounds).map(Box)), max_size=4)


def elements(held: Held) -> list[tuple[str, int, int]]:
    found = []
    for name, box in held:
        (top, bottom), (left, right) = box.bounds
        found += [(name, row, col) for row in range(top, bottom) for col in range(left, right)]
    return found


def owned(ranks: list[Held]) -> list[Held]:
    everyone = [describe_boxes(held) for held in ranks]
    return [
        [
            (name, part)
            for (name, box), parts in zip(held, own_boxes(everyone, place), strict=True)
            for part in parts
            if box.contains(part)
        ]
        for place, held in enumerate(ranks)
    ]


@given(st.lists(boxes, min_size=1, max_size=4))
def test_every_element_that_some_rank_holds_is_owned_once_and_by_a_holder(ranks: list[Held]):
    found = [elements(held) for held in owned(ranks)]

    assert sorted(x for mine in found for x in mine) == sorted({*sum(map(elements, ranks), [])})


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_box_of_many_holders_is_divided_evenly(num_ranks: int, rows: int, cols: int):
    whole = ("w", Box(((2, 2 + rows), (0, cols))))

    sizes = [len(elements(mine)) for mine in owned([[whole]] * num_ranks)]

    split = rows if rows >= num_ranks else cols if cols >= num_ranks else None
    if split:
        slab = rows * cols // split
        assert max(sizes) - min(sizes) <= slab
    else:
        assert sorted(sizes) == [*[0] * (num_ranks - 1), rows * cols]


def test_small_tensors_go_to_ranks_in_turn_and_scalars_to_one():
    held = [(f"layer.{number}.norm", Box(((0, 2),))) for number in range(64)]
    held.append(("steps", Box(())))
    everyone = [describe_boxes(held)] * 4

    found = [own_boxes(everyone, place) for place in range(4)]

    sizes = [sum(box.size for parts in mine for box in parts) for mine in found]
    assert sum(sizes) == 64 * 2 + 1
    assert min(sizes) > 16, sizes
    assert sorted(len(mine[-1]) for mine in found) == [0, 0, 0, 1]
    assert [mine[-1] for mine in found if mine[-1]] == [[Box(())]]


def test_a_thousand_ranks_are_divided_in_a_second():
    rows = list(accumulate([8] * 1024, initial=0))
    names = [f"model.layers.{number}.weight" for number in range(200)]
    shards = [[(name, Box(((low, low + 8), (0, 64)))) for name in names] for low in rows[:-1]]
    everyone = [describe_boxes(held) for held in shards]

    mine = own_boxes(everyone, 700)

    assert mine == [[box] for _, box in shards[700]]
    assert np.concatenate(everyone).nbytes < 30 << 20
