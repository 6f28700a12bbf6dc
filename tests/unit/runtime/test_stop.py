"""Signals that ask a run to stop: the first is a request, a second Ctrl-C ends the run at once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdflow.failure.launcher import shutdown_seconds
from spmdflow.failure.signals import STOP_SIGNALS, Signals
from spmdflow.runtime.call import InprocTransport, stop_on_signals
from spmdflow.runtime.wire import Kind
from tests.unit.runtime.test_io import Controller

ROOT = Path(__file__).parents[3]


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    found = Controller(tmp_path, monkeypatch)
    yield found
    found.close()


def failures(controller: Controller) -> list[str]:
    return [failure.kind for failure in controller.io._collector.failures]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_ask_the_run_to_stop_without_a_failure(
    controller: Controller, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "spmdflow")
    logging.getLogger("spmdflow").propagate = True

    controller.say(Kind.STOP, int(number))
    controller.io._step()

    assert controller.io.stop_requested and not controller.io.has_failed
    assert f"asked to end by {STOP_SIGNALS[number]}: saving and stopping" in caplog.text
    assert ("press Ctrl-C again to stop at once" in caplog.text) == (number == signal.SIGINT)


def test_sigterm_is_a_request_only_where_no_failure_becomes_known_soon(
    controller: Controller,
) -> None:
    controller.say(Kind.STOP, int(signal.SIGTERM))
    controller.io._step()
    asked_at_once = controller.io.stop_requested
    controller.stop(3.0)
    controller.io._step()

    assert not asked_at_once and controller.io.stop_requested


def test_ctrl_c_again_ends_the_run(controller: Controller) -> None:
    watch = controller.io._watch
    now = time.monotonic()

    watch.on_signal(0, signal.SIGINT, now)
    watch.on_signal(0, signal.SIGINT, now + 5.0)

    assert failures(controller) == ["interrupt"]


def test_ctrl_c_again_ends_the_run_where_torchrun_makes_sigterm_of_it(
    controller: Controller,
) -> None:
    watch = controller.io._watch
    now = time.monotonic()

    watch.on_signal(0, signal.SIGINT, now)
    watch.on_signal(0, signal.SIGTERM, now + 0.1)

    assert failures(controller) == ["interrupt"]


def test_one_ctrl_c_that_every_rank_gets_and_one_of_them_twice_is_one_request(
    controller: Controller,
) -> None:
    watch = controller.io._watch
    now = time.monotonic()

    watch.on_signal(0, signal.SIGINT, now)
    watch.on_signal(1, signal.SIGINT, now + 5.0)
    watch.on_signal(0, signal.SIGINT, now + 0.5)

    assert watch.stop_requested and failures(controller) == []


def test_signals_that_launchers_repeat_after_a_closed_terminal_or_sigterm_end_nothing_at_once(
    controller: Controller,
) -> None:
    watch = controller.io._watch
    now = time.monotonic()

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        watch.on_signal(0, number, now)
        now += 5.0

    assert watch.stop_requested and failures(controller) == []


def taken_within(seconds: float, signals: Signals, expected: set[int]) -> set[int]:
    """Whatever `signals` takes until it has taken all that are expected.

    The kernel may hand a signal to a thread of a library, which notes it a moment later.
    """
    taken: set[int] = set()
    end = time.monotonic() + seconds
    while not expected <= taken and time.monotonic() < end:
        taken |= signals.take()
        time.sleep(0.01)
    return taken


@pytest.fixture(autouse=True)
def in_the_foreground() -> Iterator[None]:
    """Stop signals act, also where the tests run under nohup or in the background of a shell."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_every_stop_signal_of_a_session_is_taken_but_one_that_was_ignored_before(
    nohup: None,
) -> None:
    expected = {signal.SIGTERM, signal.SIGINT}

    with Signals() as signals:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        taken = taken_within(30.0, signals, expected)

    assert taken == expected
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


MET_AFTER_SIGTERM = """
import os, signal, time
from spmdflow.failure.signals import Signals
from spmdflow.failure.start_watch import StartWatch

watch = StartWatch(os.getppid())
os.kill(os.getpid(), signal.SIGTERM)
while signal.SIGTERM in signal.sigpending():
    time.sleep(0.01)
watch.end()
with Signals() as signals:
    until = time.monotonic() + 60
    while not (taken := signals.take()) and time.monotonic() < until:
        time.sleep(0.01)
print(*taken)
"""


def test_sigterm_in_the_last_moment_of_a_start_stops_the_session() -> None:
    words = [sys.executable, "-c", MET_AFTER_SIGTERM]

    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=600)

    assert (ended.returncode, ended.stdout.strip()) == (0, str(int(signal.SIGTERM))), ended.stderr


def test_in_one_process_the_first_ctrl_c_is_a_request_and_the_second_an_interrupt() -> None:
    transport = InprocTransport({})
    before = signal.getsignal(signal.SIGINT)

    with stop_on_signals(transport):
        signal.raise_signal(signal.SIGINT)
        assert transport.stop_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) == before


def test_in_one_process_a_closed_terminal_is_a_request_again_and_again() -> None:
    transport = InprocTransport({})

    with stop_on_signals(transport):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)

    assert transport.stop_requested


def test_in_one_process_a_signal_that_was_ignored_before_stays_so(nohup: None) -> None:
    transport = InprocTransport({})

    with stop_on_signals(transport):
        signal.raise_signal(signal.SIGHUP)

    assert not transport.stop_requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_time_before_ranks_are_killed_is_infinite_where_no_torchrun_started_them() -> None:
    assert shutdown_seconds(os.getpid()) == float("inf")
