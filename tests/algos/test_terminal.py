"""Ctrl-C on a real terminal, and a terminal that is closed: the running step is saved."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.algos.runs import LIMIT, ROOT, ranks_of, steps_of
from tests.algos.terminal import CTRL_C, Terminal

SCRIPT = Path(__file__).parent / "programs" / "long_step.py"
TASK = ROOT / "algos" / "arithmetic"
SETTINGS = (
    f"actor.model.path={TASK / 'model'}",
    f"data.train_path={TASK / 'train.jsonl'}",
    "data.max_prompt_tokens=16",
    "actor.rollout.max_new_tokens=8",
    "eval_every=0",
    "save_every=1000000",
    "total_steps=1000000",
    "run.sample_every=0",
)
TORCHRUN = ("torch.distributed.run", "--standalone")
RUN = ("-m", "spmdflow.run")
LAUNCHERS = {
    "torchrun, 1 rank": (*TORCHRUN, "--nproc-per-node=1", *RUN),
    "torchrun, 2 ranks": (*TORCHRUN, "--nproc-per-node=2", *RUN),
    "one process": ("spmdflow", "run", "--inproc"),
}
AGAIN = "press Ctrl-C again to stop at once"

Open = Callable[..., Terminal]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Starts the run on a terminal of its own; RUN_DIR is tmp_path/run."""
    terminals: list[Terminal] = []

    def start(launcher: Sequence[str], *settings: str) -> Terminal:
        command = [sys.executable, "-m", *launcher, str(SCRIPT), f"run.dir={tmp_path / 'run'}"]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        terminal = Terminal([*command, *SETTINGS, *settings], folder=ROOT, variables=variables)
        terminals.append(terminal)
        return terminal

    yield start
    for terminal in terminals:
        terminal.close()
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)


def step_is_held(run_dir: Path, step: int) -> Callable[[], bool]:
    return (run_dir / f"step-{step}-is-under-way").exists


def wait_for(terminal: Terminal, condition: Callable[[], bool]) -> None:
    """The output of a run that does not get there is shown."""
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit and terminal.process.poll() is None, terminal.text()
        time.sleep(0.01)


def ended(terminal: Terminal, run_dir: Path) -> int:
    """The status of the run, of which no process is left."""
    status = terminal.process.wait(LIMIT)
    while ranks_of(run_dir):
        time.sleep(0.01)
    return status


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun, 1 rank", marks=pytest.mark.drill),
        pytest.param("torchrun, 2 ranks", marks=pytest.mark.slow),
        pytest.param("one process", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_and_then_a_closed_terminal_save_the_step_that_is_under_way(
    launcher: str, opened: Open, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = opened(LAUNCHERS[launcher])
    wait_for(first, step_is_held(run_dir, 1))
    first.press(CTRL_C)
    wait_for(first, lambda: AGAIN in first.text())
    (run_dir / "go-on").touch()

    status = ended(first, run_dir)

    assert "asked to end by Ctrl-C (SIGINT): saving after this step" in first.text()
    assert "stopped after step 1; it is checkpointed" in first.text(), first.text()
    assert status == (3 if launcher == "one process" else 1), "torchrun makes 1 of all others"
    assert latest(run_dir) == "step-1"
    assert not (run_dir / "failure.json").exists()

    second = opened(LAUNCHERS[launcher])
    wait_for(second, step_is_held(run_dir, 3))
    assert "continuing after step 1" in second.text()
    second.close()
    ended(second, run_dir)

    last = steps_of(run_dir)[-1]["step"]
    assert latest(run_dir) == f"step-{last}" and last >= 3
    assert not (run_dir / "failure.json").exists()


@pytest.mark.slow  # tests/unit/runtime/test_stop.py has it without a terminal
@pytest.mark.parametrize("launcher", ["torchrun, 2 ranks", "one process"])
def test_second_ctrl_c_does_not_wait_for_the_step(
    launcher: str, opened: Open, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    terminal = opened(LAUNCHERS[launcher])
    wait_for(terminal, step_is_held(run_dir, 1))
    terminal.press(CTRL_C)
    wait_for(terminal, lambda: AGAIN in terminal.text())

    terminal.press(CTRL_C)

    assert ended(terminal, run_dir) not in (0, 3), terminal.text()
    assert json.loads((run_dir / "failure.json").read_text())["kind"] == "interrupt"
    assert not (run_dir / "checkpoints" / "latest").exists()


@pytest.mark.slow
def test_step_of_20_s_is_saved_before_torchrun_would_kill_its_ranks(
    opened: Open, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    terminal = opened(LAUNCHERS["torchrun, 2 ranks"], "waiter.seconds=20", "save_every=100")
    wait_for(terminal, step_is_held(run_dir, 1))
    terminal.press(CTRL_C)

    ended(terminal, run_dir)

    assert "stopped after step 1; it is checkpointed" in terminal.text(), terminal.text()
    assert latest(run_dir) == "step-1"


def latest(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "latest").read_text().strip()
