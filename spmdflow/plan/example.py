"""Placeholders for values that only a run knows: kinds of columns, examples, lengths of prompts.

Examples come from `--assume NAME=VALUE`, from the section `assume` of the configuration, from
`flow.assume(...)` in the script, or from a short table of the columns that the built-in algorithms
read. The first of these that has an example wins. The plan reports every example that it used.

A column that no built-in role writes is declared by `flow.assume(name="float32 like responses")`,
or by example texts if it is a text column. Otherwise it is taken as one float32 per row. Prompts
are as long as in the data file if that is there and small, otherwise as long as the settings allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmdflow.config.data_source import data_sources, split_location
from spmdflow.config.schema import DataSettings
from spmdflow.data.column import ColumnSpec
from spmdflow.data.ragged import VALID
from spmdflow.datasets.scan import ScanReport, scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import PlanError, SpmdflowError

PROMPTS = "prompts"
RESPONSES = "responses"
ROWS = "rows"
"""In a form: as long as prompt and response together."""
SEGMENTS = "segments"
"""In a form: one item for each segment of an episode. An example of this name says how many; 1
without."""
TOOL_TEXT = "tool_text"
TEXT_BYTES_PER_TOKEN = 4
"""Bytes of text that one token decodes to, where no run says otherwise (an assumption)."""


@dataclass(frozen=True)
class ColumnForm:
    """Kind and dtype of a column, and what determines the length of its rows."""

    spec: ColumnSpec
    like: str = ""
    """The column whose rows have the same lengths: prompts or responses, or `ROWS` or `SEGMENTS`;
    empty if dense."""
    items_per_token: int = 1
    """Items of a row for each item of the column it is like (for text: bytes)."""


def form_of(name: str, text: str) -> ColumnForm:
    """Parse a declaration: "float32", "int64[3]", "float32 like responses" or "text".

    A column is dense without "like", otherwise ragged with the lengths of prompts, responses or
    rows (both together).
    Text is like responses unless it says otherwise, with four bytes per token. Raises PlanError for
    anything else. name: of the column, for the message.
    """
    head, _, like = text.partition(" like ")
    dtype, _, shape = head.strip().rstrip("]").partition("[")
    extents = []
    for part in shape.split(","):
        if part.strip():
            extents.append(part.strip())
    is_text = dtype == "text"
    like = like.strip()
    dtype = "uint8" if is_text else dtype
    known = isinstance(getattr(torch, dtype, None), torch.dtype)
    is_like = like in ("", PROMPTS, RESPONSES, ROWS, SEGMENTS)
    if not known or not all(extent.isdigit() for extent in extents) or not is_like:
        expected = "a dtype with an optional shape and length, such as 'float32', "
        expected += "'int64[3]', 'float32 like responses' or 'text like prompts'"
        raise PlanError.of(
            f"assume {name}", repr(text), expected, f"write flow.assume({name}='float32')"
        )
    row_shape = tuple(map(int, extents))
    if is_text:
        return ColumnForm(
            ColumnSpec("text", dtype, row_shape), like or RESPONSES, TEXT_BYTES_PER_TOKEN
        )
    return ColumnForm(ColumnSpec("ragged" if like else "dense", dtype, row_shape), like)


_FORMS = {
    "int64 like prompts": "prompts pretrain_ids",
    "bool like prompts": "loss_mask",
    "text like prompts": "prompt_text row score_terms tool_calls",
    "int64 like rows": "segment_tokens",
    "int64 like segments": "segment_prompt_lengths segment_lengths segment_turns segment_names",
    "float32 like segments": "segment_scores segment_weights",
    "text like rows": "segment_texts",
    "int64 like responses": "responses",
    "bool like responses": "response_mask covariant segment_mask",
    "text like responses": "response_text tool_text",
    "float32 like responses": "rollout_log_probs old_log_probs ref_log_probs values cost_values "
    "token_level_rewards token_level_costs advantages returns cost_returns rollout_weights "
    "squared_probs segment_log_probs segment_rewards",
    "int32 like responses": "token_versions segment_versions",
    "float32": "scores costs baseline_scores reference_kl pretrain_losses losses margins "
    "row_weights",
    "float32[2]": "ref_answer_log_probs",
    "int64": "chosen_tokens num_turns weights_version",
    "bool": "valid cost_valid",
}
KNOWN = {name: form_of(name, text) for text, names in _FORMS.items() for name in names.split()}
"""Columns of the built-in roles."""
UNKNOWN = form_of("", "float32")
"""Form of a column that is not declared. The plan reports such columns."""
JSON_COLUMNS = {"row", "score_terms"}
"""Text columns that hold an object as JSON, which an evaluation reads."""
_BUILT_IN: dict[str, Any] = {"scores": (0.0, 1.0), "costs": 0.0, "reference_kl": 0.01}
"""Scores differ within every group of samples, so that dynamic sampling keeps all prompts."""


class Examples:
    """Declared values by name: of columns, metrics, and results of calls as "group.method"."""

    def __init__(
        self,
        declared: Mapping[str, Any],
        longest: Mapping[str, int],
        *,
        is_replayed: bool = False,
    ) -> None:
        """declared: examples that override the script's. longest: tokens of prompts and responses
        without an example. is_replayed: metrics come from a run, so reading one uses no example.
        """
        self._is_replayed = is_replayed
        self.longest = longest
        self._overruling = dict(declared)
        self._declared = dict(declared)
        self.used: dict[str, Any] = {}
        """Examples that the script read, or that determined a length."""
        self.guessed: set[str] = set()
        """Columns that are read but not declared."""

    def add(self, declared: Mapping[str, Any]) -> None:
        """Add the script's examples. Those of the configuration and the command line win."""
        self._declared |= {**declared, **self._overruling}

    def form(self, name: str) -> ColumnForm:
        """Return the form of a column: declared, then built-in, then one float32 per row.

        A list of example texts declares a text column like responses. A column that is neither
        declared nor built-in is noted in `guessed`.
        """
        declared = self._declared.get(name)
        if isinstance(declared, str):
            return form_of(name, declared)
        if _is_texts(declared):
            return form_of(name, "text")
        if name not in KNOWN:
            self.guessed.add(name)
        return KNOWN.get(name, UNKNOWN)

    def texts(self, name: str, ids: np.ndarray) -> list[str] | None:
        """Return an example text for each row id, or None if no texts are declared for the column.

        Row r gets text r modulo their number. Notes the example as used.
        """
        declared = self._declared.get(name, ())
        if not _is_texts(declared):
            return None
        self.used[name] = declared
        result = []
        for row in ids.tolist():
            result.append(declared[row % len(declared)])
        return result

    def tokens(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return (n,) int64: the tokens of the rows `ids` of prompts or responses.

        For `SEGMENTS`: their number of segments. The example is one number, or a list from which
        row r takes item r modulo its length. Notes it as used. Without an example, every row has
        the longest length, and one segment.
        """
        declared = self._declared.get(name)
        if declared is None or isinstance(declared, str):
            longest = 1 if name == SEGMENTS else self.longest[name]
            return np.full(len(ids), longest, dtype=np.int64)
        self.used[name] = declared
        return _in_turn(name, declared, ids).astype(np.int64)

    def values(self, name: str, ids: np.ndarray, stored: str = "") -> np.ndarray:
        """Return (n,) float64: example values of a dense column. Notes the example as used.

        A declared example goes before a built-in one, and `name` before `stored`, the column's name
        before it was renamed. Raises PlanError if there is none. No row fails in a dry run, so
        `valid` and `cost_valid` are 1 without an example.
        """
        if (stored or name) in VALID:
            return np.ones(len(ids))
        known = _BUILT_IN | self._declared
        declared = known.get(name, known.get(stored))
        if declared is None or isinstance(declared, str):
            raise PlanError(
                f"reads the column {name!r}, whose values only a run knows; expected an example; "
                f"write flow.assume({name}=0.5) at the top of main, or add --assume {name}=0.5"
            )
        self.used[name] = declared
        return _in_turn(name, declared, ids)

    def metrics(self) -> dict[str, float]:
        """Return the declared numbers that are no built-in columns. Every call reports them all."""
        result = {}
        for name, value in self._declared.items():
            if isinstance(value, int | float) and name not in KNOWN:
                result[name] = float(value)
        return result

    def use(self, names: Iterable[str]) -> None:
        """Note that the script read these metrics, for the list of examples used."""
        declared = {} if self._is_replayed else self.metrics()
        self.used.update({name: self._declared[name] for name in names if name in declared})

    def answer(self, label: str) -> Any:
        """Return the declared result of a call "group.method"; without one, the declared metrics.

        Notes a declared result as used. Any: whatever the script's method returns.
        """
        if label in self._declared:
            self.used[label] = self._declared[label]
            return self._declared[label]
        return self.metrics()

    def used_text(self) -> list[str]:
        """Return "name = value" for each example that was used, sorted by name."""
        result = []
        for name, value in sorted(self.used.items()):
            result.append(f"{name} = {value}")
        return result


def _is_texts(declared: Any) -> bool:
    """Whether what a user declared is a list of texts."""
    return (
        isinstance(declared, list | tuple)
        and len(declared) > 0
        and all(isinstance(text, str) for text in declared)
    )


def _in_turn(name: str, declared: Any, ids: np.ndarray) -> np.ndarray:
    """Return (n,) float64: the declared number for every row, or the items of a list in turn.

    The row with id r gets item r modulo the length. Raises PlanError for anything else, or for an
    empty list. Any: what a user declared.
    """
    if isinstance(declared, int | float):
        return np.full(len(ids), float(declared))
    values = declared.tolist() if isinstance(declared, np.ndarray) else declared
    values = values if isinstance(values, Sequence) else ()
    if not values or not all(isinstance(value, int | float) for value in values):
        where = f"assume {name}"
        do = f"write {name}=0.5 or {name}=[0, 1]"
        raise PlanError.of(where, repr(declared), "a number or a list of numbers", do)
    numbers = np.asarray(values, dtype=np.float64)
    return numbers[ids % len(numbers)]


SMALL_FILE_BYTES = 4 << 20
"""Largest file that is tokenised (about two seconds). For larger files lengths are assumed."""
ASSUMED_ROWS = 1 << 12
"""Rows assumed for a file that is not read. Their number does not change a step."""


def scan_or_assume(
    data: DataSettings, setting: object, *, read_data: bool
) -> tuple[ScanReport, str]:
    """Return (scan of a file or a mixture, sentence that says whether lengths are real or assumed).

    The files are scanned as rank 0 would scan them. If read_data is False, a file is missing or
    cannot be read, or the files together exceed 4 MiB, the report instead assumes at least 4096
    rows, all of data.max_prompt_tokens.
    setting: data.train_path or data.eval_path.
    """
    sources = data_sources("data", setting)
    files = []
    for source in sources:
        files.append(Path(split_location(source.location)[0]))
    path = " + ".join(source.location for source in sources)
    why = "it is not here" if not all(file.exists() for file in files) else ""
    if not why and not read_data:
        why = "data are not read"
    if not why and sum(map(_num_bytes, files)) > SMALL_FILE_BYTES:
        why = f"it has more than {SMALL_FILE_BYTES >> 20} MiB"
    if not why:
        try:
            report = scan(data, setting, load_tokenizer(data.tokenizer_path))
            return report, f"prompts of {path}: {len(report.rows)} rows, their own lengths"
        except SpmdflowError as err:
            why = f"it cannot be read here ({err})"
    longest = data.max_prompt_tokens
    held_out = data.eval_prompts or 0
    count = max(ASSUMED_ROWS, data.prompts_per_step, held_out)
    rows = np.arange(count, dtype=np.int64)
    lengths = np.full(count, longest, dtype=np.int32)
    report = ScanReport(path, 0, count, rows, lengths, 0, longest, [], fingerprint="")
    if data.rows != "prompts":  # of each sequence, all but the first token
        sequences = 2 if data.rows == "pairs" else 1
        report = replace(report, answer_lengths=np.maximum(lengths - sequences, 0))
    return report, f"prompts of {path}: {longest} tokens each, as {why}"


def _num_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
