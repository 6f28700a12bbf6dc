"""Whether all ranks share RUN_DIR: the controller's rank writes a token, every rank reads it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdflow.checkpoint.disk import disk_errors, write_atomically

TOKEN_FILE = ".token"
_LOOK_SECONDS = 0.2


@contextmanager
def shared_token(run_dir: Path) -> Iterator[str]:
    """Meanwhile RUN_DIR holds a random token; CheckpointError if the disk refuses."""
    token, path = secrets.token_hex(16), run_dir / TOKEN_FILE
    with disk_errors("write", path):
        write_atomically(path, token.encode())
    try:
        yield token
    finally:
        path.unlink(missing_ok=True)


def sees_token(run_dir: Path, token: str, *, seconds: float) -> bool:
    """Whether this rank finds the token in run_dir; a network file system has `seconds` for it."""
    limit = time.monotonic() + seconds
    while True:
        if _read(run_dir / TOKEN_FILE) == token:
            return True
        if time.monotonic() >= limit:
            return False
        time.sleep(_LOOK_SECONDS)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):  # another folder, or none: the token is not there
        return None
