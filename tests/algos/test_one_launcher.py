"""`spmdflow run` and `spmdflow sweep` as a user starts them: what is on the screen, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdflow import run
from spmdflow.tracking.reading import RunFiles, RunState
from tests.algos.runs import LIMIT, ROOT, SMALL, ranks_of, steps_of

NOISE = ("torch.distributed.elastic", "child error file", "OMP_NUM_THREADS", "W1", "Traceback")
SHORT = (*SMALL, "total_steps=1", "eval_every=0", "run.save_last=true")


def spmdflow(*words: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, "-m", "spmdflow", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=ROOT,
        env=variables | {"PYTHONPATH": str(ROOT)},
    )


def test_run_of_two_ranks_prints_our_lines_only_and_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "-n", "2", "ppo", *SHORT, f"run.dir={tmp_path / 'run'}")

    done = spmdflow(*words)

    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert not any(noise in text for noise in NOISE), text
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1]

    assert run.main(["--inproc", *words[3:]]) == 0

    said = capsys.readouterr()
    assert "already finished" in said.out
    assert "building" not in said.err, "models were built"
    assert not (tmp_path / "run" / "metrics.1.jsonl").exists()


@pytest.mark.drill
def test_run_that_fails_says_so_once_and_has_the_ranks_exit_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, response, row):\n    return 1 / 0\n")
    reward = f"reward.function={tmp_path}/mine.py:score"

    done = spmdflow("run", "-n", "2", "ppo", *SHORT, reward, f"run.dir={tmp_path / 'run'}")

    assert done.returncode == 1
    text = done.stdout + done.stderr
    assert text.count("raised ZeroDivisionError: division by zero") == 1, text
    assert "torch.distributed" not in text and "child error file" not in text
    assert json.loads((tmp_path / "run" / "failure.json").read_text())["cause"]
    assert ranks_of(tmp_path / "run") == []


@pytest.mark.drill
def test_sweep_goes_on_after_a_failure_ends_with_the_table_and_is_resumed(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text((ROOT / "algos" / "ppo.py").read_text())
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(prompt, response, row, *, fails=False):\n"
        "    if fails:\n        raise ValueError('as it was asked')\n    return len(response)\n"
    )
    functions = ",".join(f"{reward}:score(fails={value})" for value in ("True", "False"))
    words = (
        *("sweep", "-n", "2", str(script), str(ROOT / "algos" / "ppo.yaml"), *SHORT),
        *(f"reward.function={functions}", f"run.dir={tmp_path / 'sweep'}"),
    )

    done = spmdflow(*words)

    states = {path.name[:3]: RunFiles(path).run_state for path in (tmp_path / "sweep").iterdir()}
    assert states == {"001": RunState.FAILED, "002": RunState.FINISHED}
    assert done.returncode == 1
    *_, failed, finished = done.stdout.splitlines()
    assert " failed " in failed and " finished " in finished
    heads = done.stdout.splitlines()[-3].split()
    assert heads[:4] == ["run", "state", "steps", "function"] and "reward/mean" in heads

    reward.write_text("def score(prompt, response, row, *, fails=False):\n    return 1.0\n")
    again = spmdflow(*words)

    assert again.returncode == 0, again.stderr
    assert "run 2 of 2: 002-function=" in again.stdout and "has finished" in again.stdout
    assert again.stdout.count(" finished ") == 2
