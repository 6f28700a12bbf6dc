"""A rank's tensors on disk, bit for bit; a role's state as boxes; the hash of a frozen model.

Files are safetensors files whose header holds a hash of every tensor (`weights.file`). A role
saves boxes (slices) of whole tensors, under keys such as "model.norm.weight[0:64]" and
"model.norm.weight.exp_avg[0:64]": any layout can read the part that it needs (`state`), and
verifies what it reads. The `plain` data of each file has the shapes of the whole tensors.

A frozen model's weights are not saved, but read again on resume. Its hash is over the name and the
content of config.json and of every weight file. Of a file above 64 MiB it takes the size and 64
evenly spaced blocks of 1 MiB, the first (with safetensors' header) and the last among them:
training changes nearly every block of a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.disk import disk_errors, read_patiently, sync
from spmdflow.checkpoint.manifest import check_plain, damaged
from spmdflow.errors import CheckpointError
from spmdflow.parallel.device import CPU
from spmdflow.weights.file import Facts, Head, Stored, read_bytes, read_head, write_file
from spmdflow.weights.move import Block

_MAX_BOX_BYTES = 64 << 20
"""A larger box is written in parts; bounds the host memory to write one and to verify one."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write tensors (any shape, also () and empty; local, not DTensor) and JSON data, synced.

    plain needs str keys, its tuples come back as lists. CheckpointError if writing fails: then no
    part of the file is left.
    """
    check_plain(plain, "plain")
    metadata = {"plain": json.dumps(plain)}
    found = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    with disk_errors("write", path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = []
            for name, each in found:
                facts.append(Facts(name, each.dtype, each.shape))
            write_file(path, facts, (each for _, each in found), metadata)
            sync(path)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU), verified, and the plain data that `write_tensors` stored.

    CheckpointError if the file is missing, damaged or from another program.
    """
    head, plain = open_tensors(path)
    return {name: read_tensor(path, each) for name, each in head.tensors.items()}, plain


def open_tensors(path: Path) -> tuple[Head, dict[str, Any]]:
    """Header and plain data of a file of `write_tensors`; CheckpointError as `read_tensors`."""
    with disk_errors("read", path):
        head = read_patiently(path, lambda: read_head(path))
        if head:
            end = max((each.stop for each in head.tensors.values()), default=0)
        else:
            end = 0
        if head is None or end > path.stat().st_size:
            raise damaged(path, "is damaged, or of another program")
    try:
        plain: dict[str, Any] = json.loads(head.metadata["plain"])
    except (LookupError, ValueError) as err:
        raise damaged(path, f"is damaged, or of another program: {err!r}") from err
    return head, plain


def read_tensor(path: Path, stored: Stored, *, is_verified: bool = True) -> Tensor:
    """One tensor of a file on the host; CheckpointError if its bytes have changed."""
    with disk_errors("read", path):
        values, digest = read_patiently(
            path, lambda: read_bytes(path, stored, is_hashed=is_verified)
        )
    if is_verified and digest != stored.xxh3_128:
        raise damaged(path, f"has hash {digest} in bytes {stored.start}:{stored.stop}")
    return values


def write_state(path: Path, blocks: Iterable[Block], plain: Mapping[str, Any]) -> None:
    """Write boxes, large ones in parts: see `write_tensors`."""
    tensors = {}
    for name, view, box in blocks:
        for part in _parts(box, view.dtype.itemsize):
            tensors[f"{name}[{','.join(f'{start}:{stop}' for start, stop in part.bounds)}]"] = view[
                part.slices(box)
            ]
    write_tensors(path, tensors, plain)


class HostCopies:
    """Copies of live blocks in host memory, to be written while the live ones change.

    The memory is kept for the next time: getting it takes longer than to copy. Pinned for a device.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Box], Tensor] = {}

    def take(self, blocks: Iterable[Block]) -> list[Block]:
        """The same blocks on the host; valid until the next call."""
        copies = []
        device = CPU
        for name, view, box in blocks:
            if view.device != CPU:
                device = view.device
            if (name, box) not in self._kept:
                pinned = view.device != CPU
                dtype = view.dtype
                self._kept[name, box] = torch.empty(view.shape, dtype=dtype, pin_memory=pinned)
            copy = self._kept[name, box].copy_(view.detach(), non_blocking=True)
            copies.append((name, copy, box))
        if device != CPU:
            torch.accelerator.synchronize(device)
        return copies


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    """Slabs along the first dimension of at most `_MAX_BOX_BYTES` (a single row may be larger)."""
    if box.bounds:
        rows = max(1, _MAX_BOX_BYTES * box.shape[0] // (box.size * itemsize))
    else:
        rows = 1
    while box.bounds and box.shape[0] > rows:
        part, box = box.cut(0, box.bounds[0][0] + rows)
        yield part
    yield box


_BLOCK_BYTES = 1 << 20
_NUM_BLOCKS = 64
_NUM_THREADS = 8
_WEIGHTS = (".safetensors", ".bin", ".distcp", ".metadata")


def model_hash(folder: Path) -> str:
    """Hash of a frozen model, in hex, independent of its path. CheckpointError if unreadable."""
    with disk_errors("read", folder):
        files = sorted(
            path
            for path in folder.iterdir()
            if path.name == "config.json" or path.name.endswith(_WEIGHTS)
        )
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            found = dict(zip((path.name for path in files), threads.map(_file_hash, files)))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def check_frozen(role: str, now: tuple[str, str], then: tuple[str, str], checkpoint: Path) -> None:
    """CheckpointError if a frozen model differs from the one at the time of the checkpoint.

    now, then: (folder, hash).
    """
    if now[1] != then[1]:
        raise CheckpointError(
            f"checkpoint: {checkpoint} was written with the {role} model of {then[0]} (hash "
            f"{then[1][:12]}), got {now[0]} (hash {now[1][:12]}), expected the same model; set "
            f"{role}.model.path to it, or run.resume=reload_frozen to go on with the new one"
        )


def _file_hash(path: Path) -> str:
    size = path.stat().st_size
    if size <= _BLOCK_BYTES * _NUM_BLOCKS:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_NUM_BLOCKS):
            file.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
