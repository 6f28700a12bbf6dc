"""Calls of other threads for the event loop: none is lost, and one wake-up serves many."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

from spmdflow.episodes.pending import LoopCalls


class CountingLoop:
    """An event loop that is woken by hand."""

    def __init__(self) -> None:
        self.scheduled: list[Any] = []

    def call_soon_threadsafe(self, call: Any) -> None:
        self.scheduled.append(call)


def test_loop_is_woken_once_for_the_calls_that_wait() -> None:
    loop: Any = CountingLoop()
    calls = LoopCalls(loop)
    made: list[int] = []

    for number in range(3):
        calls.add(partial(made.append, number))
    (make_all,) = loop.scheduled
    make_all()
    calls.add(partial(made.append, 3))

    assert made == [0, 1, 2] and len(loop.scheduled) == 2
    loop.scheduled[1]()
    assert made == [0, 1, 2, 3]


def test_call_that_is_added_while_others_are_made_is_made() -> None:
    loop: Any = CountingLoop()
    calls = LoopCalls(loop)
    made: list[str] = []

    def add_another() -> None:
        calls.add(partial(made.append, "second"))

    calls.add(add_another)
    for call in loop.scheduled:  # grows meanwhile
        call()

    assert made == ["second"]


def test_calls_of_several_threads_are_all_made_in_the_order_of_each() -> None:
    num_threads = 4
    num_calls = 2000
    made: list[tuple[int, int]] = []

    async def run() -> None:
        done = asyncio.Event()
        calls = LoopCalls(asyncio.get_running_loop())

        def note(thread: int, number: int) -> None:
            made.append((thread, number))
            if len(made) == num_threads * num_calls:
                done.set()

        def add_all(thread: int) -> None:
            for number in range(num_calls):
                calls.add(partial(note, thread, number))

        threads = [threading.Thread(target=add_all, args=(n,)) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(100):
            await done.wait()
        for thread in threads:
            thread.join()

    asyncio.run(run())
    for thread in range(num_threads):
        assert [number for who, number in made if who == thread] == list(range(num_calls))
