"""What a frozen model is made of, in one hash: its weights are not saved, but read again on resume.

The hash is over the name and the content of config.json and of every weight file. Of a file above
64 MiB it takes the size and 64 evenly spaced blocks of 1 MiB, the first (with safetensors' header)
and the last among them: training changes nearly every block of a model.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spmdflow.checkpoint.disk import disk_errors
from spmdflow.errors import CheckpointError

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
