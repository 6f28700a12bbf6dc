"""safetensors files written tensor by tensor, hashed while they are written, read in parts.

safetensors' own writer needs all tensors at once, and its bytes can be hashed only by reading the
file again. Here the header, whose size is known in advance, is written last and has a hash of every
tensor's bytes. So the sha256 of the header identifies the complete file (`Head.sha256`), and a
reader of one tensor can verify just this one. Any reader of safetensors reads these files.

The hash of a tensor is XXH3 with 128 bits: it finds damage, not forgery, in a tenth of the time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from spmdflow.weights.direct import NewFile, view_of

_NAME_OF = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_OF = {name: dtype for dtype, name in _NAME_OF.items()}
_READ_BYTES = 1 << 20
_START = b'{"__metadata__":{"xxh3_128":'


class TensorInfo(NamedTuple):
    """Name, type and shape of a tensor, without its values."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


class Stored(NamedTuple):
    """A tensor in a file: its bytes are start .. stop - 1 of the file."""

    dtype: torch.dtype
    shape: Sequence[int]
    start: int
    stop: int
    xxh3_128: str


@dataclass(frozen=True)
class Head:
    """The header of a file, which precedes the tensors' bytes."""

    num_bytes: int
    sha256: str
    """Hash of the header's bytes, which include the hash of every tensor."""
    metadata: Mapping[str, str]
    tensors: Mapping[str, Stored]


def write_file(
    path: Path, facts: Sequence[TensorInfo], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file with the tensors in the order of `facts`.

    Only one tensor at a time is in host memory. A tensor (any device) may be passed in several
    parts, each with the next rows. The header, with the XXH3 hash of each tensor, is written last.
    AssertionError if a part does not match its fact, or unless wider dtypes come first, which
    aligns each tensor's bytes. metadata: texts for the header. Does not fsync.
    """
    widths = [each.dtype.itemsize for each in facts]
    assert widths == sorted(widths, reverse=True), "wider dtypes come first"
    digests = ["0" * 32] * len(facts)
    head_bytes = len(_encode_head(facts, digests, metadata))
    num_bytes = head_bytes + sum(each.num_bytes for each in facts)
    with NewFile(path, head_bytes=head_bytes, num_bytes=num_bytes) as file:
        parts = iter(tensors)
        for index, fact in enumerate(facts):
            digest = xxhash.xxh3_128()
            remaining = fact.num_bytes
            shape = tuple(fact.shape)
            while True:
                part = next(parts)
                assert (part.dtype, tuple(part.shape[1:])) == (fact.dtype, shape[1:]), fact
                values = _bytes_of(part)
                digest.update(view_of(values))
                file.append(values)
                remaining -= len(values)
                assert remaining >= 0, fact
                if remaining == 0:
                    break
            digests[index] = digest.hexdigest()
        assert next(parts, None) is None, path
        file.finish(_encode_head(facts, digests, metadata))


def read_head(path: Path) -> Head | None:
    """Return the header of a file that `write_file` wrote.

    None for any other file, and if the header is damaged or does not fit the tensors' sizes. The
    tensors' bytes are not read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file.read(len(_START)) != _START or length > path.stat().st_size - 8:
            return None
        file.seek(0)
        data = file.read(8 + length)
    try:
        entries: dict[str, Any] = json.loads(data[8:])
        metadata = entries.pop("__metadata__")
        digests = metadata.pop("xxh3_128").split()
        tensors = {}
        for (name, entry), digest in zip(entries.items(), digests, strict=True):
            facts = TensorInfo(name, _DTYPE_OF[entry["dtype"]], tuple(entry["shape"]))
            start, stop = (len(data) + offset for offset in entry["data_offsets"])
            if stop - start != facts.num_bytes:
                return None
            tensors[name] = Stored(facts.dtype, facts.shape, start, stop, digest)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return Head(len(data), hashlib.sha256(data).hexdigest(), metadata, tensors)


def find_changed_tensor(path: Path) -> str | None:
    """Return the first tensor whose bytes do not match its hash, as "name (bytes start:stop)".

    None if all match. AssertionError for a file that `write_file` did not write.
    """
    head = read_head(path)
    assert head is not None, path
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        for name, stored in head.tensors.items():
            digest = xxhash.xxh3_128()
            remaining = stored.stop - stored.start
            file.seek(stored.start)
            while remaining and (count := file.readinto(memoryview(buffer)[:remaining])):
                digest.update(memoryview(buffer)[:count])
                remaining -= count
            if digest.hexdigest() != stored.xxh3_128:
                return f"{name} (bytes {stored.start}:{stored.stop})"
    return None


def read_bytes(path: Path, stored: Stored, *, is_hashed: bool = True) -> tuple[Tensor, str]:
    """Read one tensor; return it, on the host, and the hash of the bytes that were read.

    is_hashed=False: the hash is "". The hash is not compared with stored.xxh3_128. A file that is
    too short leaves the end of the tensor undefined.
    """
    data = torch.empty(stored.stop - stored.start, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(stored.start)
        view = view_of(data)
        done = 0
        while done < len(view) and (more := file.readinto(view[done:])):
            done += more
    digest = xxhash.xxh3_128_hexdigest(view) if is_hashed else ""
    return data.view(stored.dtype).reshape(stored.shape), digest


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _encode_head(
    facts: Sequence[TensorInfo], digests: Sequence[str], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of the header: its length (8 bytes), then JSON padded with spaces.

    The JSON has the hashes and metadata under "__metadata__", then dtype, shape and offsets of each
    tensor. It is padded to a multiple of 8 bytes. The number of bytes does not depend on the
    hashes. AssertionError for a repeated name.
    """
    entries: dict[str, Any] = {"__metadata__": {"xxh3_128": " ".join(digests), **metadata}}
    start = 0
    for name, dtype, shape in facts:
        stop = start + TensorInfo(name, dtype, shape).num_bytes
        entry = {"dtype": _NAME_OF[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        assert name not in entries, name
        entries[name] = entry
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
