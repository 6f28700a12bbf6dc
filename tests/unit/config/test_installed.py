"""Bundled scripts are found by name from any folder; a broken installation is named as such."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.config.source import bundled_folder, bundled_scripts, find_bundled
from spmdflow.errors import ConfigError
from spmdflow.renamed import GONE_NAMES

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def python(*words: str, path: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
    program = [sys.executable, *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.parametrize("name", ["ppo", "ppo.py", "algos/ppo.py", "algos/ppo"])
def test_bundled_script_is_found_by_name_with_its_settings_and_data(name: str) -> None:
    loaded = load(name, None, ["total_steps=3"])

    check(loaded.cfg, 2)
    assert loaded.cfg.total_steps == 3
    assert loaded.cfg.data.train_path == str(bundled_folder() / "arithmetic" / "train.jsonl")
    assert loaded.script.__file__ == str(bundled_folder() / "ppo.py")


def test_every_bundled_script_is_listed() -> None:
    assert bundled_scripts() == sorted(path.stem for path in (REPOSITORY / "algos").glob("*.py"))


def test_local_script_wins_over_a_bundled_one() -> None:
    Path("ppo.py").write_text("def main(flow, cfg): pass\n")
    text = (bundled_folder() / "ppo.yaml").read_text()
    Path("ppo.yaml").write_text(text.replace("total_steps: 40", "total_steps: 7"))

    loaded = load("ppo.py", None, [])

    assert loaded.cfg.total_steps == 7
    assert Path(loaded.script.__file__ or "").resolve() == Path("ppo.py").resolve()


def test_own_yaml_goes_with_a_bundled_script_and_reaches_the_bundled_data() -> None:
    text = (bundled_folder() / "grpo.yaml").read_text()
    Path("mine.yaml").write_text(text.replace("name: grpo", "name: mine"))

    cfg = load("grpo", "mine.yaml", []).cfg

    check(cfg, 1)
    assert cfg.run.name == "mine"
    assert cfg.actor.model.path == str(bundled_folder() / "arithmetic" / "model")


def test_local_data_wins_over_bundled_data() -> None:
    text = (bundled_folder() / "grpo.yaml").read_text()
    Path("mine.yaml").write_text(text)
    Path("arithmetic").mkdir()
    Path("arithmetic/train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    cfg = load("grpo", "mine.yaml", []).cfg

    assert cfg.data.train_path == "arithmetic/train.jsonl"


def test_bundled_names_work_on_the_command_line_as_in_a_yaml() -> None:
    words = ["actor.model.path=arithmetic/model", "data.train_path=arithmetic/train.jsonl"]

    cfg = load("grpo", None, words).cfg

    assert cfg.actor.model.path == str(find_bundled("arithmetic/model"))
    assert cfg.data.train_path == str(find_bundled("arithmetic/train.jsonl"))


def test_bundled_yaml_is_found_by_name() -> None:
    Path("mine.py").write_text(
        "from spmdflow import GRPOConfig\ndef main(flow, cfg: GRPOConfig): 0\n"
    )

    assert load("mine.py", "algos/grpo.yaml", []).cfg.run.name == "grpo"
    assert load("mine.py", "grpo.yaml", []).cfg.run.name == "grpo"


def test_unknown_script_is_refused_with_the_names_of_the_bundled_ones() -> None:
    with pytest.raises(ConfigError, match=r"no file gpro in .*\(dapo, .*, sft\); nearest is grpo"):
        load("gpro", None, [])


@pytest.mark.parametrize("name", ["/algos/ppo.py", "../algos/ppo.py", ".", "algos", "other/ppo.py"])
def test_only_names_below_the_bundled_folder_are_bundled(name: str) -> None:
    assert find_bundled(name, ".py") is None


def test_missing_module_of_ours_is_called_a_broken_installation(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "spmdflow", tmp_path / "spmdflow")
    shutil.copytree(REPOSITORY / "algos", tmp_path / "spmdflow" / "algos")
    (tmp_path / "spmdflow" / "controller" / "flow.py").unlink()

    program = (  # an editable installation fills the gap: without its finder
        "import sys; sys.meta_path = [item for item in sys.meta_path if '_Edit' not in str(item)]\n"
        "from spmdflow.run import main; sys.exit(main(['ppo', '--inproc']))"
    )
    done = python("-c", program, path=tmp_path)

    assert done.returncode == 2
    assert "No module named 'spmdflow.controller.flow'" in done.stderr
    assert f"spmdflow: installation: {tmp_path}/spmdflow is incomplete" in done.stderr
    assert "install spmdflow again" in done.stderr
    assert "script:" not in done.stderr


def test_missing_library_of_ours_is_not_blamed_on_the_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from spmdflow import ActorWorker\n")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from spmdflow.run import main; sys.exit(main(['mine.py', '--inproc']))"
    )

    done = python("-c", program)

    assert done.returncode == 2
    assert "spmdflow: installation: " in done.stderr
    assert "expected torch next to spmdflow; install it (" in done.stderr


def test_missing_library_of_the_script_is_blamed_on_the_script() -> None:
    Path("mine.py").write_text("import spmdflow\nimport no_such_thing\n")

    with pytest.raises(ConfigError, match=r"^script: mine\.py cannot be imported: .*no_such_thing"):
        load("mine.py", None, [])


@pytest.mark.parametrize(("name", "now"), GONE_NAMES.items())
def test_public_name_of_before_is_refused_with_what_replaces_it(name: str, now: str) -> None:
    Path("mine.py").write_text(f"from spmdflow import {name}\n")

    with pytest.raises(ConfigError) as caught:
        load("mine.py", None, [])

    assert f"spmdflow.{name} is gone since 0.2.0; use {now}" in str(caught.value)


def test_unknown_public_name_is_blamed_on_the_script() -> None:
    Path("mine.py").write_text("from spmdflow import Nothing\n")

    with pytest.raises(ConfigError, match=r"^script: mine\.py cannot be imported: ImportError"):
        load("mine.py", None, [])
