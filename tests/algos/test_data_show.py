"""`spmdflow data show RUN_DIR`: the rows that a run trained on, episodes among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from torch import Tensor

from spmdflow.checkpoint.rows import read_rows
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import rows_of
from spmdflow.datasets.tokenizer import load_tokenizer, token_texts
from spmdflow.preview.__main__ import main
from spmdflow.preview.text import token_text
from tests.algos.runs import FEW_SUMS, ROOT, steps_of

ONE_STEP = (
    "total_steps=1",
    "data.prompts_per_step=8",
    "data.samples_per_prompt=2",
    "actor.update.mini_batch_size=16",
    "save_every=0",
    "run.save_last=false",
    "run.capture_step=1",
    "run.sample_every=1",
)


def run(folder: Path, script: str, *settings: str) -> Path:
    words = [*ONE_STEP, *settings, f"run.dir={folder / 'run'}"]
    loaded = load(ROOT / "algos" / script, None, words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums with a limit that cuts off three digits, and an evaluation in the kept step."""
    own = ("actor.rollout.max_new_tokens=3", "eval_every=1", "data.eval_prompts=4")
    return run(tmp_path_factory.mktemp("sums"), "grpo.py", *FEW_SUMS, *own)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("games"), "grpo_agent.py", "eval_every=0")


def kept(run_dir: Path, column: str, label: str) -> list[list[int]]:
    """The first rows of a column of the kept step, as its call made it."""
    columns = read_rows(run_dir / "capsules" / "step-1" / "rows.safetensors")
    name = next(name for name in columns if name.split(" ")[1:] == [label, column])
    values = columns[name]
    assert isinstance(values, Tensor)
    return [row.tolist() for row in rows_of(values)]


def printed(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", str(run_dir), "--plain", *words]) == 0
    return capsys.readouterr().out


def marks_in(text: str) -> list[list[tuple[str, bool]]]:
    """(token, is trained) of each row of plain output."""
    rows: list[list[tuple[str, bool]]] = []
    for line in text.splitlines():
        if line.startswith("row "):
            rows.append([])
        elif line[2:].split(" ")[0] in ("prompt", "response", "read") and rows:
            rows[-1] += [(token, line[0] == ">") for token in line.split()[1 + (line[0] == ">") :]]
    return rows


def test_episodes_are_shown_with_the_tokens_that_the_policy_chose(
    games: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = "actor.run_episodes"
    tokenizer = load_tokenizer(str(ROOT / "algos" / "guess" / "model"))

    text = printed(games, capsys, "--rows", "4")

    rows = marks_in(text)
    columns = [kept(games, name, label) for name in ("prompts", "responses", "response_mask")]
    assert len(rows) == 4
    for shown, (prompt, response, mask) in zip(rows, zip(*columns), strict=False):
        texts = token_texts(tokenizer, prompt + response)
        assert [token for token, _ in shown] == [token_text(each) for each in texts]
        assert [is_trained for _, is_trained in shown] == [False] * len(prompt) + mask
    assert f"{games}/capsules/step-1: map.take_segments" in text
    assert {"> response", "  read    "} <= {line[:10] for line in text.splitlines()}


def test_responses_that_were_cut_off_have_no_end_and_are_counted(
    sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A response of three tokens without the end of sequence was cut off by the limit."""
    rows = marks_in(printed(sums, capsys, "--rows", "99"))

    responses = kept(sums, "responses", "actor.generate_sequences")
    ends = [[token for token, is_trained in row if is_trained][-1] == "<eos>" for row in rows]
    assert len(rows) == len(responses) == 16  # held-out rows are not among them
    assert {len(response) for response in responses} <= {2, 3}
    assert 0 < sum(ends) < 16
    (step,) = [step for step in steps_of(sums) if step["step"] == 1]
    assert step["rollout/truncated"] == pytest.approx(1 - sum(ends) / 16)


def test_samples_show_the_texts_of_a_run_that_kept_no_step(
    games: Path, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (games, sums):
        (tmp_path / source.parent.name).mkdir()
        for name in ("samples.jsonl", "config.yaml"):
            shutil.copy(source / name, tmp_path / source.parent.name)
    lines = (games / "samples.jsonl").read_text().splitlines()
    sample = next(each for each in map(json.loads, lines) if each["phase"] == "train")

    text = printed(tmp_path / games.parent.name, capsys, "--rows", "1")
    of_sums = printed(tmp_path / sums.parent.name, capsys, "--rows", "16")

    (shown,) = marks_in(text)
    tokens = shown[len(sample["prompt"].split()) :]  # the prompt's text comes first
    (line,) = [line for line in text.splitlines() if line.startswith("  prompt ")]
    assert line == f"  prompt      {sample['prompt']}"
    count = len(sample["lengths"])
    said = sample["response"].replace(" ", "\u00b7")
    assert "".join(token for token, _ in tokens[:count]) == said
    assert [is_trained for _, is_trained in tokens[:count]] == [x == "1" for x in sample["mask"]]
    assert "run.capture_step=1 keeps the tokens" in " ".join(of_sums.split())
    assert "<?>" in of_sums  # the end of sequence


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the run has neither a kept step nor samples of responses"),
        ([{"step": 1, "prompt": "1+1=", "response": "2", "score": 1}], "nor samples of responses"),
    ],
    ids=["nothing", "samples of an early version"],
)
def test_run_without_recorded_responses_is_refused_with_what_to_do(
    lines: list[dict[str, object]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.yaml").write_text("data: {}\n")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "samples.jsonl").write_text(text)

    assert main(["show", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"spmdflow: {tmp_path}: ") and message in error
    assert "start it with run.capture_step=1, or name its script" in error


def test_kept_step_of_rows_with_answers_points_to_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for word in ONE_STEP if "samples_per_prompt" not in word]
    settings += ["data.prompts_per_step=16", "eval_every=0", f"run.dir={tmp_path / 'run'}"]
    loaded = load(ROOT / "algos" / "sft.py", None, settings)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    assert main(["show", str(tmp_path / "run")]) == 2

    assert "the step generated no responses" in capsys.readouterr().err
