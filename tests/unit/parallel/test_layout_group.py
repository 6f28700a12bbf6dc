"""Keys of process groups and what a table refuses; groups themselves need ranks."""

from __future__ import annotations

import pytest
import torch

from spmdflow.errors import ProtocolError
from spmdflow.parallel.group import GroupSpec, GroupTable


@pytest.mark.parametrize(
    ("ranks", "lane", "backend", "message"),
    [
        ((1, 0), "compute", "gloo", r"got ranks \(1, 0\), expected .* list them as \(0, 1\)"),
        ((0, 0), "compute", "gloo", "each once"),
        ((), "compute", "gloo", "at least one rank"),
        ((0, 1), "main", "gloo", "got lane 'main'"),
        ((0, 1), "compute", "tcp", "got lane 'compute' and backend 'tcp'"),
    ],
)
def test_group_key_that_cannot_work_is_refused(ranks, lane, backend, message):
    with pytest.raises(ProtocolError, match=message):
        GroupSpec(ranks, lane, backend)


def test_group_that_was_not_made_is_refused_with_what_to_add():
    with pytest.raises(ProtocolError, match=r"add \(0, 1\) to the worker's needed_groups"):
        GroupTable(0, 10.0).get((0, 1))


def test_group_of_other_ranks_is_refused():
    with pytest.raises(ProtocolError, match="expected a group that rank 2 is in"):
        GroupTable(2, 10.0).get((0, 1))


def test_sum_over_one_rank_is_its_own_tensor_in_float64_and_needs_no_group():
    reduce = GroupTable(3, 10.0).reducer((3,))

    total = reduce(torch.tensor([0.5, 2.0], requires_grad=True))

    assert torch.equal(total, torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert not total.requires_grad
