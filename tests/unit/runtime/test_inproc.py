"""The transport of one process: the same order of events, at once, in the caller."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from spmdflow.errors import ProtocolError
from spmdflow.runtime.call import Call, InprocTransport


def _transport(log: list[Any]) -> InprocTransport:
    def note(payload: dict[str, Any], number: int) -> dict[str, Any]:
        log.append((number, threading.current_thread() is threading.main_thread()))
        return {"double": 2 * number}

    def fail(payload: dict[str, Any], number: int) -> dict[str, Any]:
        raise KeyError(number)

    return InprocTransport({"note": note, "fail": fail})


def _call(number: int, operation: str = "note") -> Call:
    return Call(number, "compute", f"a.{operation}", {0: {"operation": operation}}, 1.0)


def test_call_has_run_when_submit_returns() -> None:
    log: list[Any] = []

    pending = _transport(log).submit(_call(3))

    assert log == [(3, True)]
    assert pending.done and pending.result() == {0: {"double": 6}}


def test_calls_of_on_done_run_after_it_in_order_and_before_submit_returns() -> None:
    log: list[Any] = []
    transport = _transport(log)

    def on_done(replies: Any) -> None:
        log.append(replies)
        transport.submit(_call(2))
        transport.post(lambda: log.append("posted"))
        transport.submit(_call(3))
        log.append("on_done ends")

    transport.submit(_call(1), on_done)

    assert log == [
        (1, True),
        {0: {"double": 2}},
        "on_done ends",
        (2, True),
        "posted",
        (3, True),
    ]


def test_exception_of_an_operation_reaches_the_script_as_it_is_and_nothing_lingers() -> None:
    log: list[Any] = []
    transport = _transport(log)

    with pytest.raises(KeyError, match="7"):
        transport.submit(_call(7, "fail"), log.append)

    assert log == []
    assert transport.submit(_call(8)).done


def test_unknown_operation_is_refused_naming_the_known() -> None:
    with pytest.raises(ProtocolError, match=r"'walk'; expected one of \['fail', 'note'\]"):
        _transport([]).submit(_call(1, "walk"))


def test_waiting_for_a_call_inside_on_done_is_refused() -> None:
    transport = _transport([])

    with pytest.raises(ProtocolError, match="asked for inside of on_done"):
        transport.submit(_call(1), lambda _: transport.submit(_call(2)).result())
