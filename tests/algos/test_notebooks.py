"""docs/notebooks: every code cell runs, in its order, and says what the text promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.algos.runs import LIMIT

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"


def cells_of(path: Path) -> list[str]:
    """Code of the cells; a notebook is kept without results."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    return ["".join(cell["source"]) for cell in cells]


def run(path: Path, folder: Path) -> list[str]:
    """Lines that the cells print, run one after another in a process of their own."""
    program = f"space = {{}}\nfor cell in {cells_of(path)!r}:\n    exec(cell, space)\n"
    more = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("own_algorithm", marks=pytest.mark.drill),
        pytest.param("quickstart", marks=pytest.mark.slow),
    ],
)
def test_every_cell_runs_and_what_it_asserts_holds(name: str, tmp_path: Path) -> None:
    lines = run(NOTEBOOKS / f"{name}.ipynb", tmp_path)

    steps = [line for line in lines if line.split(" ")[0].isdigit() and "reward/mean" in line]
    assert len(steps) >= 4, lines


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.iterdir()} == {"own_algorithm", "quickstart"}
