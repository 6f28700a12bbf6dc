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
from functools import partial
from pathlib import Path
from typing import BinaryIO

from spmdflow.config.data_source import FILE_ENDINGS, split_place
from spmdflow.datasets.data_set import write_data_set
from spmdflow.datasets.parquet import unpack_zstd, write_as_lines
from spmdflow.errors import DataError

_BLOCK_BYTES = 1 << 20


class LineFile:
    """The lines of a JSONL file, packed or not, or of the rows of a Parquet file or a data set.

    Numbered from 0, blank ones included. `_FORMATS` has the extensions of files.
    """

    def __init__(self, place: str | Path) -> None:
        """place: a file, or FOLDER[:[config/]split]. DataError if there is no such file or folder,
        or its extension or packing is unknown."""
        self.path = Path(place)
        path, split = split_place(str(place))
        if Path(path).is_dir() and not path.endswith(FILE_ENDINGS):
            self._file = _unpacked(lambda target: write_data_set(path, split, target))
            self.num_bytes = os.fstat(self._file.fileno()).st_size
        else:
            unpack = _format_of(self.path)
            if not self.path.is_file():
                what = "a folder" if self.path.is_dir() else "no such file"
                raise DataError(
                    f"{place}: got {what}, expected a file of prompts; correct "
                    f"data.train_path or data.eval_path (relative paths start in {Path.cwd()})"
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


def _unpacked(write: Callable[[BinaryIO], None]) -> BinaryIO:
    """An unnamed file that holds what `write` writes."""
    target = tempfile.TemporaryFile()
    write(target)
    target.flush()
    return target


def _unzip(path: Path, target: BinaryIO) -> None:
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(
            f"{path}: got a damaged or cut-off gzip file ({err}); expected gzip; copy it again"
        ) from err


_FORMATS: dict[str, Callable[[Path], BinaryIO]] = {
    ".jsonl": _plain,
    ".jsonl.gz": lambda path: _unpacked(partial(_unzip, path)),
    ".jsonl.zst": lambda path: _unpacked(partial(unpack_zstd, path)),
    ".parquet": lambda path: _unpacked(partial(write_as_lines, path)),
}


def _format_of(path: Path) -> Callable[[Path], BinaryIO]:
    for extension, unpack in _FORMATS.items():
        if path.name.endswith(extension):
            return unpack
    raise DataError(
        f"{path}: got the extension {path.suffix!r}, expected one of {', '.join(_FORMATS)}; "
        f"convert the file, or rename it if it is one of these"
    )
