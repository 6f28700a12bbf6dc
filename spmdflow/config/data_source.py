"""What `data.train_path` and `data.eval_path` say.

    train_path: train.jsonl                              a file of lines or Parquet
    train_path: openai/gsm8k:main/train                  a data set of the hub: config/split
    train_path: saved:train                              a folder of `datasets`, and its split
    train_path: openai/gsm8k:main/train(prompt=question) the file's column question is prompt here
    train_path:                                          a mixture: drawn 3 to 1
      sums: 3 * sums.jsonl
      gsm8k: openai/gsm8k:main/train(prompt=question)

The names of a mixture name its metrics, and every row has its own as `source`; null removes a
source. Opens no file, only looks whether paths exist.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spmdflow.errors import ConfigError
from spmdflow.requirement import install_command

FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Endings of files of rows; anything else is a folder that the library `datasets` reads."""
SOURCE_COLUMN = "source"
"""Column that holds the name of the source in the rows of a mixture."""

_FORM = re.compile(r"(\s*(?:([^*()/]*?)\s*\*\s*)?)([^()]+?)(\s*(?:\((.*)\))?\s*)", re.DOTALL)
_COLUMN = re.compile(r"\s*([^\s=,]+)\s*=\s*([^=,]+?)\s*")


@dataclass(frozen=True)
class DataSource:
    """One source of rows."""

    name: str
    """Its name in a mixture; "" for a source that stands alone."""
    location: str
    """A file, or FOLDER[:[config/]split]."""
    weight: float = 1.0
    columns: tuple[tuple[str, str], ...] = ()
    """(name here, name in the source) of the columns that are renamed."""


def data_sources(key: str, setting: object) -> tuple[DataSource, ...]:
    """Return the sources of a data setting, in its order; () if the setting is None.

    The setting is one text or a map name -> text. ConfigError for an unreadable text, a map without
    sources, or a name in it that is no identifier.
    """
    do = f"write {key}=train.jsonl or {key}='{{easy: 3 * easy.jsonl, hard: hard.jsonl}}'"
    written = texts_of(key, setting, expected="a path or a map name -> path", do=do)
    if setting is not None and not written:
        raise ConfigError.of(key, "an empty map", "a source", "write name: path")
    for name in written:
        if isinstance(setting, dict) and not str(name).isidentifier():
            expected = "a name of letters, digits and _, as its metric is data/name"
            raise ConfigError.of(key, f"the source {name!r}", expected, "rename it")
    return tuple(_source(key, name, text) for name, text in written.items())


def texts_of(key: str, setting: object, *, expected: str, do: str) -> dict[str, object]:
    """Return name -> text of a setting that is one text (under the name "") or a map of texts.

    Entries that are null are omitted. ConfigError, with `expected` and `do`, for any other type.
    """
    if not isinstance(setting, str | dict | None):
        raise ConfigError.of(key, f"{setting!r} ({type(setting).__name__})", expected, do)
    written = setting if isinstance(setting, dict) else {"": setting}
    texts = {}
    for name, text in written.items():
        if text is not None:
            texts[name] = text
    return texts


def weight_of(key: str, text: str | None, *, above: float, expected: str, advice: str) -> float:
    """Return the weight in front of a text as a number; 1 if it is None.

    ConfigError, with `expected` and `advice`, unless it is a finite number greater than `above`.
    """
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > above):
        raise ConfigError.of(key, f"the weight {text!r}", expected, advice)
    return weight


def with_locations(setting: object, change: Callable[[str], str]) -> object:
    """Return a data setting with the location in each source replaced by change(location).

    Weights and columns around a location stay. What is no readable source is unchanged.
    """
    if isinstance(setting, dict):
        result = {}
        for name, text in setting.items():
            result[name] = with_locations(text, change)
        return result
    match = _match(setting)
    if match is None:
        return setting
    return f"{match[1]}{change(match[3])}{match[4]}"


