"""`spmdflow COMMAND`: the list, the dispatch, the refusals; `spmdflow doctor` on this machine."""

from __future__ import annotations

import configparser
import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import spmdflow
from spmdflow.__main__ import COMMANDS, main
from spmdflow.config.source import bundled_scripts
from spmdflow.doctor import ABSENT, BAD, GOOD, Check, node
from spmdflow.doctor.__main__ import can_run, checks_text
from spmdflow.doctor.__main__ import main as doctor
from spmdflow.doctor.packages import NEEDED_FOR, check_packages

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help_lists_every_command_with_a_phrase_and_every_script(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0

    text = capsys.readouterr().out
    assert [
        name for name, (_, phrase) in COMMANDS.items() if f"{name:<8} {phrase}" not in text
    ] == []
    assert [name for name in bundled_scripts() if name not in text] == []


def test_output_that_its_reader_closes_ends_the_command_without_a_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    line = f"{sys.executable} -m spmdflow report {tmp_path} | true; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)

    assert done.stderr == ""
    assert done.returncode == 0


def test_commands_are_dispatched_with_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "no-such-folder"]) == 2
    assert "report: no-such-folder/metrics.jsonl is not there" in capsys.readouterr().err
    assert main(["run"]) == 2
    assert "got no SCRIPT" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main_that_takes_words(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name][0]).main)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("pln", "did you mean plan?"),
        ("grpo", "start scripts with spmdflow run grpo"),
        ("xyz", "spmdflow --help describes the commands"),
    ],
)
def test_unknown_command_is_refused_with_the_nearest(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2

    names = ", ".join(COMMANDS)
    expected = f"spmdflow: command line: got {word!r}, expected a command ({names}); {hint}\n"
    assert capsys.readouterr().err == expected


def test_version_is_one_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    assert capsys.readouterr().out == f"spmdflow {spmdflow.__version__}\n"
    assert "version = attr: spmdflow.__version__" in (REPOSITORY / "setup.cfg").read_text()


def test_dir_shows_the_public_names_and_no_private_one() -> None:
    shown = [name for name in dir(spmdflow) if not name.startswith("__")]

    assert shown == sorted(spmdflow.__all__)
    assert "__version__" in dir(spmdflow)


def test_doctor_says_that_this_machine_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert doctor(["--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    names = {check["name"]: check for check in found["checks"]}
    assert found["can_run"] is True
    assert names["torch"]["found"].startswith(metadata.version("torch"))
    assert names["TCPStore"]["state"] == names["loopback"]["state"] == GOOD
    assert names["writable"]["found"] == str(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert set(NEEDED_FOR) <= set(names)


def test_doctor_finds_no_fault_of_its_own_where_everything_is_missing(tmp_path: Path) -> None:
    """Without torch and packaging, no folder that can be written: three lines say so, status 1."""
    program = (
        "import sys\n"
        "for name in ('torch', 'packaging.requirements', 'numpy'): sys.modules[name] = None\n"
        "from spmdflow.doctor.__main__ import main\n"
        "sys.exit(main(['--run-dir', '/proc/nowhere']))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )

    assert (done.returncode, done.stderr) == (1, "")
    assert "a run cannot work here: see imports, torch, writable" in done.stdout


def test_doctor_names_a_package_that_does_not_fit_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchcodec.py").write_text("raise RuntimeError('no operator nms')\n")
    (tmp_path / "torchcodec-0.9.dist-info").mkdir()
    (tmp_path / "torchcodec-0.9.dist-info" / "METADATA").write_text(
        "Name: torchcodec\nVersion: 0.9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    (found,) = [check for check in check_packages() if check.name == "torchcodec"]

    assert found.state == BAD
    assert found.result == "0.9 cannot be imported: no operator nms"
    assert found.advice.endswith("pip uninstall torchcodec")


def test_doctor_names_every_extra_that_users_have_and_its_purpose() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")

    extras = [name for name in setup["options.extras_require"] if name not in ("docs", "dev")]
    assert list(NEEDED_FOR) == extras


def test_doctor_report_says_what_is_absent_and_what_is_bad() -> None:
    fine = [Check("a", "first", GOOD, "here"), Check("b", "extra", ABSENT, "not", "get it")]

    assert can_run(fine)
    assert "can work here, without the extras extra\n" in checks_text(fine)
    assert not can_run([*fine, Check("b", "last", BAD, "gone")])


def test_file_system_of_a_folder_is_found() -> None:
    assert node.file_system(Path("/proc")) == "proc"
    assert node.file_system(Path("/dev/shm")) == "tmpfs"


def test_folder_on_a_shared_file_system_is_told_from_a_local_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {} rw,x shared:1 - nfs4 host:/x rw\n"
    monkeypatch.setattr(node, "_read_or_empty", lambda path: mounts.format(tmp_path))

    shared = node.check_run_dir(tmp_path)[-1]
    local = node.check_run_dir(tmp_path.parent)[-1]

    assert shared.result == "nfs4, which nodes can share"
    assert local.result == "ext4, which looks node-local"
