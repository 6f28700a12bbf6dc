"""Twelve programs with their defaults play episodes: what they get, and what is recorded of them.

Each runs unmodified in a virtual environment of its own, against a real run. What the model says is
scripted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_program_environments as environments
import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.datasets.tokenizer import load_tokenizer
from tests.programs.model_folder import MOST_TOKENS, make_model
from tests.programs.table import PROGRAMS, Program, Reply

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
NUM_EPISODES = 2
"""Of each program, at the same time: a group."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def python_of(program: Program) -> str:
    """The Python of the program's environment; skips where that is missing or has other pins."""
    folder = environments.default_folder() / program.environment
    pins = environments.REQUIREMENTS / f"{program.environment}.txt"
    if not environments.is_complete(folder, pins.read_text(encoding="utf-8")):
        command = f"python scripts/make_program_environments.py {program.environment}"
        pytest.skip(f"{folder} is missing or has other pins; run {command}")
    return str(folder / "bin" / "python")


def text_of(reply: Reply) -> str:
    """What the model writes."""
    if reply.thought:
        return f"<think>\n{reply.thought}\n</think>\n\n{reply.says}"
    return reply.says


def run(program: Program, model: Path, folder: Path) -> dict[str, Any]:
    """Runs one step with episodes of the program; returns the recorded rows."""
    replies = [[reply.to, reply.where, text_of(reply)] for reply in program.replies]
    (folder / "replies.json").write_text(json.dumps(replies))
    python = python_of(program)
    results = folder / "results"
    results.mkdir()
    row = {
        "prompt": program.prompt,
        "python": python,
        "program": f"{program.name}.py",
        "variables": program.variables,
    }
    (folder / "rows.jsonl").write_text(json.dumps(row | {"folder": str(results)}) + "\n")
    episode = program.episode.format(bin=Path(python).parent, here=HERE)
    words = [
        f"run.dir={folder / 'run'}",
        f"data.train_path={folder / 'rows.jsonl'}",
        "data.prompt_column=prompt",
        f"data.tokenizer_path={model}",
        f"data.max_prompt_tokens={MOST_TOKENS // 2}",
        "data.prompts_per_step=1",
        "data.samples_per_prompt=2",
        f"actor.model.path={model}",
        "actor.rollout.engine=scripted",
        f"actor.rollout.replies_path={folder / 'replies.json'}",
        f"actor.rollout.max_new_tokens={MOST_TOKENS // 2}",
        f'actor.rollout.episode.environment="{episode}"',
        "actor.rollout.episode.on_error=raise",
        "actor.update.mini_batch_size=2",
        "actor.update.old_log_probs=recompute",
        "total_steps=1",
        "eval_every=0",
        "save_every=0",
        "run.save_last=false",
        *program.settings,
    ]
    loaded = load(HERE / "run_program.py", None, words)
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    result: dict[str, Any] = json.loads((folder / "run" / "recorded.json").read_text())
    return result


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_runs_with_its_defaults_and_is_recorded(
    program: Program, model: Path, tmp_path: Path
) -> None:
    rows = run(program, model, tmp_path)

    for folder in (tmp_path / "results").iterdir():
        for name in ("stderr.txt", "result.json"):
            if (folder / name).exists():
                print(name, (folder / name).read_text()[-6000:])
    tok = load_tokenizer(str(model))
    for p, r, m in zip(rows["prompts"], rows["responses"], rows["response_mask"]):
        print("=====ROW", sum(m), len(m))
        print(tok.decode(p))
        print("----")
        print(tok.decode(r))
