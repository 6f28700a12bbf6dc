"""Writes and reads tensors and a role's boxes, bit for bit; hashes frozen models.

Files are safetensors files whose header has a hash of each tensor (`weights.file`). A role saves
boxes (slices) of tensors, under keys such as "model.norm.weight[0:64]" and
"model.norm.weight.exp_avg[0:64]". Any layout can read the parts that it needs (`state`), which are
verified. The `plain` data of each file has the shapes of the full tensors.

The weights of a frozen model are not saved, but read again on resume. The model's hash covers the
name and the content of config.json and of each weight file. For a file above 64 MiB it covers the
size and 64 evenly spaced blocks of 1 MiB, including the first (with safetensors' header) and the
last. Training changes nearly every block of a model.
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
from spmdflow.checkpoint.manifest import check_plain, damage_error
from spmdflow.errors import CheckpointError
from spmdflow.parallel.device import CPU
from spmdflow.weights.file import Head, Stored, TensorInfo, read_bytes, read_head, write_file
from spmdflow.weights.move import Block

_MAX_BOX_BYTES = 64 << 20
"""Larger boxes are written in parts, which bounds the host memory for writing and verifying."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write and fsync a safetensors file of tensors, with their hashes, and JSON data.

    Creates its folder. tensors: of any shape, including () and empty, but no DTensor; stored in
    order of falling dtype width. plain: with str keys; its tuples are read back as lists.
    CheckpointError if plain is not JSON data or writing fails; the partial file is removed.
    """
    check_plain(plain, "plain")
    metadata = {"plain": json.dumps(plain)}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    with disk_errors("write", path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = []
            for name, each in ordered:
                facts.append(TensorInfo(name, each.dtype, each.shape))
            write_file(path, facts, (each for _, each in ordered), metadata)
            sync(path)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The verified tensors, on the CPU, and the JSON data of a file of `write_tensors`.

    CheckpointError if the file is missing, damaged or from another program.
    """
    head, plain = open_tensors(path)
    return {name: read_tensor(path, each) for name, each in head.tensors.items()}, plain


def open_tensors(path: Path) -> tuple[Head, dict[str, Any]]:
    """Return (header, JSON data) of a file of `write_tensors`, without reading the tensors.

    CheckpointError if the file is missing, shorter than its header says, or of another program.
    """
    with disk_errors("read", path):
        head = read_patiently(path, lambda: read_head(path))
        if head:
            end = max((each.stop for each in head.tensors.values()), default=0)
        else:
            end = 0
        if head is None or end > path.stat().st_size:
            raise damage_error(path, "is damaged, or of another program")
    try:
        plain: dict[str, Any] = json.loads(head.metadata["plain"])
    except (LookupError, ValueError) as err:
        raise damage_error(path, f"is damaged, or of another program: {err!r}") from err
    return head, plain


def read_tensor(path: Path, stored: Stored, *, is_verified: bool = True) -> Tensor:
    """Return one stored tensor, on the host.

    CheckpointError if its bytes do not match its hash; not compared if is_verified is False.
    """
    with disk_errors("read", path):
        values, digest = read_patiently(
            path, lambda: read_bytes(path, stored, is_hashed=is_verified)
        )
    if is_verified and digest != stored.xxh3_128:
        raise damage_error(path, f"has hash {digest} in bytes {stored.start}:{stored.stop}")
    return values


def write_state(path: Path, blocks: Iterable[Block], plain: Mapping[str, Any]) -> None:
    """Write boxes of tensors to a file of `write_tensors`, under keys like "norm.weight[0:64]".

    A box above 64 MiB is written in parts along its first dimension. blocks: (name, view, box).
    CheckpointError as in `write_tensors`.
    """
    tensors = {}
    for name, view, box in blocks:
        for part in _split_box(box, view.dtype.itemsize):
            tensors[f"{name}[{','.join(f'{start}:{stop}' for start, stop in part.bounds)}]"] = view[
                part.slices(box)
            ]
    write_tensors(path, tensors, plain)


class HostCopies:
    """Copies of blocks in host memory, to be written while the originals change.

    The buffers are reused, because allocation takes longer than copying. They are pinned for blocks
    on a device.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Box], Tensor] = {}

    def take(self, blocks: Iterable[Block]) -> list[Block]:
        """Copy blocks to host memory; the next call overwrites the copies.

        Returns (name, copy, box) in the same order. Waits for the device. Buffers are allocated at
        the first call for a (name, box).
        """
        copies = []
        device = CPU
        for name, view, box in blocks:
            if view.device != CPU:
                device = view.device
            if (name, box) not in self._buffers:
                pinned = view.device != CPU
                dtype = view.dtype
                self._buffers[name, box] = torch.empty(view.shape, dtype=dtype, pin_memory=pinned)
            copy = self._buffers[name, box].copy_(view.detach(), non_blocking=True)
            copies.append((name, copy, box))
        if device != CPU:
            torch.accelerator.synchronize(device)
        return copies


def _split_box(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield parts of a box along the first dimension, of at most 64 MiB or one row each, in order.

    A box without dimensions is one part. The box must not be empty (ZeroDivisionError).
    """
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
    """Return a sha256 of a frozen model, in hex, independent of the folder's path.

    Covers names and contents of config.json and the weight files; large files only in part
    (`_hash_file`). CheckpointError if the folder cannot be read.
    """
    with disk_errors("read", folder):
        files = sorted(
            path
            for path in folder.iterdir()
            if path.name == "config.json" or path.name.endswith(_WEIGHTS)
        )
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            hash_by_name = dict(zip((path.name for path in files), threads.map(_hash_file, files)))
    return hashlib.sha256(repr(hash_by_name).encode()).hexdigest()


def check_frozen(role: str, now: tuple[str, str], then: tuple[str, str], checkpoint: Path) -> None:
    """CheckpointError if a frozen model differs from that of the checkpoint.

    now, then: (folder, hash) of the model.
    """
    if now[1] != then[1]:
        raise CheckpointError(
            f"checkpoint: {checkpoint} was written with the {role} model of {then[0]} (hash "
            f"{then[1][:12]}), got {now[0]} (hash {now[1][:12]}), expected the same model; set "
            f"{role}.model.path to it, or run.resume=reload_frozen to continue with the new one"
        )


def _hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hex; above 64 MiB, of its size and 64 evenly spaced blocks.

    The blocks have 1 MiB each and include the first and the last.
    """
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
