"""A file of rows as lines of JSON that can be read in one pass or by number.

Packed files (gzip, zstd, Parquet) are unpacked once into an unnamed temporary file, never into
memory. Knows no columns.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from spmdflow.datasets.parquet import unpack_zstd, write_as_lines
from spmdflow.errors import DataError

_BLOCK_BYTES = 1 << 20


class LineFile:
    """The lines of a JSONL file, packed or not, or of a Parquet file's rows.

    Numbered from 0, blank ones included. `_FORMATS` has the extensions.
    """

    def __init__(self, path: str | Path) -> None:
        """DataError if there is no such file, or its extension or packing is unknown."""
        self.path = Path(path)
        unpack = _format_of(self.path)
        if not self.path.is_file():
            what = "a folder" if self.path.is_dir() else "no such file"
            raise DataError(
                f"{path}: got {what}, expected a file of prompts; correct data.train_path or "
                f"data.eval_path (relative paths start in {Path.cwd()})"
            )
        self.num_bytes = self.path.stat().st_size
        self._file = unpack(self.path)
        self._starts: array[int] | None = None

    def __len__(self) -> int:
        return len(self._index()) - 1

    def lines(self) -> Iterator[bytes]:
        """All lines in order, in one pass; passes and reads do not disturb each other."""
        rest, position = b"", 0
        while block := os.pread(self._file.fileno(), _BLOCK_BYTES, position):
            position += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield line + b"\n"
        if rest:
            yield rest

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """These lines, in the order given."""
        starts = self._index()
        assert all(0 <= number < len(starts) - 1 for number in numbers), (self.path, numbers)
        return [
            os.pread(self._file.fileno(), starts[number + 1] - starts[number], starts[number])
            for number in numbers
        ]

    def _index(self) -> array[int]:
        """Where each line starts, and where the last one ends; 8 bytes per line."""
        if self._starts is None:
            starts = array("q", [0])
            for line in self.lines():
                starts.append(starts[-1] + len(line))
            self._starts = starts
        return self._starts


def _plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _unzipped(path: Path) -> BinaryIO:
    target = tempfile.TemporaryFile()
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(
            f"{path}: got a damaged or cut-off gzip file ({err}); expected gzip; copy it again"
        ) from err
    target.flush()
    return target


def _by_pyarrow(write: Callable[[Path, BinaryIO], None]) -> Callable[[Path], BinaryIO]:
    def unpack(path: Path) -> BinaryIO:
        target = tempfile.TemporaryFile()
        write(path, target)
        target.flush()
        return target

    return unpack


_FORMATS: dict[str, Callable[[Path], BinaryIO]] = {
    ".jsonl": _plain,
    ".jsonl.gz": _unzipped,
    ".jsonl.zst": _by_pyarrow(unpack_zstd),
    ".parquet": _by_pyarrow(write_as_lines),
}


def _format_of(path: Path) -> Callable[[Path], BinaryIO]:
    for extension, unpack in _FORMATS.items():
        if path.name.endswith(extension):
            return unpack
    raise DataError(
        f"{path}: got the extension {path.suffix!r}, expected one of {', '.join(_FORMATS)}; "
        f"convert the file, or rename it if it is one of these"
    )
