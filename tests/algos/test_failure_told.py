"""What a user reads when a run fails: the cause once, lines of their own code, where more is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmdflow import launch
from tests.algos.runs import SCRIPT, log_of, run_ranks
from tests.unit.view.page import Page

REWARD = """
def score(prompt, response, row):
    return helper(response)


def helper(response):
    return 1 / (len(response) - len(response))
"""
WORKER = """
from spmdflow import ActorWorker, PPOConfig, register


class MyActor(ActorWorker):
    @register(transfer_mode="3D_PROTO", reads=("responses",), writes=("mine",))
    def mine(self, batch):
        raise ValueError("my own method raises")


def main(flow, cfg: PPOConfig):
    actor = flow.spawn(MyActor, cfg.actor)
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        MINE
"""
CALL = "batch = actor.mine(batch)"
LINE = '{}["nothing"]'


def told(run_dir: Path, script: Path, *settings: str) -> list[str]:
    """Lines that the run wrote from the failure on, without torchrun's own."""
    run_ranks(run_dir, *settings, num_ranks=2, script=script, status=1)
    log = log_of(run_dir).read_text()
    assert "ERROR" not in log.partition("RUN FAILED")[0], "the report tells it, once"
    return log.partition("=" * 88)[2].partition("=" * 88)[0].strip().splitlines()


def own_script(folder: Path, line: str) -> Path:
    """A script whose step ends with that line, and PPO's settings."""
    path = folder / "own.py"
    path.write_text(WORKER.replace("MINE", line))
    settings = SCRIPT.with_suffix(".yaml").read_text()
    folder = SCRIPT.parent / "arithmetic"
    path.with_suffix(".yaml").write_text(settings.replace("arithmetic/", f"{folder}/"))
    return path


def test_reward_function_that_raises_is_told_once_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)

    reward = f"reward.function={tmp_path}/mine.py:score"
    lines = told(tmp_path / "run", SCRIPT, reward, "eval_every=0", "run.view=true")

    text = "\n".join(lines)
    assert len(lines) <= 20, text
    assert text.count("return 1 / (len(response) - len(response))") == 1
    assert text.count("raised ZeroDivisionError: division by zero") == 1
    assert f"called at {SCRIPT}:" in text and "batch |= reward.compute_reward(batch)" in text
    assert "spmdflow/rewards/pool.py" not in text, "internals are in failure.json"
    record = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert "spmdflow/rewards/pool.py" in record["traceback"]
    (run,) = Page(tmp_path / "run" / "view.html").runs
    assert run["failures"]["failure.json"]["cause"] == record["cause"]
    assert not run["live"] and {"stacks-rank0.txt", "stacks-rank1.txt"} <= {*run["stacks"]}


def test_failure_in_one_process_is_raised_and_told_in_the_file_and_on_the_page(
    tmp_path: Path,
) -> None:
    script = own_script(tmp_path, "")
    script.write_text(
        'from spmdflow import PPOConfig\n\n\ndef main(flow, cfg: PPOConfig):\n    flow["nothing"]\n'
    )
    run_dir = tmp_path / "run"
    settings = [f"run.dir={run_dir}", "run.view=true", "eval_every=0"]

    with pytest.raises(TypeError, match="not subscriptable"):
        launch(script, settings=settings, inproc=True)

    record = json.loads((run_dir / "failure.json").read_text())
    assert record["kind"] == "script" and record["cause"].startswith("TypeError")
    assert 'flow["nothing"]' in record["own_traceback"]
    (run,) = Page(run_dir / "view.html").runs
    assert run["failures"] == {"failure.json": record}


@pytest.mark.drill
def test_failure_of_the_evaluation_before_step_1_names_the_line_that_asked_for_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)

    lines = told(tmp_path / "run", SCRIPT, f"reward.function={tmp_path}/mine.py:score")

    (line,) = [line for line in lines if line.startswith("called at ")]
    assert line.startswith(f"called at {SCRIPT}:") and "flow.evaluate(" in line
    assert line.endswith("for the evaluation before step 1")


@pytest.mark.drill
def test_worker_method_that_raises_is_told_with_its_line_and_the_line_that_called(
    tmp_path: Path,
) -> None:
    script = own_script(tmp_path, CALL)

    lines = told(tmp_path / "run", script, "eval_every=0")

    assert lines[0].endswith("compute lane): ValueError: my own method raises")
    assert lines[1].startswith(f"called at {script}:") and lines[1].endswith(CALL)
    assert f'File "{script}", line 8, in mine' in lines[2]
    assert lines[3].strip() == 'raise ValueError("my own method raises")'
    assert "spmdflow/controller" not in "".join(lines) and len(lines) <= 6, lines


@pytest.mark.slow
def test_line_of_the_script_that_raises_is_told_with_itself(tmp_path: Path) -> None:
    script = own_script(tmp_path, LINE)

    lines = told(tmp_path / "run", script, "eval_every=0")

    assert lines[0] == "RUN FAILED: rank 0: KeyError: 'nothing'"
    assert f'File "{script}", line 16, in main' in lines[1] and lines[2].strip() == LINE
    assert len(lines) <= 5, lines
