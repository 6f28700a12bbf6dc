"""The command line of a rank: arguments, refusals, exit codes. Nothing here starts a run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from spmdflow import run
from spmdflow.errors import ConfigError
from tests.unit.config_folder import write_config_folder

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The valid folder as current directory, rank 0 of 4 in the environment, no waiting."""
    write_config_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "_SILENT_SECONDS", 0.0)


def test_words_are_sorted_into_script_config_overrides_and_flags() -> None:
    words = ["--inproc", "a.py", "b.yaml", "run.seed=1", "run.name=x.yaml"]

    arguments = run.parse_arguments(words)

    assert arguments.script == "a.py"
    assert arguments.config == "b.yaml"
    assert arguments.overrides == ("run.seed=1", "run.name=x.yaml")
    assert arguments.flags == {"inproc"}


def test_config_may_be_left_out() -> None:
    assert run.parse_arguments(["a.py", "run.seed=1"]).config is None


COMMAND_LINES = {
    "a.py b.yaml c.yaml": r"got 'c\.yaml', expected SCRIPT \[CONFIG\.yaml\] \[key=value \.\.\.\];",
    "a.py total_steps": r"got 'total_steps', expected SCRIPT .* write settings as key=value",
    "a.py --improc": r"got --improc, expected --help, -h, --inproc; did you mean --inproc\?",
}


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_line_that_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match=COMMAND_LINES[line]):
        run.parse_arguments(line.split())


def test_refusal_is_printed_by_the_first_rank_of_a_node_and_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run.main(["ppo.py", "actor.rollout.top_p=2"])

    assert status == 2
    assert capsys.readouterr().err == (
        "spmdflow: actor.rollout.top_p: got 2.0, expected at most 1; "
        "change it (Nucleus sampling; 1 keeps every token)\n"
    )


def test_metrics_port_in_use_is_refused_by_rank_0_before_ranks_meet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        assert run.main(["ppo.py", f"run.metrics_port={port}"]) == 2

    said = capsys.readouterr().err
    assert said.startswith(f"spmdflow: run.metrics_port: got {port} on 127.0.0.1 (Address already")
    assert "; set run.metrics_port to a free port" in said


def test_metrics_port_in_use_is_refused_again_if_torchrun_restarts_ranks_that_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        assert run.main(["ppo.py", f"run.metrics_port={port}"]) == 2


@pytest.mark.parametrize(
    ("variable", "value"), [("RANK", "3"), ("TORCHELASTIC_RESTART_COUNT", "1")]
)
def test_metrics_port_in_use_is_no_matter_on_other_ranks_and_to_a_run_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    environment = run.RankEnvironment.from_environment()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["ppo.py", f"run.metrics_port={port}", "run.dir=begun"]

        loaded = run.prepare_rank(run.parse_arguments(words), environment)

    assert loaded.cfg.run.metrics_port == port


def test_refusal_is_written_where_torchrun_looks_for_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    run.main(["ppo.py", "run.resume=maybe"])

    cause = json.loads((tmp_path / "error.json").read_text())["message"]  # torch's own format
    assert cause["message"].startswith("run.resume: got 'maybe', expected auto or never")
    assert int(cause["extraInfo"]["timestamp"]) > 0
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert failure.timestamp == int(cause["extraInfo"]["timestamp"])


def test_other_ranks_of_the_node_are_silent_about_the_same_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")

    status = run.main(["ppo.py", "actor.rollout.top_p=2"])

    assert status == 2
    assert capsys.readouterr() == ("", "")


def test_first_rank_of_another_node_names_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")

    run.main(["ppo.py", "actor.model.path=only-on-node-0"])

    assert capsys.readouterr().err.startswith("spmdflow: rank 2: actor.model.path: no folder")


MISSING_PIECES = {
    "": "got no SCRIPT, expected one such as algos/ppo.py; --help shows the usage",
    "ppo.py --inproc": "got --inproc on 4 ranks, expected one process; start it without torchrun",
}


@pytest.mark.parametrize("line", MISSING_PIECES)
def test_missing_piece_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(line.split()) == 2
    assert MISSING_PIECES[line] in capsys.readouterr().err


def test_start_without_torchrun_is_refused_with_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "1")

    assert run.main(["ppo.py"]) == 2
    said = capsys.readouterr().err
    assert "not started by torchrun; use spmdflow run -n 4" in said
    assert "torchrun --standalone --nproc-per-node 4" in said and "--inproc" in said


def test_help_prints_usage_exit_codes_and_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    status = run.main(["ppo.py", "--help"])

    text = capsys.readouterr().out
    assert status == 0
    assert "usage: torchrun [...] -m spmdflow.run SCRIPT [CONFIG.yaml] [key=value ...]" in text
    assert (
        "Exit codes of a rank: 0 finished, 1 failed, 2 settings rejected, 3 stopped after" in text
    )
    assert "actor.rollout.top_p (float, default 1.0)\n    Nucleus sampling" in text


def test_standard_output_on_a_full_disk_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = run.main(["ppo.py", "--help"])
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()

    assert status == 2
    assert "standard output: got [Errno 28] No space left" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error_here_nor_in_processes_started_from_here(
    closed: str, tmp_path: Path
) -> None:
    child = "import sys; sys.stdin.fileno(); sys.stdout.write('a'); sys.stderr.write('b')"
    program = (
        "import subprocess, sys; from spmdflow.run import main\n"
        "status = main(['ppo.py', '--help'])\n"
        f"child = subprocess.run([sys.executable, '-c', {child!r}])\n"
        "print(status, child.returncode, file=open('statuses', 'w'))"
    )

    subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "", "RANK": "0"},
        stdin=subprocess.DEVNULL,
        timeout=600,
    )

    assert (tmp_path / "statuses").read_text() == "0 0\n"


def test_reader_of_standard_output_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)

    done = subprocess.run(
        [sys.executable, "-m", "spmdflow.run", "ppo.py", "--help"],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=600,
    )
    os.close(writing)

    assert (done.returncode, done.stderr) == (0, b"")


def test_refusal_needs_neither_torch_nor_a_process_group() -> None:
    program = (
        "import sys; from spmdflow.run import main\n"
        "status = main(['ppo.py', '--inproc', 'placement=split'])\n"
        "loaded = [name for name in ('torch', 'transformers', 'zmq') if name in sys.modules]\n"
        "print(status, loaded)"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert done.stdout == "2 []\n", done.stderr
    assert "split got 1 rank, expected at least 2" in done.stderr
