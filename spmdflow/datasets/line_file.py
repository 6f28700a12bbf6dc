"""A file of rows as lines of JSON that can be read in one pass or by number, whatever its columns.

Compressed files (gzip, zstd), Parquet and data sets are converted once into an unnamed temporary
file, never into memory. Only this file uses pyarrow (extra `parquet`) and `datasets` (extra
`datasets`), and it imports them late. A data set's folder was written by `save_to_disk`, or has
files like on the hub (Parquet, JSON, CSV, text) with the configs and splits of its README.md.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from spmdflow.config.data_source import FILE_ENDINGS, split_location
from spmdflow.errors import ConfigError, DataError
from spmdflow.requirement import install_command

_BLOCK_BYTES = 1 << 20
_ROWS_AT_A_TIME = 1024


class LineFile:
    """Lines of JSON: of a JSONL file (compressed or not), a Parquet file or a data set.

    Lines are numbered from 0, including blank ones.
    """

    def __init__(self, location: str | Path) -> None:
        """Open the file, or convert it to lines in a temporary file.

        location: a file, or FOLDER[:[config/]split]. Raises DataError if there is no such file or
        folder, its extension is unknown, or it is damaged; ConfigError if a library is missing.
        """
        self.path = Path(location)
        path, split = split_location(str(location))
        if Path(path).is_dir() and not path.endswith(FILE_ENDINGS):
            self._file: BinaryIO = tempfile.TemporaryFile()
            write_data_set(path, split, self._file)
            self._file.flush()
            self.num_bytes = os.fstat(self._file.fileno()).st_size
        else:
            self._file = _open(self.path)
            self.num_bytes = self.path.stat().st_size
        self._starts: array[int] | None = None

    def __len__(self) -> int:
        return len(self._index()) - 1

    def lines(self) -> Iterator[bytes]:
        """Yield all lines in order, as bytes with their line feed; the last one may lack it.

        Several passes and reads may run at the same time.
        """
        position = 0
        incomplete: list[bytes] = []  # blocks of a line whose end is not read yet
        while block := os.pread(self._file.fileno(), _BLOCK_BYTES, position):
            position += len(block)
            *lines, rest = block.split(b"\n")
            if lines:
                first = b"".join([*incomplete, lines[0], b"\n"])
                incomplete = []
                yield first
                del first  # it may be large
                for line in lines[1:]:
                    yield line + b"\n"
            if rest:
                incomplete.append(rest)
        if incomplete:
            yield b"".join(incomplete)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the lines with these numbers (from 0), in this order, as bytes.

        DataError if there is no such line. The first call reads the whole file for the offsets.
        """
        starts = self._index()
        last = max(numbers, default=0)
        if numbers and not 0 <= min(numbers) <= last < len(starts) - 1:
            got = f"{len(starts) - 1} lines, but line {last + 1} was requested"
            do = "it has changed since it was scanned, or differs on this node: restore it"
            raise DataError.of(self.path, got, "the lines that were scanned", do)
        result = []
        for number in numbers:
            result.append(
                os.pread(self._file.fileno(), starts[number + 1] - starts[number], starts[number])
            )
        return result

    def _index(self) -> array[int]:
        """Return the offset of each line's start, then the file's end: one more than lines.

        Computed with one pass at first use and kept; 8 bytes per line.
        """
        if self._starts is None:
            starts = array("q", [0])
            for line in self.lines():
                starts.append(starts[-1] + len(line))
            self._starts = starts
        return self._starts


def _open(path: Path) -> BinaryIO:
    """Open a .jsonl file, or write the rows of another kind as lines to an unnamed temporary file.

    DataError if the ending is none of FILE_ENDINGS, there is no such file, or it is damaged.
    """
    ending = next((ending for ending in FILE_ENDINGS if path.name.endswith(ending)), None)
    if ending is None:
        got = f"the extension {path.suffix!r}"
        do = "convert the file, or rename it if it is one of these"
        raise DataError.of(path, got, f"one of {', '.join(FILE_ENDINGS)}", do)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        do = "correct data.train_path or data.eval_path (relative paths start in "
        do += f"{Path.cwd()})"
        raise DataError.of(path, what, "a file of prompts", do)
    if ending == FILE_ENDINGS[0]:
        return path.open("rb")
    target = tempfile.TemporaryFile()
    unpack = {".jsonl.gz": unzip, ".jsonl.zst": unpack_zstd, ".parquet": write_as_lines}[ending]
    unpack(path, target)
    target.flush()
    return target


