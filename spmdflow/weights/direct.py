"""A file written once from start to end, bypassing the page cache if possible.

Large files are written to the disk from a buffer (O_DIRECT): the page cache would cost several
times the CPU time of filling the buffer, and a run may be training on these CPUs. A small file, or
one on a file system that refuses such writes, is written normally.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 4096
"""Alignment of address, file offset and size of a direct write."""
_BUFFER_BYTES = 8 << 20


class NewFile:
    """A file whose head is written last. Use it as a context manager. May raise OSError."""

    def __init__(self, path: Path, *, head_bytes: int, num_bytes: int) -> None:
        """num_bytes: size of the complete file, including its head."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        direct = os.O_DIRECT if num_bytes >= _BUFFER_BYTES else 0
        try:
            self._file = os.open(path, flags | direct, 0o666)
        except OSError as err:
            if not direct or err.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o666)
        self._first = _aligned_buffer(-(-head_bytes // _ALIGNMENT) * _ALIGNMENT)
        self._more = _aligned_buffer(min(_BUFFER_BYTES, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT))
        self._buffer = self._first
        self._start = 0
        self._filled = head_bytes

    def append(self, values: Tensor) -> None:
        """Append the bytes of a flat uint8 tensor to a buffer, which is written when it is full.

        Releases the GIL. The first buffer has room for the head, and is written by `finish`.
        """
        while values.numel():
            room = self._buffer[self._filled :]
            part = values[: len(room)]
            values = values[len(room) :]
            room[: len(part)].copy_(part)
            self._filled += len(part)
            if self._filled == len(self._buffer):
                self._flush()
                self._start += len(self._buffer)
                self._buffer = self._more
                self._filled = 0

    def finish(self, head: bytes) -> None:
        """Write the remaining bytes, then the head at the start; cut the file to its size.

        head: as many bytes as the head_bytes that the file was made with.
        """
        if self._filled:
            self._flush()
        self._first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._write(self._first, 0)
        os.ftruncate(self._file, self._start + self._filled)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def _flush(self) -> None:
        """Write the complete buffer, even if it is not full: `finish` truncates the file."""
        if self._buffer is not self._first:
            self._write(self._buffer, self._start)

    def _write(self, values: Tensor, offset: int) -> None:
        """Write all values at an offset of the file.

        If the file system refuses a direct write (EINVAL), O_DIRECT is turned off for this file and
        the write is repeated. Any other OSError is raised.
        """
        left = view_of(values)
        while left:
            try:
                count = os.pwrite(self._file, left, offset)
            except OSError as err:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if err.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            left = left[count:]
            offset = offset + count


def view_of(values: Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the host."""
    plain: Any = values.numpy()
    return memoryview(plain)


def _aligned_buffer(num_bytes: int) -> Tensor:
    """A uint8 buffer whose address is a multiple of _ALIGNMENT."""
    values = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    return values[-values.data_ptr() % _ALIGNMENT :][:num_bytes]
