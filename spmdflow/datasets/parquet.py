"""The seam to pyarrow: a Parquet file as lines of JSON. Imported late; the extra is `parquet`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from spmdflow.errors import ConfigError, DataError

_ROWS_AT_A_TIME = 1024


def write_as_lines(path: Path, target: BinaryIO) -> None:
    """Append one JSON object per row to target; values that JSON lacks (dates) become text.

    ConfigError if pyarrow is not installed, DataError if the file is no Parquet.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as err:
        raise ConfigError(
            f"{path}: got a Parquet file, expected pyarrow to read it with; "
            f"pip install 'spmdflow[parquet]', or convert the file to .jsonl"
        ) from err
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
