"""Sessions on real ranks: errors, limits and exits inside one, and who is named."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from spmdflow.data.store import RowCondition
from spmdflow.errors import DeadlineError, ProtocolError
from spmdflow.failure.settings import SessionSettings
from spmdflow.runtime.call import Call, Transport
from spmdflow.runtime.executor import Operation
from spmdflow.runtime.session import run_session
from tests.distributed.ranks import watch_ranks
from tests.distributed.session_parts import one_round, operations, settings_for, to_all, with_secret

Spawn = Callable[..., list[Any]]


@pytest.mark.parametrize("secrets", [["word", None], ["word", "other"], [None, "word"]])
def test_rank_with_another_secret_ends_the_run_within_seconds(
    tmp_path: Path, secrets: list[str | None]
) -> None:
    outcomes = watch_ranks(
        with_secret, 2, str(tmp_path), secrets, seconds=280
    )  # a start may take 600

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "SPMDFLOW_SECRET" in (tmp_path / "failure-rank1.json").read_text()


def _forever(run_dir: str, operation: str) -> int:
    def main(transport: Transport) -> None:
        everywhere = to_all(transport, {"operation": operation})
        transport.submit(Call(1, "compute", "a.work", everywhere, 3.0)).result()

    return run_session(main, _endless, settings_for(Path(run_dir)))


def _endless(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
    def only_rank_1(payload: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(600.0 if rank == 1 else 0.0)
        return {}

    return {"hang": only_rank_1}


def test_call_beyond_its_limit_ends_the_run_and_names_rank_and_method(tmp_path: Path) -> None:
    outcomes = watch_ranks(_forever, 2, str(tmp_path), "hang")
    text = (tmp_path / "failure.json").read_text()

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for part in ('"rank": 1', '"method": "work"', '"kind": "deadline"', "not finished within 3 s"):
        assert part in text
    assert "only_rank_1" in (tmp_path / "stacks-rank1.txt").read_text()


def test_unknown_operation_ends_the_run_naming_the_known_ones(tmp_path: Path) -> None:
    watch_ranks(_forever, 2, str(tmp_path), "walk")

    text = (tmp_path / "failure.json").read_text()
    assert ProtocolError.__name__ in text and "'walk'" in text and "hang" in text


def _broken_on_done(run_dir: str) -> int:
    def main(transport: Transport) -> None:
        def on_done(replies: Any) -> None:
            raise ZeroDivisionError("in on_done")

        everywhere = to_all(transport, {"operation": "note"})
        transport.submit(Call(1, "compute", "a.note", everywhere, 60.0), on_done).result()

    return run_session(main, operations, settings_for(Path(run_dir)))


def test_error_in_on_done_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    outcomes = watch_ranks(_broken_on_done, 2, str(tmp_path))
    text = (tmp_path / "failure.json").read_text()

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert '"kind": "controller"' in text and "ZeroDivisionError: in on_done" in text


def _wait_in_on_done(run_dir: str) -> int:
    def main(transport: Transport) -> None:
        def on_done(replies: Any) -> None:
            transport.submit(Call(2, "compute", "a.second", everywhere, 60.0)).result()

        everywhere = to_all(transport, {"operation": "note"})
        transport.submit(Call(1, "compute", "a.first", everywhere, 60.0), on_done).result()

    return run_session(main, operations, settings_for(Path(run_dir)))


def test_waiting_inside_on_done_is_an_error_and_no_deadlock(tmp_path: Path) -> None:
    outcomes = watch_ranks(_wait_in_on_done, 2, str(tmp_path))

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "a.second: its result was asked for" in (tmp_path / "failure.json").read_text()


def _work_after_the_script(run_dir: str) -> list[str]:
    seen: list[str] = []

    def main(transport: Transport) -> None:
        def on_done(replies: Any) -> None:
            transport.post(lambda: seen.append("posted"))
            second = Call(2, "compute", "a.note", everywhere, 60.0)
            transport.submit(second, lambda _: seen.append("done"))

        everywhere = to_all(transport, {"operation": "note", "sleep": 0.2})
        transport.submit(Call(1, "compute", "a.note", everywhere, 60.0), on_done)

    run_session(main, operations, settings_for(Path(run_dir)))
    return seen


def test_orders_that_the_script_did_not_wait_for_are_done_before_the_end(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    assert spawn_ranks(_work_after_the_script, 2, str(tmp_path)) == [["posted", "done"], []]


def _exit_in_script(run_dir: str, code: int | None) -> int:
    return run_session(lambda transport: sys.exit(code), operations, settings_for(Path(run_dir)))


def test_script_that_calls_exit_with_0_ends_the_run_well(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    assert spawn_ranks(_exit_in_script, 2, str(tmp_path), 0) == [0, 0]


def test_script_that_calls_exit_with_a_status_fails_the_run(tmp_path: Path) -> None:
    outcomes = watch_ranks(_exit_in_script, 2, str(tmp_path), 3)

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "SystemExit: 3" in (tmp_path / "failure.json").read_text()


def _error_at_start(run_dir: str) -> int:
    def broken(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
        return {"a": 1 / rank} if rank == 0 else {}  # type: ignore[dict-item]

    return run_session(one_round, broken, settings_for(Path(run_dir)))


def test_error_while_a_rank_prepares_ends_the_run(tmp_path: Path) -> None:
    outcomes = watch_ranks(_error_at_start, 2, str(tmp_path))

    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "ZeroDivisionError" in (tmp_path / "failure.json").read_text()


def _one_is_missing(run_dir: str) -> str:
    settings = SessionSettings(run_dir=Path(run_dir), ranks=(0, 1), start_seconds=2.0)
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(DeadlineError) as caught:
            run_session(one_round, operations, settings)
        text = str(caught.value)
    dist.barrier()  # the other one is there all the time
    return text


def test_rank_that_does_not_come_is_named_after_the_limit(
    spawn_ranks: Spawn, tmp_path: Path
) -> None:
    text = spawn_ranks(_one_is_missing, 2, str(tmp_path))[0]

    waited = re.search(r"ranks \[1\] did not arrive within (\d+) s", text)
    assert waited and int(waited[1]) >= 2, text  # a busy machine looks later
    assert "run.start_seconds (now 2)" in text
