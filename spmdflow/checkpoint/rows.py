"""Saves columns of rows in a safetensors file, for inspection and comparison.

A column is stored as its values and, if its rows have lengths, `NAME.lengths`; text as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from spmdflow.checkpoint.tensors import read_tensors, write_tensors
from spmdflow.data.column import Column

_LENGTHS = ".lengths"


def write_rows(path: Path, columns: Mapping[str, Column], plain: Mapping[str, Any]) -> None:
    """Write columns and JSON data to a safetensors file; CheckpointError if writing fails.

    Column NAME is stored as tensor NAME and, if ragged or text, NAME.lengths. Its kind goes into
    the JSON data under "columns".
    """
    tensors: dict[str, Tensor] = {}
    for name, column in columns.items():
        tensors[name] = column.values
        if column.lengths is not None:
            tensors[name + _LENGTHS] = column.lengths
    kinds = {}
    for name, column in columns.items():
        kinds[name] = column.kind
    write_tensors(path, tensors, {"columns": kinds, **plain})


def read_columns(path: Path) -> tuple[dict[str, Column], dict[str, Any]]:
    """Return (columns by name in their original order, JSON data) of a file of `write_rows`.

    CheckpointError if the file is missing or damaged.
    """
    tensors, plain = read_tensors(path)
    kinds = plain.pop("columns")
    columns = {}
    for name, kind in kinds.items():
        columns[name] = Column(kind, tensors[name], tensors.get(name + _LENGTHS))
    return columns, plain


def read_rows(path: str | Path) -> dict[str, Tensor | list[str]]:
    """Return the columns of a file that `write_rows` wrote, by name, as worker methods get them.

    A dense column is a tensor (B, ...), a ragged one a jagged tensor, text a list of str.
    CheckpointError if the file is missing or damaged.
    """
    rows = {}
    for name, column in read_columns(Path(path))[0].items():
        rows[name] = column.to_value()
    return rows
