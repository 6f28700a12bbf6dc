"""`spmdflow run`: what it refuses before torchrun starts and without torch, and what it becomes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spmdflow import run, start
from spmdflow.errors import ConfigError
from tests.unit.config_folder import write_config_folder

ROOT = Path(__file__).parents[2]
TORCHLESS = """
import sys
sys.modules["torch"] = None
from spmdflow.start import main
sys.exit(main(sys.argv[1:], become=lambda program, words: print(*words[1:])))
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid configuration in the current directory, outside of torchrun."""
    write_config_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def program_of(*words: str) -> list[str]:
    programs: list[list[str]] = []
    assert start.main(words, become=lambda _, program: programs.append(program)) == run.FINISHED
    (program,) = programs
    return program


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TORCHLESS, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_it_becomes_torchrun_with_the_ranks_that_run_the_script() -> None:
    program = program_of("-n", "2", "ppo.py", "total_steps=3", "run.dir=here")

    assert program[:4] == [sys.executable, "-m", "spmdflow.torchrun", "here"]
    ranks = program.index("-m", 4)
    assert program[ranks:] == ["-m", "spmdflow.run", "ppo.py", "total_steps=3", "run.dir=here"]
    launcher = program[4:ranks]
    assert "--standalone" in launcher
    assert launcher[-4:] == ["--nnodes", "1", "--nproc-per-node", "2"]


def test_metrics_port_in_use_is_refused_before_torchrun_unless_there_may_be_other_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ("-n", "2", "ppo.py", f"run.metrics_port={port}")

        assert start.main(words, become=lambda _, program: None) == run.REFUSED
        assert f"run.metrics_port: got {port} on 127.0.0.1" in capsys.readouterr().err
        assert program_of(*words, "--nnodes", "2", "--", "--rdzv-endpoint", "a:1")


def test_words_after_two_dashes_are_torchruns() -> None:
    program = program_of(
        *("-n=2", "--nnodes", "1:4", "ppo.py", "--", "--rdzv-endpoint", "a:1", "--max-restarts=3")
    )

    assert "--standalone" not in program
    assert program[4:7] == ["--rdzv-endpoint", "a:1", "--max-restarts=3"]
    assert program[program.index("--nnodes") + 1] == "1:4"
    assert program[-1] == "ppo.py"


@pytest.mark.parametrize(
    ("words", "variable", "seconds"),
    [
        ((), None, "600"),
        (("--", "--shutdown-timeout=60"), None, None),
        ((), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", None),
    ],
)
def test_ranks_have_ten_minutes_to_save_unless_it_is_set(
    words: tuple[str, ...],
    variable: str | None,
    seconds: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "version", lambda _: "2.13.0+cpu")
    if variable:
        monkeypatch.setenv(variable, "90")

    program = program_of("ppo.py", *words)

    if seconds is None:
        assert "--shutdown-timeout" not in program
    else:
        assert program[program.index("--shutdown-timeout") + 1] == seconds
    monkeypatch.setattr(start, "version", lambda _: "2.12.1")
    assert "--shutdown-timeout" not in program_of("ppo.py", *words)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("-n", "two", "ppo.py"), ["-n two", "a number of ranks", "-n 4"]),
        (("-n", "0", "ppo.py"), ["-n 0", "a number of ranks"]),
        (("ppo.py", "-n"), ["got -n", "a number of ranks"]),
        (("--nnodes", "2", "ppo.py"), ["--nnodes 2", "--rdzv-endpoint", "HOST:29500"]),
        (("--nnodes=2:", "ppo.py"), ["--nnodes 2:", "a number of nodes"]),
        (("-n", "2"), ["no SCRIPT", "--help"]),
        (("ppo.py", "--max-restarts=3"), ["--max-restarts=3", "after --"]),
        (("pp0.py",), ["pp0.py", "nearest is ppo.py"]),
        (("ppo.py", "mine.yaml"), ["mine.yaml"]),
        (("ppo.py", "total_stepz=1"), ["total_stepz", "total_steps"]),
        (("ppo.py", "total_steps=many"), ["'many'", "int"]),
        (("ppo.py", "actor.model.path=nowhere"), ["nowhere"]),
        (("ppo.py", "reward.function=nowhere.py:f"), ["nowhere.py"]),
        (("ppo.py", "placement=slpit"), ["slpit"]),
        (
            ("-n", "3", "ppo.py", "actor.engine.kind=megatron", "actor.engine.layout=t2"),
            ["t2p1 = 2 ranks a replica", "pool of 3"],
        ),
    ],
)
def test_mistakes_are_refused_once_before_torchrun_starts(
    words: tuple[str, ...], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status = start.main(words, become=lambda *_: pytest.fail("torchrun was started"))

    said = capsys.readouterr().err
    assert status == run.REFUSED
    assert said.count("spmdflow: ") == 1
    for part in parts:
        assert part in said


@pytest.mark.parametrize("script", ["ppo.py", "grpo", "dapo", "evaluate"])
def test_check_imports_no_torch(script: str) -> None:
    refused = without_torch("-n", "2", script, "total_stepz=1")

    assert refused.returncode == run.REFUSED
    assert "unknown key total_stepz" in refused.stderr


def test_check_of_a_whole_command_line_imports_no_torch() -> None:
    fine = without_torch("-n", "2", "ppo.py")

    assert fine.returncode == 0, fine.stderr
    assert "-m spmdflow.run ppo.py" in fine.stdout


def test_script_that_uses_a_worker_at_import_gets_the_real_class(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from spmdflow import ActorWorker, Flow, PPOConfig, map_function\n"
        "class Own(ActorWorker):\n    pass\n"
        "@map_function(reads=('scores',), writes=('twice',))\n"
        "def double(batch, *, reduce, report):\n    return batch\n"
        "def main(flow: Flow | None, cfg: PPOConfig) -> None:\n    pass\n"
    )
    program = (
        "from spmdflow.config.script import load_script, schema_of\n"
        "from spmdflow.deferred_name import deferring\n"
        f"with deferring():\n    script = load_script({str(script)!r})\n"
        "print(script.Own.__mro__[1].__name__, script.double.__name__, schema_of(script).__name__)"
    )

    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout

    assert shown.split() == ["ActorWorker", "double", "PPOConfig"]


def test_inside_of_torchrun_and_in_one_process_it_is_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "main", lambda words: calls.append(list(words)) or 7)

    assert start.main(["--inproc", "ppo.py"]) == 7
    monkeypatch.setenv("RANK", "1")
    assert start.main(["ppo.py"]) == 7
    assert calls == [["--inproc", "ppo.py"], ["ppo.py"]]


@pytest.mark.parametrize(
    ("visible", "most"), [(None, 2), ("0,1,2", 2), ("1", 1), ("GPU-8a", 1), ("", 9), ("-1", 9)]
)
def test_more_ranks_than_gpus_are_refused_before_torchrun_starts(
    tmp_path: Path, visible: str | None, most: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    start.check_ranks(most, tmp_path, visible)
    if most < 9:
        with pytest.raises(ConfigError, match=rf"got -n {most + 1} on a node with {most} GPU"):
            start.check_ranks(most + 1, tmp_path, visible)


def test_number_of_ranks_is_that_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "num_gpus", lambda: 8)

    program = program_of("ppo.py", "data.prompts_per_step=64")

    assert program[program.index("--nproc-per-node") + 1] == "8"
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        start.torchrun_command(start.sort_command(["--nnodes=2", "ppo.py"]), Path("run"))