def unzip(path: Path, target: BinaryIO) -> None:
    """Decompress a gzip file and append its content to target; DataError if it is damaged."""
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target)
    except (OSError, EOFError, zlib.error) as err:
        raise _damage_error(path, "gzip", err) from err


def unpack_zstd(path: Path, target: BinaryIO) -> None:
    """Decompress a zstd file and append its content to target; DataError if it is damaged.

    ConfigError if pyarrow is not installed.
    """
    pyarrow = _import_pyarrow(path, "a zstd file")
    try:
        with pyarrow.input_stream(str(path), compression="zstd") as packed:
            shutil.copyfileobj(packed, target)
    except (pyarrow.ArrowException, OSError) as err:
        raise _damage_error(path, "zstd", err) from err


def _damage_error(path: Path, form: str, err: BaseException) -> DataError:
    return DataError(
        f"{path}: got a damaged or cut-off {form} file ({err}); expected {form}; copy it again"
    )


def write_as_lines(path: Path, target: BinaryIO) -> None:
    """Append one JSON object per row of a Parquet file; values that JSON lacks (dates) become text.

    ConfigError if pyarrow is not installed, DataError if the file is no Parquet.
    """
    pyarrow = _import_pyarrow(path, "a Parquet file")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                _write_rows(batch.to_pylist(), target)
    except (pyarrow.ArrowException, OSError) as err:
        raise DataError(
            f"{path}: got a file that pyarrow cannot read ({err}); expected Parquet; "
            f"copy it again, or correct its extension"
        ) from err


def _write_rows(rows: Iterable[dict[str, Any]], target: BinaryIO) -> None:
    for row in rows:
        target.write(json.dumps(row, default=str).encode() + b"\n")


def _import_pyarrow(path: Path, what: str) -> Any:  # the module; its package has no types
    """Import and return pyarrow, with pyarrow.parquet; ConfigError if it is not installed.

    what: the kind of file, for the message.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as err:
        do = f"{install_command('parquet')}, or convert the file to .jsonl"
        raise ConfigError.of(path, what, "pyarrow to read it with", do) from err
    return pyarrow


_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"


def write_data_set(path: str, split: str, target: BinaryIO) -> None:
    """Append one JSON object per row of a data set's folder to target.

    Values that JSON lacks, such as dates, become text. split: ":split", ":config/split" or ""
    (train, or the only one that was saved). Raises ConfigError if the library `datasets` is not
    installed, and DataError if it cannot read the folder or there is no such split.
    """
    library = _import_datasets(path)
    config, _, name = split.removeprefix(":").rpartition("/")
    errors = (OSError, ValueError, KeyError, library.exceptions.DatasetsError)
    try:
        _write_rows(_load_rows(library, path, config, name), target)
    except errors as err:
        cause = f"{type(err).__name__}: {' '.join(str(err).split())}"
        where = f"{path}{split}"
        got = f"a folder that the library `datasets` cannot read ({cause})"
        do = "correct the config and the split, which follow the last colon as in "
        do += f"{path}:config/split, or download the folder again"
        raise DataError.of(where, got, "a data set with that split", do) from err


def _load_rows(library: Any, path: str, config: str, split: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a folder's split, which the library streams or maps into memory.

    A folder that was written by save_to_disk is loaded as such, any other one with load_dataset.
    split: "" means train, or all rows that were saved without splits. ValueError if a saved data
    set has no such split.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in (_SAVED, _SAVED_SPLITS)):
        data_set = library.load_dataset(
            path, config or None, split=split or "train", streaming=True
        )
        return data_set  # type: ignore[no-any-return]
    data_set = library.load_from_disk(path)
    if isinstance(data_set, dict):
        if (split or "train") not in data_set:
            raise ValueError(f"its splits are {', '.join(data_set)}")
        return data_set[split or "train"]  # type: ignore[no-any-return]
    if split:
        raise ValueError("it was saved without splits")
    return data_set


def _import_datasets(path: str) -> Any:  # the module
    """Import and return the library `datasets`; ConfigError if it is not installed."""
    try:
        import datasets
    except ImportError as err:
        expected = "the library `datasets` to read it with"
        do = f"{install_command('datasets')}, or convert it to .jsonl"
        raise ConfigError.of(path, "a data set", expected, do) from err
    return datasets
