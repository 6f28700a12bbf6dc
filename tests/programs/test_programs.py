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
    replies = [[reply.to, text_of(reply)] for reply in program.replies]
    (folder / "replies.json").write_text(json.dumps(replies))
    python = python_of(program)
    if any(reply.guided for reply in program.replies):
        pytest.importorskip("xgrammar")
    if program.environment == "mcp":
        pytest.importorskip("mcp")
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

    results = sorted((tmp_path / "results").glob("*/result.json"))
    assert len(results) == NUM_EPISODES, said_by(tmp_path / "results")
    for file in results:
        assert json.loads(file.read_text()) == program.result
    size = len(program.segments)
    assert len(rows["scores"]) == NUM_EPISODES * size
    for start in range(0, NUM_EPISODES * size, size):
        segments = []
        for index in range(start, start + size):
            segments.append({name: values[index] for name, values in rows.items()})
        assert [row["num_turns"] for row in segments] == [len(each) for each in program.segments]
        for row, expected in zip(segments, program.segments, strict=True):
            check_row(row, [program.replies[index] for index in expected], model)
        scores = list(program.scores) or [1.0] * size
        assert [row["scores"] for row in segments] == scores


def said_by(results: Path) -> str:
    """The end of what the programs wrote."""
    return "\n".join(file.read_text()[-3000:] for file in results.glob("*/stderr.txt"))


def check_row(row: dict[str, Any], replies: list[Reply], model: Path) -> None:
    """A segment's row has the sampled ids of these replies, and learns them and nothing else.

    A guided reply may have tokens that the grammar forced, which are not learnt either. The
    generator's log-probabilities are the trainer's: both are float32, of other shapes.
    """
    tokenizer = load_tokenizer(str(model))
    ids = row["responses"]
    mask = row["response_mask"]
    position = 0
    for reply in replies:
        said = tokenizer(text_of(reply), add_special_tokens=False).input_ids
        if not reply.is_stopped:
            said.append(tokenizer.eos_token_id)
        start = place_of(said, ids, position)
        stop = start + len(said)
        assert not any(mask[position:start])
        assert any(mask[start:stop]) if reply.guided else all(mask[start:stop])
        position = stop
    assert position == len(ids)
    assert place_of(tokenizer("assistant\n").input_ids, row["prompts"], 0) >= 0
    for is_sampled, drawn, computed in zip(
        mask, row["rollout_log_probs"], row["old_log_probs"], strict=True
    ):
        if is_sampled:
            assert drawn == pytest.approx(computed, abs=1e-5)
        else:
            assert drawn == 0.0


def place_of(part: list[int], ids: list[int], start: int) -> int:
    """Where the part begins among the ids from `start` on. Fails if it is not there."""
    for place in range(start, len(ids) - len(part) + 1):
        if ids[place : place + len(part)] == part:
            return place
    raise AssertionError(f"{part} is not in {ids[start:]}")
