"""Which of many failures is the cause, and what is written about it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from spmdflow.errors import CheckpointError
from spmdflow.failure.cause import (
    Failure,
    error_context,
    failure_record,
    first_cause,
    print_report,
    write_failure,
)
from spmdflow.failure.process import Process, describe_status
from spmdflow.runtime.executor import failure_of
from spmdflow.runtime.session import remove_old_reports

DIED = Failure("death", 2, "process 9 killed by SIGKILL", "actor.update_actor", 8, "compute")
STOPPED = Failure("stopped", 1, "process 8 is stopped")
GLOO = Failure(
    "exception", 0, "RuntimeError: connection closed", "actor.update_actor", 8, "compute"
)
LATE = Failure("deadline", 3, "still running after its limit of 5 s")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([GLOO, DIED], DIED),
        ([DIED, GLOO], DIED),
        ([LATE, GLOO, STOPPED], STOPPED),
        ([STOPPED, DIED], DIED),
        ([GLOO, LATE], GLOO),
        ([LATE, GLOO], LATE),
    ],
)
def test_death_explains_a_stop_explains_what_ranks_say_and_then_the_first_counts(
    failures: list[Failure], cause: Failure
) -> None:
    assert first_cause(failures) is cause


def test_death_of_a_rank_that_had_reported_an_error_is_its_consequence() -> None:
    error = Failure("exception", 2, "ValueError: x")

    assert first_cause([error, DIED]) is error
    assert first_cause([GLOO, error, DIED]) is GLOO


def test_record_names_role_method_call_and_the_others() -> None:
    record = failure_record(DIED, [GLOO, DIED])

    assert list(record)[:3] == ["rank", "role", "method"]
    assert (record["rank"], record["role"], record["method"]) == (2, "actor", "update_actor")
    assert (record["call"], record["lane"], record["kind"]) == (8, "compute", "death")
    assert [other["rank"] for other in record["others"]] == [0]


def test_report_shows_place_cause_traceback_others_and_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = Failure(
        "exception",
        2,
        "ValueError: x\nprompt: y",
        *("actor.make", 3, "compute"),
        traceback="Traceback: all of it",
        own_traceback="  File own.py",
        line="own.py:7: actor.make()",
    )
    others = [Failure("exception", rank, "gone") for rank in (3, 5)]
    others += [
        Failure("exception", 4, "ValueError: x\nprompt: z"),
        Failure("death", 6, "gone " * 99),
    ]
    others += [Failure("exception", rank, f"reason {rank}") for rank in (7, 8)]

    print_report(error, [error, *others], tmp_path / "failure.json")

    text = capsys.readouterr().err
    assert text.splitlines()[2:-1] == [
        "RUN FAILED: rank 2, actor.make (call 3, compute lane): ValueError: x",
        "prompt: y",
        "called at own.py:7: actor.make()",
        "  File own.py",
        "also on rank 3, 5: gone",
        "also on rank 4: the same",
        f"also on rank 6: {'gone ' * 31}[...]",
        f"full tracebacks: {tmp_path}/failure.json; stacks: {tmp_path}/stacks-rank*.txt",
    ]


def test_failure_file_in_a_folder_that_cannot_be_made_is_no_second_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    write_failure(tmp_path / "file" / "failure.json", failure_record(DIED, []))
    write_failure(tmp_path / "gone" / "failure.json", failure_record(DIED, []))
    write_failure(tmp_path / "failure.json", failure_record(DIED, []))

    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 2
    assert not (tmp_path / "gone").exists()


def test_reports_of_an_earlier_start_are_removed_and_nothing_else(tmp_path: Path) -> None:
    old = [
        "failure.json",
        "failure-rank3.json",
        "stacks-rank0.txt",
        "stacks-rank0.nccl",
        "status.json",
    ]
    for name in [*old, "metrics.jsonl"]:
        (tmp_path / name).touch()

    remove_old_reports(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wait_status_is_told_as_signal_or_number() -> None:
    assert describe_status(9) == "killed by SIGKILL"
    assert describe_status(41) == "killed by signal 41", "Python has no name for it"
    assert describe_status(7 << 8) == "exited with status 7"


def test_this_process_is_alive_and_a_reused_pid_is_not_it() -> None:
    me = Process.of(os.getpid())
    before = Process(me.pid, me.start_ticks - 1, me.node)

    assert me.is_local() and not me.has_ended() and not me.is_stopped()
    assert before.has_ended() and not before.kill()


def test_process_of_another_machine_is_neither_seen_nor_killed() -> None:
    me = Process.of(os.getpid())
    elsewhere = Process(me.pid, me.start_ticks, "another machine")

    assert elsewhere.state() is None and not elsewhere.has_ended() and not elsewhere.kill()


def test_error_in_a_step_tells_what_was_done_and_in_which() -> None:
    with (
        pytest.raises(CheckpointError) as caught,
        error_context("ending step 4"),
        error_context("saving step 3"),
    ):
        raise CheckpointError("checkpoint: cannot write x: No space left on device")

    failure = failure_of(caught.value, 0, kind="script")
    cause = "CheckpointError: checkpoint: cannot write x: No space left on device"
    assert failure.cause == f"{cause}, while saving step 3, while ending step 4"
