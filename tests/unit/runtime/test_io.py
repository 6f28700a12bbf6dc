"""The controller's process does not run for a while: what it knows is old, what came is unread."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmdflow.errors import ColumnError
from spmdflow.failure.peers import Peers
from spmdflow.failure.process import Process
from spmdflow.failure.settings import SessionSettings
from spmdflow.runtime import io as io_module
from spmdflow.runtime.call import Call, Pending
from spmdflow.runtime.io import Io
from spmdflow.runtime.wire import LOCAL_ADDRESS, RUN_ID_BYTES, Hub, Kind, RankSocket


class Controller:
    """Turns of an io thread, one by one, and the socket of its only rank."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run_id = os.urandom(RUN_ID_BYTES)
        me = Process.of(os.getpid())
        self.hub = Hub(run_id)
        self._stopped = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._stopped)
        monkeypatch.setattr(io_module, "time", clock)
        monkeypatch.setattr(Io, "_end_failed_run", lambda io, now: None)  # else this process ends
        self.io = Io(
            self.hub, peers=Peers({0: me}, own_rank=0), settings=SessionSettings(run_dir, (0,))
        )
        self.rank = RankSocket(LOCAL_ADDRESS, 0, run_id=run_id, context=self.hub.context)
        self.say(Kind.HELLO)
        while not self.io.met.done:
            self.io._step()

    def say(self, kind: Kind, body: Any = None) -> None:
        """The rank says something; it has come, but nobody has read it."""
        self.rank.send(self.rank.seal(kind, body))
        select.select([self.hub.descriptor], [], [], 60.0)

    def submit(self, seconds: float) -> tuple[int, Pending]:
        """An order's ticket, and its reply."""
        pending = self.io.submit(Call(1, "transfer", "transfer 1", {0: {}}, seconds))
        return max(self.io._ledger.open), pending

    def stop(self, seconds: float) -> None:
        """What a process sees that was stopped so long: the clock has gone on."""
        self._stopped += seconds

    def close(self) -> None:
        self.io._status.close()
        self.rank.close()
        self.hub.close()
        self.hub.terminate()


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    found = Controller(tmp_path, monkeypatch)
    yield found
    found.close()


def test_a_reply_that_came_while_the_controller_was_stopped_is_not_late(
    controller: Controller,
) -> None:
    ticket, pending = controller.submit(1.0)
    controller.say(Kind.REPLY, [ticket, {}, [0.0, 0.0]])
    controller.stop(5.0)
    controller.io._step()

    assert pending.done and not controller.io.has_failed


def test_limits_of_calls_do_not_count_the_time_in_which_the_whole_job_was_stopped(
    controller: Controller,
) -> None:
    _, pending = controller.submit(60.0)
    controller.stop(300.0)
    controller.io._step()

    assert not pending.done and not controller.io.has_failed


def test_an_error_in_what_follows_a_reply_names_the_call_and_the_line_of_the_script(
    controller: Controller,
) -> None:
    def on_done(replies: Any) -> None:
        raise ColumnError("the rows do not fit")

    call = Call(5, "compute", "map.bonus", {0: {}}, 60.0, line="own.py:7: batch.map(x)")
    pending = controller.io.submit(call, on_done)
    controller.say(Kind.REPLY, [max(controller.io._ledger.open), {}, [0.0, 0.0]])
    controller.io._step()

    (failure,) = controller.io._collector.failures
    assert not pending.done
    assert failure.sentence() == (
        "rank 0, map.bonus (call 5, compute lane): ColumnError: the rows do not fit"
    )
    assert failure.line == "own.py:7: batch.map(x)"


def test_what_a_reply_submits_is_done_before_the_next_message_is_read(
    controller: Controller,
) -> None:
    done: list[str] = []

    def first(replies: Any) -> None:
        done.append("first reply")
        controller.io.post(lambda: done.append("what it submitted"))

    def second(replies: Any) -> None:
        done.append("second reply")

    for number, on_done in ((1, first), (2, second)):
        controller.io.submit(Call(number, "compute", "map.bonus", {0: {}}, 60.0), on_done)
    controller.io._step()
    for ticket in sorted(controller.io._ledger.open):
        controller.say(Kind.REPLY, [ticket, {}, [0.0, 0.0]])
    controller.io._step()

    assert done == ["first reply", "what it submitted", "second reply"]
