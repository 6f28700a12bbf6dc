"""The checker of orders on small records: what would hang or mismatch on NCCL is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simcuda.orders import Operation, problems

ONE = "nccl:1:[0, 1]"
OTHER = "nccl:2:[0, 1]"
LOCAL = "gloo:3:[0, 1]"
FLOATS = (((4,), "Float"),)


def started(rank: int, group: str, op: str = "allreduce", **more: Any) -> Operation:
    """An operation on four floats."""
    return Operation(rank, group, op, **{"shapes": FLOATS, **more})


def ranks(*operations: Operation) -> dict[int, list[Operation]]:
    """By rank, in this order."""
    members = range(1 + max(each.rank for each in operations))
    return {rank: [each for each in operations if each.rank == rank] for rank in members}


EXCHANGE = [
    Operation(rank, "nccl:5:[0, 1, 2]", op, FLOATS, peer=1 - rank, batch=1)
    for rank in (0, 1)
    for op in ("send", "recv")
]


def message(rank: int, op: str, **more: Any) -> Operation:
    """A message to, or from, the other of two ranks."""
    return started(rank, **{"group": ONE, "op": op, "peer": 1 - rank, **more})


GOOD = {
    "the same order": [started(rank, group) for group in (ONE, OTHER) for rank in (0, 1)],
    "a message and its answer": [
        message(0, "send"),
        message(1, "recv"),
        message(1, "send"),
        message(0, "recv"),
    ],
    "an exchange in one batch": [
        message(rank, op, batch=1) for rank in (0, 1) for op in ("send", "recv")
    ],
    "an exchange of two of three ranks after a collective of all": [
        *(started(rank, "nccl:5:[0, 1, 2]") for rank in range(3)),
        *EXCHANGE,
    ],
    "messages without a batch of two of three ranks": [
        Operation(rank, "nccl:5:[0, 1, 2]", op, FLOATS, peer=1 - rank)
        for rank, op in enumerate(("send", "recv"))
    ],
    "two groups of gloo in two threads": [
        started(0, LOCAL, thread="transfer"),
        started(0, "gloo:4:[0, 1]"),
        started(1, "gloo:4:[0, 1]"),
        started(1, LOCAL, thread="transfer"),
    ],
}
BAD = {
    "two communicators in two orders": (
        [started(0, ONE), started(0, OTHER), started(1, OTHER), started(1, ONE)],
        "a cycle of 2 operations on nccl",
    ),
    "the same, started by two threads": (
        [
            started(0, ONE),
            started(0, OTHER, thread="transfer"),
            started(1, OTHER, thread="transfer"),
            started(1, ONE),
        ],
        "a cycle of 2 operations on nccl",
    ),
    "an exchange that sends first": (
        [message(rank, op) for rank in (0, 1) for op in ("send", "recv")],
        "a cycle",
    ),
    "a collective of gloo against one of NCCL": (
        [started(0, ONE), started(0, LOCAL), started(1, LOCAL), started(1, ONE)],
        "a cycle of 2 operations on gloo and nccl",
    ),
    "other sizes": (
        [started(0, ONE), started(1, ONE, shapes=(((5,), "Float"),))],
        "((5,), 'Float')",
    ),
    "other operations": ([started(0, ONE), started(1, ONE, "reduce")], "'reduce'"),
    "another root": (
        [started(0, ONE, "broadcast", peer=0), started(1, ONE, "broadcast", peer=1)],
        "'broadcast', 1",
    ),
    "a member that does not come": ([started(0, ONE)], "never started by ranks [1]"),
    "a message that nobody receives": ([message(0, "send")], "never started by ranks [1]"),
    "a message of another type": (
        [message(0, "send"), message(1, "recv", shapes=(((4,), "BFloat16"),))],
        "BFloat16",
    ),
    "a first exchange that a third rank does not reach": (
        EXCHANGE,
        "first use, which ranks [2] never reach",
    ),
    "first uses in two orders, for messages that fit": (
        [
            message(0, "send", batch=1),
            message(0, "send", batch=2, group=OTHER),
            message(1, "recv", batch=3, group=OTHER),
            message(1, "recv", batch=4),
        ],
        "a cycle of 2 first uses",
    ),
    "a tag": ([message(0, "send", tag=7), message(1, "recv", tag=7)], "tag 7"),
    "two threads on one communicator": (
        [started(rank, ONE, thread=name) for name in ("main", "transfer") for rank in (0, 1)],
        "several threads: ['main', 'transfer']",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_order_that_ends_has_no_problem(name: str) -> None:
    assert problems(ranks(*GOOD[name])) == []


@pytest.mark.parametrize("name", BAD)
def test_order_that_would_hang_or_mismatch_is_found(name: str) -> None:
    operations, words = BAD[name]

    assert any(words in problem for problem in problems(ranks(*operations)))
