"""Rows that a run recorded: tokens of a step that it kept, otherwise texts of samples.jsonl.

A step that a run kept (run.capture_step, controller/capsule.py) has the token ids and the mask of
every row. samples.jsonl has the characters that each token of a response shows, so a token without
any, such as a special one, cannot be told from another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from spmdflow.checkpoint.rows import read_rows
from spmdflow.controller.capsule import FACTS, FOLDER, ROWS
from spmdflow.data.ragged import is_ragged, lengths_of, rows_of
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import DataError
from spmdflow.preview.row import Part, ShownRow, Token, cut_parts, tokens_of
from spmdflow.preview.section import Section
from spmdflow.tracking.reading import RunFiles, read_json

_NO_TEXT = Token("<?>", is_special=True)
_READ = "read"
_TRAINED = "response"
_MEANING = (
    "A row is a prompt and what followed it. The tokens that the policy chose are trained. All "
    "others, such as those of an environment or a tool, are only read."
)
_WITHOUT_IDS = (
    "These are texts: a prompt is not cut into tokens, and <?> is a special token or a part of a "
    "character. A run with run.capture_step=1 keeps the tokens of its first step."
)


def recorded_rows(run_dir: Path, num_rows: int) -> Section:
    """Return the rows of the last step that a run kept, otherwise those of its last samples.

    DataError if the run has neither, or they have no responses. num_rows: largest number of rows.
    """
    run = RunFiles(run_dir)
    capsules = sorted(run_dir.glob(f"{FOLDER}/step-*/{FACTS}"), key=_step_of)
    if capsules:
        return _kept_section(run, capsules[-1].parent, num_rows)
    return _samples_section(run, num_rows)


def _step_of(path: Path) -> int:
    """The step of a file in a capsule's folder, which is named step-N."""
    return int(path.parent.name.partition("-")[2])


@dataclass(frozen=True)
class _KeptColumn:
    """A column that a call of a kept step made."""

    call: int
    """Number of the call in its step."""
    label: str
    """Name of the call."""
    name: str
    values: Tensor

    def has_shape_of(self, other: _KeptColumn) -> bool:
        """Whether both are ragged columns with rows of the same lengths."""
        if not (is_ragged(self.values) and is_ragged(other.values)):
            return False
        return lengths_of(self.values).tolist() == lengths_of(other.values).tolist()


def _kept_section(run: RunFiles, capsule: Path, num_rows: int) -> Section:
    """Return the first rows of a kept step; DataError if the step generated no responses."""
    columns = _training_columns(capsule)
    responses = _trained_responses(columns)
    if responses is None:
        raise DataError(
            f"{capsule}: the step generated no responses, so there is no row to show; name the "
            f"script instead, as in spmdflow data show sft"
        )
    count = len(responses.values)
    masks = []
    prompts = []
    scores = []
    for column in columns:
        if column.name == "response_mask" and column.has_shape_of(responses):
            masks.append(column.values)
        if column.name == "prompts" and column.call <= responses.call:
            prompts.append(column.values)
        if column.name == "scores" and len(column.values) == count:
            scores.append(column.values.tolist())
    tokenizer = load_tokenizer(str(run.settings.get("data.tokenizer_path")))
    rows = []
    for number, ids in enumerate(rows_of(responses.values)[:num_rows]):
        prompt = rows_of(prompts[-1])[number].tolist()
        tokens = tokens_of(tokenizer, prompt + ids.tolist())
        mask = rows_of(masks[-1])[number].tolist()
        parts = [Part("prompt", False, tuple(tokens[: len(prompt)]))]
        parts += cut_parts(tokens[len(prompt) :], mask, read=_READ, trained=_TRAINED)
        notes = [("score", f"{values[number]:g}") for values in scores[-1:]]
        title = f"row {number + 1} of {count}"
        rows.append(ShownRow(title, len(tokens), tuple(parts), tuple(notes)))
    return Section(f"{capsule}: {responses.label}", (_MEANING,), tuple(rows), ())


def _training_columns(capsule: Path) -> list[_KeptColumn]:
    """Return the columns that the calls of a kept step made, but for those of its evaluation."""
    calls = read_json(capsule / FACTS).get("calls", [])
    columns = []
    for key, values in read_rows(capsule / ROWS).items():
        number, label, name = key.split(" ", 2)
        if calls[int(number)][1] == "train" and isinstance(values, Tensor):
            columns.append(_KeptColumn(int(number), label, name, values))
    return columns


def _trained_responses(columns: Sequence[_KeptColumn]) -> _KeptColumn | None:
    """Return the responses that were trained on: the last ones that have an advantage each token.

    Without any of these, as when rows were dropped, the first responses; None if there are none.
    """
    responses = [column for column in columns if column.name == "responses"]
    advantages = [column for column in columns if column.name == "advantages"]
    fitting = []
    for column in responses:
        if any(column.has_shape_of(each) for each in advantages):
            fitting.append(column)
    return next(iter([*fitting[-1:], *responses]), None)


def _samples_section(run: RunFiles, num_rows: int) -> Section:
    """Return rows of the last step of samples.jsonl; DataError if no sample has tokens."""
    samples = []
    for sample in run.samples:
        if sample.get("lengths") and sample.get("phase") == "train":
            samples.append(sample)
    if not samples:
        raise DataError(
            f"{run.path}: the run has neither a kept step nor samples of responses, so there is no "
            f"row to show; start it with run.capture_step=1, or name its script instead"
        )
    step = samples[-1]["step"]
    rows: list[ShownRow] = []
    for sample in [each for each in samples if each["step"] == step][:num_rows]:
        rows.append(_sample_row(f"row {len(rows) + 1}", sample))
    title = f"{run.path}/samples.jsonl: step {step}"
    return Section(title, (_MEANING, _WITHOUT_IDS), tuple(rows), ())


def _sample_row(title: str, sample: Mapping[str, Any]) -> ShownRow:
    """Return the response of a line of samples.jsonl (`tracking.progress.Sample`) as a row."""
    tokens = []
    start = 0
    for length in sample["lengths"]:
        text = sample["response"][start : start + length]
        tokens.append(Token(text) if text else _NO_TEXT)
        start += length
    mask = [digit == "1" for digit in sample.get("mask", "1" * len(tokens))]
    parts = cut_parts(tokens, mask, read=_READ, trained=_TRAINED)
    notes = (("score", f"{sample['score']}"),)
    prompt = (("prompt", sample["prompt"]),)
    return ShownRow(title, len(tokens), tuple(parts), notes, prompt)
