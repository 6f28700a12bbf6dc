"""Tasks that wait for one another and share cores: known cases, and what holds for all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.plan.prediction import Task, timeline
from spmdflow.plan.workload import hardware_of


def test_tasks_on_disjoint_ranks_overlap_where_every_rank_has_a_device() -> None:
    tasks = [Task(2.0, (0, 1)), Task(3.0, (2, 3)), Task(1.0, (0, 1), ((0, 0.5), (1, 0.0)))]

    assert timeline(tasks) == [(0, 2), (0, 3), (3, 4)]
    assert timeline(tasks[:1] + [Task(1.0, (0,), ((0, 0.5),))]) == [(0, 2), (2.5, 3.5)]
    assert timeline([Task(1.0, (0,), earliest=0.25)]) == [(0.25, 1.25)]


def test_four_ranks_on_two_cores_take_twice_as_long() -> None:
    assert timeline([Task(3.0, (0, 1, 2, 3))], node_size=4, cores=2) == [(0, 6)]
    assert timeline([Task(3.0, (0, 1))], node_size=4, cores=2) == [(0, 3)]
    assert timeline([Task(3.0, (0,))], node_size=4, cores=2) == [(0, 3)]


def test_cores_are_shared_only_while_more_ranks_are_busy() -> None:
    tasks = [Task(2.0, (0, 1)), Task(1.0, (2, 3))]

    # both at half speed until 2; then the first has 1 s left and the cores to itself
    assert timeline(tasks, node_size=4, cores=2) == [(0, 3), (0, 2)]


def test_ranks_that_wait_in_a_bubble_leave_their_cores_to_others() -> None:
    halves = [Task(3.0, (0, 1, 2, 3), busy=0.5)]
    most = [Task(3.0, (0, 1, 2, 3), busy=0.75)]

    assert timeline(halves, node_size=4, cores=2) == [(0, 3)]
    assert timeline(most, node_size=4, cores=2) == [(0, 4.5)]
    assert timeline(most, node_size=2, cores=2) == [(0, 3)]


def test_call_over_two_machines_is_as_slow_as_on_the_busier_one() -> None:
    tasks = [Task(1.0, (0, 1)), Task(4.0, (2, 3, 4)), Task(1.0, (5,))]

    # ranks 0-2 on the first machine, 3-5 on the second: three busy on two cores on each
    spans = timeline(tasks, node_size=3, cores=2)

    assert [end for _, end in spans] == pytest.approx([1.5, 4.5, 1.5])


Drawn = tuple[float, set[int], int, float, float]
LISTS = st.lists(
    st.tuples(
        st.floats(0.01, 10),
        st.sets(st.integers(0, 5), min_size=1),
        st.integers(0, 3),
        st.floats(0, 1),
        st.floats(0.1, 1),
    ),
    min_size=1,
    max_size=10,
)


def _tasks(drawn: list[Drawn]) -> list[Task]:
    """Each waits for the last task of its ranks, and for the one that lies `back` before it."""
    found: list[Task] = []
    for seconds, ranks, back, wait, busy in drawn:
        after = [(i, 0.0) for i, task in enumerate(found) if ranks & set(task.ranks)]
        if 0 < back <= len(found):
            after.append((len(found) - back, wait))
        found.append(Task(seconds, tuple(sorted(ranks)), tuple(after), busy=busy))
    return found


@given(LISTS)
def test_without_sharing_a_task_begins_when_the_last_that_it_waits_for_is_through(
    drawn: list[Drawn],
) -> None:
    tasks = _tasks(drawn)
    spans = timeline(tasks)

    for task, (start, end) in zip(tasks, spans):
        assert start == max([0.0, *(spans[i][1] + wait for i, wait in task.after)])
        assert end == start + task.seconds


@given(LISTS, st.integers(1, 6))
def test_shared_cores_do_all_the_work_and_never_more_than_they_can(
    drawn: list[Drawn], cores: int
) -> None:
    tasks = _tasks(drawn)
    spans = timeline(tasks, node_size=6, cores=cores)

    for task, (start, end) in zip(tasks, spans):
        longest = max(1.0, 6 / cores) * task.seconds
        assert task.seconds * (1 - 1e-9) <= end - start <= longest * (1 + 1e-9)
        assert start == max([0.0, *(spans[i][1] + wait for i, wait in task.after)])
    work = sum(task.seconds * task.busy * len(task.ranks) for task in tasks)
    assert max(end for _, end in spans) >= work / cores * (1 - 1e-9)


def test_ranks_beyond_those_of_the_measurement_share_the_processors() -> None:
    cpu = hardware_of("cpu", 4)
    device = hardware_of("h100", 4)

    assert (cpu.gpus_per_node, cpu.cores) == (4, 2)
    assert device.cores == math.inf
