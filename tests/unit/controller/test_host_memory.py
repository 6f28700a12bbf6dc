"""The growth of the ranks' memory: from the first five steps of a launch to a later one."""

from __future__ import annotations

from collections.abc import Mapping

from spmdflow.controller.step import HostMemory, device_metrics
from spmdflow.runtime.call import Call, CallRecord


def record(memory: Mapping[int, int]) -> CallRecord:
    """A call on these ranks, whose processes have so many bytes afterwards."""
    commands = {rank: {"operation": "call"} for rank in memory}
    call = Call(1, "compute", "actor.update_actor", commands, None)
    return CallRecord(call, {rank: {"host_bytes": size} for rank, size in memory.items()})


def settled(memory: Mapping[int, int]) -> HostMemory:
    """After five steps with the same memory."""
    watched = HostMemory()
    for _ in range(5):
        assert "perf/host_growth" not in watched.metrics([record(memory)])
    return watched


def test_growth_is_the_largest_ratio_of_a_rank_to_its_first_steps() -> None:
    watched = settled({0: 100, 1: 200})

    assert watched.metrics([record({0: 150, 1: 220})]) == {
        "perf/host_bytes": 220.0,
        "perf/host_growth": 1.5,
        "perf/host_rank": 0.0,
    }


def test_ranks_that_were_not_measured_in_the_first_steps_have_no_growth() -> None:
    watched = settled({0: 100})

    assert watched.metrics([record({1: 300})]) == {"perf/host_bytes": 300.0}


def test_step_without_a_reply_that_has_memory_has_no_metrics() -> None:
    assert HostMemory().metrics([]) == {}


def test_device_memory_of_a_step_is_the_most_of_any_rank_and_call() -> None:
    first = record({0: 1, 1: 1})
    second = record({0: 1})
    first.replies[0]["device_bytes"] = 300
    first.replies[1]["device_bytes"] = 700
    second.replies[0]["device_bytes"] = 500

    assert device_metrics([first, second]) == {"perf/device_bytes": 700.0}
    assert device_metrics([record({0: 1})]) == {}
