"""One rank's file: named tensors, bit for bit, and plain data beside them (safetensors)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdflow.checkpoint.disk import disk_error, disk_errors, sync
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_apart(tensors), path, metadata)
        path.chmod(0o644)  # the library's temporary file is private
        sync(path)
    except (OSError, SafetensorError) as err:
        with suppress(OSError):
            path.unlink()
        raise disk_error("write", path, err) from err


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the plain data that `write_tensors` stored.

    CheckpointError if the file is missing, damaged or from another program.
    """
    try:
        with disk_errors("read", path), safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as err:
        raise _damaged(path, err) from err
    if metadata.get("format") != FORMAT or "plain" not in metadata:
        raise CheckpointError(
            f"checkpoint: {path} has format {metadata.get('format')!r}, expected {FORMAT!r}; "
            f"resume from a checkpoint that this version of spmdflow wrote"
        )
    try:
        return tensors, json.loads(metadata["plain"])
    except ValueError as err:
        raise _damaged(path, err) from err


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


def _damaged(path: Path, err: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint: {path} is damaged ({err}), expected a file of write_tensors; "
        f"restore it, or name an older checkpoint in {path_of_latest(path)}"
    )
