"""The rows of a script's data sections as a run reads them, and what else a user asks about them.

The file is scanned and its rows are encoded by `datasets.scan`, as at the start of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from spmdflow.config.algorithm import TextConfig
from spmdflow.config.episode import EpisodeConfig
from spmdflow.config.leaf import parts_of
from spmdflow.config.offline import HeldOutConfig, RewardModelConfig
from spmdflow.config.schema import DataSettings, RolloutConfig
from spmdflow.data.ragged import is_ragged, rows_of
from spmdflow.datasets.scan import PromptSource, ScanReport, report_of, scan_files
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.preview.row import ShownRow, cut_parts, pair_parts, tokens_of
from spmdflow.rollout.forward import end_tokens

_TEXTS = "texts"
_SCORED_PAIRS = "scored pairs"
_HELD_OUT = "held-out prompts"
_FACTS = {
    "prompts": "A row is a prompt. The policy generates the response, whose tokens are trained.",
    "examples": "A row is an example. Its answers are trained.",
    _HELD_OUT: "A row is a prompt. The model generates the response, which is scored. Nothing is "
    "trained.",
    "pairs": "A row is the prompt with the chosen answer, then with the rejected one, so the "
    "prompt's tokens count twice. Both answers are trained.",
    _SCORED_PAIRS: "A row is the prompt with the chosen answer, then with the rejected one, so the "
    "prompt's tokens count twice. The loss compares the scores after the last tokens of both. It "
    "predicts no token.",
    "labels": "A row is an answer with a label. The answer is trained.",
    _TEXTS: "A row is a text. All its tokens but the first one are trained.",
}
"""Kind of rows -> what a row is."""


@dataclass(frozen=True)
class Section:
    """What is shown of one data section."""

    title: str
    facts: tuple[str, ...]
    rows: tuple[ShownRow, ...]
    counts: tuple[str, ...]
    """What the scan of the files counted."""


def sections_of(cfg: Any, num_rows: int) -> Iterator[Section]:
    """Yield every data section of a script's settings, with the first good rows of each source.

    Reads the complete files, as a run does. DataError and ConfigError as at the start of a run.
    num_rows: rows of each source. Any: an object of the script's settings class.
    """
    for key, data in parts_of(cfg, DataSettings):
        name, setting = data.shown_source
        if setting is None:
            continue
        tokenizer = load_tokenizer(data.tokenizer_path)
        scans = scan_files(data, setting, tokenizer)
        report = report_of(scans)
        numbers = first_rows(report, num_rows)
        batch = PromptSource(report.files, data).read_rows(numbers)
        columns = {}
        for column in map(str, batch.keys()):
            columns[column] = _rows_of_column(batch[column])
        kind = _kind_of(cfg, data)
        rows = []
        for position, number in enumerate(numbers):
            title = f"row {position + 1}, {_location(report, data, number)}"
            row = {column: values[position] for column, values in columns.items()}
            rows.append(_shown_row(title, row, kind, tokenizer))
        yield Section(
            f"{key}.{name}, with the tokenizer of {data.tokenizer_path}",
            (
                _FACTS[kind],
                f"A row of more than {key}.max_prompt_tokens={data.max_prompt_tokens} tokens is "
                f"omitted.",
                *_response_facts(cfg, kind, tokenizer),
            ),
            tuple(rows),
            tuple(_counts(report, [each.first_too_long() for each in scans])),
        )


def first_rows(report: ScanReport, num_rows: int) -> list[int]:
    """Return the numbers of the first good rows of each source of a scan, num_rows of each."""
    sources = report.file_of(report.rows)
    numbers: list[int] = []
    for source in range(len(report.files)):
        numbers += report.rows[np.flatnonzero(sources == source)[:num_rows]].tolist()
    return numbers


def _location(report: ScanReport, data: DataSettings, number: int) -> str:
    """Return "FILE:LINE" of a row, with the number of its answer if a line becomes several rows."""
    file = report.files[int(report.file_of([number])[0])]
    line, text = divmod(number - file.first, data.texts_per_line)
    name = f"{file.name}: " if file.name else ""
    location = f"{name}{Path(file.location).name}:{line + 1}"
    if data.texts_per_line > 1:
        return f"{location}, answer {text + 1}"
    return location


def _kind_of(cfg: Any, data: DataSettings) -> str:
    """Return the kind of a section's rows, a key of _FACTS."""
    if isinstance(data, TextConfig):
        return _TEXTS
    if isinstance(data, HeldOutConfig):
        return _HELD_OUT
    if data.rows == "pairs" and any(parts_of(cfg, RewardModelConfig)):
        return _SCORED_PAIRS
    return data.rows


