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
    """Write columns and JSON data; CheckpointError if writing fails."""
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
    """The columns in their original order, and the JSON data."""
    tensors, plain = read_tensors(path)
    kinds = plain.pop("columns")
    columns = {}
    for name, kind in kinds.items():
        columns[name] = Column(kind, tensors[name], tensors.get(name + _LENGTHS))
    return columns, plain


def read_rows(path: str | Path) -> dict[str, Tensor | list[str]]:
    """Tensors, jagged tensors and texts by column, as worker methods see them."""
    rows = {}
    for name, column in read_columns(Path(path))[0].items():
        rows[name] = column.to_value()
    return rows
