"""The seam to the library `datasets`: folders as lines of JSON. Imported late; extra `datasets`.

A folder is one that `save_to_disk` wrote, or files as the hub has them (Parquet, JSON, CSV, text)
with the configs and splits that its README.md names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from spmdflow.errors import ConfigError, DataError

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


def write_data_set(path: str, split: str, target: BinaryIO) -> None:
    """Append one JSON object per row of a folder to target; values that JSON lacks become text.

    split: ":split", ":config/split" or "" (train, or all that was saved). ConfigError if
    `datasets` is not installed, DataError if the folder cannot be read or has no such split.
    """
    library = _library(path)
    config, _, name = split.removeprefix(":").rpartition("/")
    errors = (OSError, ValueError, KeyError, library.exceptions.DatasetsError)
    try:
        for row in _rows(library, path, config, name):
            target.write(json.dumps(row, default=str).encode() + b"\n")
    except errors as err:
        said = f"{type(err).__name__}: {' '.join(str(err).split())}"
        raise DataError(
            f"{path}{split}: got a folder that datasets cannot read ({said}), "
            f"expected a data set with that split; correct the config and the split behind the "
            f"colon, or download it again"
        ) from err


def _rows(library: Any, path: str, config: str, split: str) -> Iterable[dict[str, Any]]:
    folder = Path(path)
    if not any((folder / name).is_file() for name in (_SAVED, _SAVED_SPLITS)):
        found = library.load_dataset(path, config or None, split=split or "train", streaming=True)
        return found  # type: ignore[no-any-return]
    found = library.load_from_disk(path)
    if isinstance(found, dict):
        if (split or "train") not in found:
            raise ValueError(f"its splits are {', '.join(found)}")
        return found[split or "train"]  # type: ignore[no-any-return]
    if split:
        raise ValueError("it was saved without splits")
    return found


def _library(path: str) -> Any:  # the module; it is imported late
    try:
        import datasets
    except ImportError as err:
        raise ConfigError(
            f"{path}: got a data set, expected the library datasets to read it with; "
            f"pip install 'spmdflow[datasets]', or convert it to .jsonl"
        ) from err
    return datasets