def split_location(location: str) -> tuple[str, str]:
    """Split a location into path and ":split": "saved:main/train" -> ("saved", ":main/train").

    The split is empty if the location exists as a path, has no ":", or ends as a file of rows does.
    """
    if location.endswith(FILE_ENDINGS) or ":" not in location or os.path.exists(location):
        return location, ""
    path, _, split = location.rpartition(":")
    return path, f":{split}"


def check_sources(key: str, setting: object) -> None:
    """Raise ConfigError if a source of a data setting is missing or cannot be read."""
    for source in data_sources(key, setting):
        _check_source(
            f"{key}.{source.name}" if source.name else key, *split_location(source.location)
        )


def _check_source(key: str, path: str, split: str) -> None:
    """Raise ConfigError unless `path` is a file of rows or a folder for the library `datasets`.

    With a split, or if it is a folder, the folder must exist and `datasets` be installed. Otherwise
    the path must end in one of FILE_ENDINGS and be a file that is not empty.
    """
    if split or Path(path).is_dir():
        if not Path(path).is_dir():
            raise ConfigError(
                f"{key}: no folder {path} in {Path.cwd()}, expected a data set; correct the path"
            )
        if importlib.util.find_spec("datasets") is None:
            got = f"the data set {path}"
            do = f"{install_command('datasets')}, or convert it to .jsonl"
            raise ConfigError.of(key, got, "the library `datasets` to read it with", do)
    elif not path.endswith(FILE_ENDINGS):
        expected = f"a name that ends in {' or '.join(FILE_ENDINGS)}, a folder, or "
        expected += "owner/name:split of the hub"
        raise ConfigError.of(key, path, expected, "convert the file")
    elif not Path(path).is_file():
        raise ConfigError(
            f"{key}: no file {path} in {Path.cwd()}, expected prompts; correct the path"
        )
    elif Path(path).stat().st_size == 0:
        raise ConfigError.of(key, f"the empty file {path}", "prompts", "give another")


def _source(key: str, name: str, text: object) -> DataSource:
    """Return the source that one text of a data setting describes; ConfigError if unreadable.

    name: its name in the map, "" for a text alone.
    """
    key = f"{key}.{name}" if name else key
    match = _match(text)
    if match is None:
        expected = "a path, with a weight before it and columns after it if needed"
        do = "write for example '3 * train.jsonl(prompt=question)'"
        raise ConfigError.of(key, repr(text), expected, do)
    advice = "write 3 * train.jsonl"
    weight = weight_of(key, match[2] or None, above=0, expected="a number above 0", advice=advice)
    return DataSource(name, match[3], weight, _columns(key, match[5]))


def _match(text: object) -> re.Match[str] | None:
    """Return the match of a source's parts: weight (2), location (3), columns (5); None if none.

    Groups 1 and 4 are the whole text before and behind the location. A text that is an existing
    path is all location, whatever characters it has. Only texts match.
    """
    if not isinstance(text, str):
        return None
    if os.path.exists(text):  # as it stands, whatever is in its name
        return re.fullmatch("(())(.+)(())", text, re.DOTALL)
    return _FORM.fullmatch(text)


def _columns(key: str, text: str | None) -> tuple[tuple[str, str], ...]:
    """Return the pairs (name here, name in the source) of "name=column, ..."; () if empty.

    ConfigError for any other form, or for a name that is there twice.
    """
    parts = (text or "").split(",") if (text or "").strip() else []
    pairs = []
    for part in parts:
        match = _COLUMN.fullmatch(part)
        if match is not None:
            pairs.append((match[1], match[2]))
    if len(pairs) < len(parts) or len({name for name, _ in pairs}) < len(pairs):
        got = f"the columns ({text})"
        do = "write for example (prompt=question, answer=solution)"
        raise ConfigError.of(key, got, "name=column, each name once", do)
    return tuple(pairs)
