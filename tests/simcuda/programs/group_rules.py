"""What NCCL does with several ranks, on simulated devices; run by `test_group_rules.py`.

    python tests/simcuda/programs/group_rules.py FOLDER      prints {case: {rank: how it ended}}

A rank ends with "" if all was as it should be, with its error, or with what the watchdog said. All
cases run at once, each with forked ranks of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simcuda.order_of_work import refused


def two_ranks_on_one_device() -> None:
    torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(4, device="cuda"))


def result_that_is_read_before_the_wait() -> None:
    values = torch.ones(4, device="cuda")
    work = dist.all_reduce(values, async_op=True)
    assert (ctypes.c_uint8 * 16).from_address(values.data_ptr())[:] == [255] * 16
    with refused("aten::mul", "allreduce on the stream of nccl", "writes"):
        values * 2
    work.wait()
    assert (values * 2).tolist() == [4] * 4


def input_that_is_written_before_the_wait() -> None:
    values = torch.full((4,), float(dist.get_rank()), device="cuda")
    if dist.get_rank() == 0:
        work = dist.isend(values, 1)
        assert work is not None
        with refused("aten::zero_", "send", "reads"):
            values.zero_()
        work.wait()
        values.zero_()
    else:
        dist.recv(values, 0)
        assert values.tolist() == [0] * 4


def broadcast_on_a_stream_that_waits_for_nobody() -> None:
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)
    values += 1
    with torch.cuda.stream(torch.cuda.Stream()), refused("broadcast", "aten::add on stream 0"):
        dist.broadcast(values, 0)


def mean_of_bfloat16() -> None:
    values = torch.full((4,), 1.0 + dist.get_rank(), device="cuda", dtype=torch.bfloat16)
    work = dist.all_reduce(values, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert values.tolist() == [1.5] * 4


def first_messages_that_a_rank_does_not_reach() -> None:
    rank = dist.get_rank()
    if rank < 2:
        values = torch.ones(4, device="cuda")
        operation = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, values, 1 - rank)]):
            work.wait()
    else:
        time.sleep(100)


def messages_after_a_first_collective() -> None:
    dist.all_reduce(torch.ones(1, device="cuda"))
    if dist.get_rank() < 2:
        first_messages_that_a_rank_does_not_reach()


def collective_that_a_rank_does_not_reach() -> None:
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)
    if dist.get_rank() == 0:
        dist.all_reduce(values)
    else:
        time.sleep(100)


def collectives_of_two_groups_in_two_orders() -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    for group in groups[:: 1 if dist.get_rank() == 0 else -1]:
        dist.all_reduce(torch.ones(4), group=group)


def collective_that_a_slow_rank_reaches() -> None:
    values = torch.ones(4, device="cuda")
    if dist.get_rank() == 1:
        end = time.process_time() + 4
        while time.process_time() < end:
            _square(values)
    dist.all_reduce(values)


def _square(values: Tensor) -> Tensor:
    return values @ values


CASES: dict[Callable[[], None], int] = {
    two_ranks_on_one_device: 2,
    result_that_is_read_before_the_wait: 2,
    input_that_is_written_before_the_wait: 2,
    broadcast_on_a_stream_that_waits_for_nobody: 2,
    mean_of_bfloat16: 2,
    first_messages_that_a_rank_does_not_reach: 3,
    messages_after_a_first_collective: 3,
    collective_that_a_rank_does_not_reach: 2,
    collectives_of_two_groups_in_two_orders: 2,
    collective_that_a_slow_rank_reaches: 2,
}
"""Case -> number of ranks."""


def run_rank(case: Callable[[], None], rank: int, size: int, folder: Path) -> None:
    """One rank of a case; its end is in the file RANK.txt."""
    path = folder / f"{rank}.txt"
    errors = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.environ["SIMCUDA_STATE"] = str(folder / "state")
    os.environ["SIMCUDA_HANG_SECONDS"] = "3"
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
    path.write_text("")  # torch has warned
    try:
        case()
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    (folder / f"{rank}.done").touch()
    while not all((folder / f"{other}.done").exists() for other in range(size)):
        time.sleep(0.05)  # while others still talk to this one


def main() -> int:
    """Run all cases at once."""
    folder = Path(sys.argv[1])
    children = []
    for case, size in CASES.items():
        (folder / case.__name__).mkdir(parents=True)
        for rank in range(size):
            child = os.fork()
            if not child:
                try:
                    run_rank(case, rank, size, folder / case.__name__)
                finally:
                    os._exit(0)
            children.append(child)
    end = time.monotonic() + 90
    left = list(children)
    while left and time.monotonic() < end:
        left = [child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)]
        if all(_has_verdict(folder / case.__name__, size) for case, size in CASES.items()):
            break
        time.sleep(0.05)
    for child in left:
        os.kill(child, 9)
        os.waitpid(child, 0)
    found = {
        case.__name__: {
            rank: (folder / case.__name__ / f"{rank}.txt").read_text() for rank in range(size)
        }
        for case, size in CASES.items()
    }
    print(json.dumps(found))
    return 0


def _has_verdict(folder: Path, size: int) -> bool:
    """Whether all ranks have come to an end, or one has hung."""
    texts = [(folder / f"{rank}.txt") for rank in range(size)]
    hung = any(path.exists() and "simulated NCCL" in path.read_text() for path in texts)
    return hung or all((folder / f"{rank}.done").exists() for rank in range(size))


if __name__ == "__main__":
    sys.exit(main())
