"""The seam to pyarrow: Parquet and zstd files as lines of JSON. Imported late; extra `parquet`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from spmdflow.errors import ConfigError, DataError

_ROWS_AT_A_TIME = 1024


def write_as_lines(path: Path, target: BinaryIO) -> None:
    """Append one JSON object per row to target; values that JSON lacks (dates) become text.

    ConfigError if pyarrow is not installed, DataError if the file is no Parquet.
    """
    pyarrow = _pyarrow(path, "a Parquet file")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    target.write(json.dumps(row, default=str).encode() + b"\n")
    except (pyarrow.ArrowException, OSError) as err:
        raise DataError(
            f"{path}: got a file that pyarrow cannot read ({err}); expected Parquet; "
            f"copy it again, or correct its extension"
        ) from err


def unpack_zstd(path: Path, target: BinaryIO) -> None:
    """Append what a zstd file holds to target.

    ConfigError if pyarrow is not installed, DataError if the file is no zstd or cut off.
    """
    pyarrow = _pyarrow(path, "a zstd file")
    try:
        with pyarrow.input_stream(str(path), compression="zstd") as packed:
            shutil.copyfileobj(packed, target)
    except (pyarrow.ArrowException, OSError) as err:
        raise DataError(
            f"{path}: got a damaged or cut-off zstd file ({err}); expected zstd; copy it again"
        ) from err


def _pyarrow(path: Path, what: str) -> Any:  # the module; its package has no types
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as err:
        raise ConfigError(
            f"{path}: got {what}, expected pyarrow to read it with; "
            f"pip install 'spmdflow[parquet]', or convert the file to .jsonl"
        ) from err
    return pyarrow
