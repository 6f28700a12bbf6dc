"""One rank's file (named tensors, bit for bit, and plain data), and the hash of a frozen model.

A frozen model's weights are not saved, but read again on resume. Its hash is over the name and the
content of config.json and of every weight file. Of a file above 64 MiB it takes the size and 64
evenly spaced blocks of 1 MiB, the first (with safetensors' header) and the last among them:
training changes nearly every block of a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdflow.checkpoint.disk import disk_errors, sync
from spmdflow.checkpoint.manifest import check_plain, path_of_latest
from spmdflow.errors import CheckpointError

FORMAT = "spmdflow-1"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write tensors (any shape, also () and empty; local, not DTensor) and JSON data, synced.

    Tensors that share memory are stored apart; plain needs str keys, its tuples come back as
    lists. CheckpointError if the disk refuses: then no part of the file is left.
    """
    check_plain(plain, "plain")
    metadata = {"format": FORMAT, "plain": json.dumps(plain)}
    with disk_errors("write", path, caught=(OSError, SafetensorError)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(_apart(tensors), path, metadata)
            path.chmod(0o644)  # the library's temporary file is private
            sync(path)
        except (OSError, SafetensorError):
            with suppress(OSError):
                path.unlink()
            raise


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the plain data that `write_tensors` stored.

    CheckpointError if the file is missing, damaged or from another program.
    """
    try:
        with disk_errors("read", path), safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata.get("format") != FORMAT or "plain" not in metadata:
            raise CheckpointError(
                f"checkpoint: {path} has format {metadata.get('format')!r}, expected {FORMAT!r}; "
                f"resume from a checkpoint that this version of spmdflow wrote"
            )
        return tensors, json.loads(metadata["plain"])
    except (SafetensorError, ValueError) as err:
        raise CheckpointError(
            f"checkpoint: {path} is damaged ({err}), expected a file of write_tensors; "
            f"restore it, or name an older checkpoint in {path_of_latest(path)}"
        ) from err


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors in host memory, no two on one storage: what safetensors accepts.

    Cloned there, as a device may have no room.
    """
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart


_BLOCK_BYTES, _NUM_BLOCKS = 1 << 20, 64
_NUM_THREADS = 8
_WEIGHTS = (".safetensors", ".bin")


def model_hash(folder: Path) -> str:
    """Hex digits; equal for the same content under another path. CheckpointError if unreadable."""
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
    """CheckpointError if a frozen model is another one than at the time of the checkpoint.

    now, then: its folder and its hash.
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
