"""Where a thread is, and which rank the others wait for."""

from __future__ import annotations

import linecache
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from spmdflow.data.store import RowCondition
from spmdflow.failure import lane_state
from spmdflow.failure.lane_state import (
    CODE,
    DONE,
    PEERS,
    QUEUED,
    ROWS,
    SILENT,
    STOPPED,
    LaneState,
    find_blocking_ranks,
    lane_state_of,
    name_ranks,
)

LOOP = LaneState(CODE, "own.py:3 in loop: pass")
SUM = LaneState(PEERS, "own.py:9 in step: all_reduce(x)")


def test_stopped_and_silent_ranks_explain_everything() -> None:
    held = LaneState(STOPPED, "process 7 is stopped (state T)")

    assert find_blocking_ranks({0: SUM, 1: held, 2: LOOP}) == (
        [1],
        "its process 7 is stopped (state T)",
    )
    assert find_blocking_ranks({0: SUM, 1: LaneState(SILENT, "process 7"), 2: held})[0] == [2]
    assert find_blocking_ranks({0: LaneState(QUEUED), 1: held})[0] == [1]


def test_rank_in_its_own_code_is_waited_for_by_those_in_a_collective() -> None:
    ranks, why = find_blocking_ranks({0: SUM, 1: LOOP, 2: SUM})

    assert ranks == [1]
    assert why == f"it is at {LOOP.text}; ranks 0, 2 in a collective, waiting"


def test_of_ranks_that_all_run_code_the_fewest_at_one_line_are_named() -> None:
    item = LaneState(
        CODE, "own.py:9 in step: loss.item()"
    )  # on a device a collective looks like this

    assert find_blocking_ranks({0: item, 1: LOOP, 2: item})[0] == [1]
    assert find_blocking_ranks({0: item, 1: LOOP})[0] == [0, 1]


def test_rank_that_finished_without_the_collective_of_the_others_is_named() -> None:
    done = LaneState(DONE, "finished after 0.1 s, 60 s ago")

    assert find_blocking_ranks({0: SUM, 1: done, 2: SUM})[0] == [1]
    ranks, why = find_blocking_ranks({0: done, 1: SUM, 2: done})
    assert ranks == [1] and "that ranks 0, 2 skipped" in why
    assert find_blocking_ranks({0: done, 1: done}) == ([], "")


def test_rank_in_another_collective_is_the_odd_one() -> None:
    other = LaneState(PEERS, "own.py:12 in step: broadcast(x)")

    assert find_blocking_ranks({0: SUM, 1: SUM, 2: other})[0] == [2]
    assert find_blocking_ranks({0: SUM, 1: other})[0] == [0, 1]
    assert "network" in find_blocking_ranks({0: SUM, 1: SUM})[1]


def test_call_that_waits_for_rows_or_its_turn_waits_for_no_rank() -> None:
    assert find_blocking_ranks({0: SUM, 1: LaneState(ROWS)}) == ([], "")
    assert find_blocking_ranks({0: SUM, 1: LaneState(QUEUED)}) == ([], "")


def test_ranks_are_named_as_spans() -> None:
    assert [name_ranks(r) for r in ([3], [0, 1, 2, 5], [1, 3])] == [
        *("rank 3", "ranks 0-2, 5", "ranks 1, 3"),
    ]


def _lane(step: object) -> None:
    step()  # type: ignore[operator]


def _wait_for_event(event: threading.Event) -> None:
    event.wait(100.0)


@pytest.fixture
def event() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def _started(step: object) -> threading.Thread:
    thread = threading.Thread(target=_lane, args=(step,), daemon=True)
    thread.start()
    return thread


def _place_of(thread: threading.Thread, where: str) -> LaneState:
    """The place of a thread once its line has `where` (first it may stand at the line of a def)."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        place = lane_state_of(thread.ident or 0, _lane.__code__)
        if place is not None and where in place.line:
            return place
    raise AssertionError(f"{place}, expected {where}")


def test_line_is_the_innermost_one_of_the_users_code(event: threading.Event) -> None:
    where = "in _wait_for_event: event.wait(100.0)"
    place = _place_of(_started(lambda: _wait_for_event(event)), where)

    assert place.kind == CODE
    assert place.line.startswith(__file__) and place.line.endswith(where)


def test_wait_for_rows_and_for_peers_are_told_apart(event: threading.Event) -> None:
    store = dist.HashStore()
    peers = _place_of(_started(lambda: store.wait(["never"])), "in <lambda>:")
    arrival = RowCondition()
    thread = _started(lambda: arrival.wait_until(event.is_set, 100.0))

    assert peers.kind == PEERS
    store.set("never", "now")
    assert _place_of(thread, "in <lambda>:").kind == CODE  # an early method waits, not for rows
    event.set()
    arrival.wake()
    thread.join(60.0)
    assert lane_state_of(thread.ident or 0, _lane.__code__) is None


def test_looking_where_a_thread_is_keeps_no_source_file(event: threading.Event) -> None:
    linecache.clearcache()
    _place_of(_started(lambda: _wait_for_event(event)), "event.wait(100.0)")

    assert linecache.cache == {}


def test_looking_where_a_thread_is_keeps_no_tensor_of_a_function_that_returned(
    event: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    reached = threading.Event()

    def compute() -> None:
        activation = torch.zeros(4)
        tensors.append(weakref.ref(activation))
        reached.set()
        _wait_for_event(event)

    def read_line_after_the_thread_has_ended(file: str, number: int) -> str:
        event.set()
        thread.join(60.0)
        assert not thread.is_alive()
        assert tensors[0]() is None
        return "the line"

    thread = _started(compute)
    assert reached.wait(60.0)
    monkeypatch.setattr(lane_state, "_line", read_line_after_the_thread_has_ended)

    state = lane_state_of(thread.ident or 0, _lane.__code__)

    assert state is not None and "the line" in state.line
