"""Rows read where they lie: a rank copies them out of the memory of another one of its machine.

One system call (process_vm_readv) copies between two processes: no socket, no second copy, and
no thread of the producer takes part. The kernel decides who may read whose memory; every pair of
ranks asks it once, at the start, and where it refuses, rows are sent (transfer/lane.py).

No row is freed before it was read: the controller frees a frame when nothing refers to it any
more, and a transfer refers to it until its last receiver has replied. And no reader has to
believe that: beside each column lies a stamp, which is wiped before the column is freed and is
copied after the rows. A stamp that is right proves that the rows were still there.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from spmdflow.data.column import Column
from spmdflow.errors import TransferError

_PR_SET_PTRACER = 0x59616D61
_MAX_STRETCHES = 1023
"""A system call takes 1024; the last one is the stamp's."""
_STAMPS_AT_ONCE = 1024

STAMP_BYTES = 24
"""int64: the token of the process, the number of the frame, the bytes of the column."""

Place = tuple[int, int]
"""Addresses of a column's values and of its stamp, in the process that made it."""


@dataclass(frozen=True)
class Neighbour:
    """A process whose memory may be readable."""

    pid: int
    token: int
    """A random number, so that no other process is taken for this one."""
    token_address: int
    """Where the token lies."""


class Shelf:
    """Columns of this process that others may read, by frame; they are kept until freed."""

    def __init__(self) -> None:
        self._token = np.array([secrets.randbits(62)], dtype=np.int64)
        self._columns: dict[int, list[tuple[Column, np.ndarray]]] = {}
        self._blank: list[np.ndarray] = []
        allow_siblings()

    def owner(self) -> Neighbour:
        """This process, as others need to know it."""
        return Neighbour(os.getpid(), int(self._token[0]), self._token.ctypes.data)

    def put(self, frame: int, columns: Mapping[str, Column]) -> dict[str, Place]:
        """Where the columns that can be read lie; the others are not in the result."""
        places = {}
        for name, column in columns.items():
            if column.values.is_contiguous() and not column.values.is_pinned():
                stamp = self._new_stamp()
                stamp[:] = self._token[0], frame, column.values.nbytes
                self._columns.setdefault(frame, []).append((column, stamp))
                places[name] = (column.values.data_ptr(), stamp.ctypes.data)
        return places

    def free(self, frames: Iterable[int]) -> None:
        """Wipe the stamps of frames, then let their columns go; unknown frames are fine."""
        for frame in frames:
            columns = self._columns.pop(frame, [])
            for _, stamp in columns:
                stamp[:] = 0
            self._blank += [stamp for _, stamp in columns]

    def _new_stamp(self) -> np.ndarray:
        """Memory for a stamp; it is never given back, so that a late reader finds it wiped."""
        if not self._blank:
            self._blank = list(np.zeros((_STAMPS_AT_ONCE, 3), dtype=np.int64))
        return self._blank.pop()


@dataclass(frozen=True)
class Stretches:
    """Rows of one column in another process."""

    place: Place
    parts: np.ndarray
    """(n, 2) int64: offset from the address of the values, and bytes."""


def read_column(owner: Neighbour, frame: int, rows: Stretches, into: np.ndarray) -> int:
    """Copy rows of a column of frame into (N,) uint8; returns the bytes that the kernel copied.

    TransferError if the process is gone or refuses, or if the column was freed.
    """
    values, stamp_address = rows.place
    stamp = np.zeros(3, dtype=np.int64)
    parts = np.array(rows.parts, dtype=np.int64).reshape(-1, 2)
    parts[:, 0] += values
    ends = parts.sum(axis=1).max(initial=values)
    copied = _read(owner.pid, parts, into)
    _read(owner.pid, np.array([[stamp_address, STAMP_BYTES]]), stamp.view(np.uint8))
    if stamp[0] != owner.token or stamp[1] != frame or ends > values + stamp[2]:
        raise TransferError(
            f"process {owner.pid}, call {frame}: got {stamp.tolist()} as [token, call, bytes], "
            f"expected [{owner.token}, {frame}, at least {ends - values}]; the rows were freed "
            f"before they were read: report this with RUN_DIR/trace.json"
        )
    return copied


def can_read(owner: Neighbour) -> bool:
    """Whether the kernel lets this process read the memory of owner: its token, for a test."""
    found = np.zeros(1, dtype=np.int64)
    try:
        _read(owner.pid, np.array([[owner.token_address, 8]]), found.view(np.uint8))
    except TransferError:
        return False
    return int(found[0]) == owner.token


def allow_siblings() -> None:
    """Let the other children of our parent, and nobody else, read our memory (Yama's rule 1)."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


_libc = ctypes.CDLL(None, use_errno=True)
_VOID, _LONG = ctypes.c_void_p, ctypes.c_ulong
_readv = _libc.process_vm_readv
_readv.argtypes = [ctypes.c_int, _VOID, _LONG, _VOID, _LONG, _LONG]
_readv.restype = ctypes.c_ssize_t


def _read(pid: int, parts: np.ndarray, into: np.ndarray) -> int:
    """Copy parts (n, 2) int64, address and bytes, of process pid into (N,) uint8."""
    assert parts[:, 1].sum() == into.nbytes, (parts, into.nbytes)
    done = 0
    while done < into.nbytes:
        here = np.array([[into.ctypes.data + done, into.nbytes - done]], dtype=np.int64)
        there = np.ascontiguousarray(parts[:_MAX_STRETCHES])
        copied = _readv(pid, here.ctypes.data, 1, there.ctypes.data, len(there), 0)
        if copied <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise TransferError(
                f"process {pid}: read {done} of {into.nbytes} bytes of its memory, then {reason}; "
                f"expected all of them; see whether that process has ended"
            )
        done, parts = done + copied, _after(parts, copied)
    return done


def _after(parts: np.ndarray, num_bytes: int) -> np.ndarray:
    """What is left of parts when the first num_bytes were copied."""
    ends = np.cumsum(parts[:, 1])
    whole = int(np.searchsorted(ends, num_bytes, side="right"))
    left = parts[whole:].copy()
    if len(left):
        used = num_bytes - (ends[whole - 1] if whole else 0)
        left[0] += (used, -used)
    return left
