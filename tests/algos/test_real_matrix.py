"""Every case of scripts/real_matrix.py runs, or is refused as docs/lab/real_model.json says.

Slow: an hour and a half. Seconds and memory are only measured by the script, on an idle machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.matrix.case import MODEL, Case
from scripts.matrix.start import ROOT, perform
from scripts.matrix.table import CASES
from tests.smollm2 import needs_smollm2

pytestmark = [
    pytest.mark.slow,
    needs_smollm2,
    pytest.mark.skipif("SPMDFLOW_DATA" not in os.environ, reason="needs SPMDFLOW_DATA"),
    pytest.mark.skipif(
        not (ROOT / MODEL / "config.json").is_file(), reason=f"scripts/make_smollm2.py {MODEL}"
    ),
]
STATE = ROOT / "docs" / "lab" / "real_model.json"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cases run; the problems that they read are made first."""
    dialogues = str(Path(os.environ["SPMDFLOW_DATA"]) / "hh-rlhf")
    commands = [["make_dialogues.py", dialogues, "problems"]]
    for kind in ("sums", "products"):
        commands.append(["make_problems.py", kind, "problems"])
    for name, *words in commands:
        subprocess.run([sys.executable, f"scripts/{name}", *words], cwd=ROOT, check=True)
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_runs_or_is_refused_as_the_page_says(case: Case, runs: Path) -> None:
    known = {record["name"]: record for record in json.loads(STATE.read_text())}

    record = perform(case, runs, None)

    assert record["state"] == known[case.name]["state"], record.get("text")