def _rows_of_column(values: Any) -> list[Any]:
    """Return a column's rows as plain data: a list of ids or marks, a number, or a text."""
    if is_ragged(values):
        return [row.tolist() for row in rows_of(values)]
    return list(values.tolist()) if isinstance(values, Tensor) else list(values)


def _shown_row(title: str, row: Mapping[str, Any], kind: str, tokenizer: Any) -> ShownRow:
    """Return a row to show. Any: a transformers tokenizer.

    row: the values of its columns, as plain data. kind: a key of _FACTS.
    """
    tokens = tokens_of(tokenizer, row["prompts"])
    count = len(tokens)
    mask = row.get("loss_mask", [False] * count)
    if kind == _TEXTS:
        mask = [position > 0 for position in range(count)]
    if kind in ("pairs", _SCORED_PAIRS):
        cut = row["chosen_tokens"]
        parts = pair_parts(tokens, mask, chosen_tokens=cut, is_trained=kind == "pairs")
        return ShownRow(title, count, tuple(parts))
    parts = cut_parts(tokens, mask, read="prompt", trained="answer")
    notes = []
    if kind in ("prompts", _HELD_OUT):
        notes.append(("row", row["row"]))
    if kind == "labels":
        notes.append(("label", json.dumps(row["desirable"])))
    return ShownRow(title, count, tuple(parts), tuple(notes))


def _response_facts(cfg: Any, kind: str, tokenizer: Any) -> Iterator[str]:
    """Yield sentences about responses: where they begin, what ends them, and how long they are.

    Nothing for a script without an actor, such as one for reward models. kind: of the rows. Any: an
    object of the script's settings class, and a transformers tokenizer.
    """
    actor = getattr(cfg, "actor", None)
    path = getattr(getattr(actor, "model", None), "path", None)
    rollout = getattr(actor, "rollout", None)
    if path is None:
        return
    ends = _end_texts(path, tokenizer)
    if kind not in ("prompts", _HELD_OUT) or not isinstance(rollout, RolloutConfig):
        yield f"The model of {path} ends a response with {ends}."
        return
    if isinstance(getattr(rollout, "episode", None), EpisodeConfig):
        yield (
            "The environment gets a prompt as text and talks to the policy. What the policy reads "
            "and says exists only in a run: keep a step of it with run.capture_step=1, then "
            "spmdflow data show RUN_DIR shows it."
        )
        where = "A reply"
    else:
        where = "A response begins after the last token of its prompt. It"
    limit = f"actor.rollout.max_new_tokens={rollout.max_new_tokens}"
    yield f"{where} ends with {ends}, which is part of it, or is cut off after {limit} tokens."


def _end_texts(path: str, tokenizer: Any) -> str:
    """Return the tokens that end a response of a model, as "TEXT (ID) or ...".

    Any: a transformers tokenizer.
    """
    if not (Path(path) / "config.json").is_file():
        return f"a token that is not known here ({path} has no config.json)"
    ends = end_tokens(path)
    if not ends:
        return f"no token ({path} names no eos_token_id)"
    texts: Sequence[str] = tokenizer.convert_ids_to_tokens(list(ends))
    return " or ".join(f"{text} ({number})" for text, number in zip(texts, ends, strict=True))


def _counts(report: ScanReport, too_long: Sequence[str]) -> Iterator[str]:
    """Yield what the scan counted: good rows, then those that are too long or cannot be read.

    too_long: the first row of each source that is too long; "" of a source without one.
    """
    yield report.describe()
    for row in filter(None, too_long):
        yield f"the first that is too long: {row}"
    if report.bad_rows:
        yield f"the first that is unreadable: {report.bad_rows[0]}"
