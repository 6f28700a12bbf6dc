"""What a generation server and its clients agree on, and what its process reads as variables."""

from __future__ import annotations

import os
from pathlib import Path

from spmdflow.errors import ConfigError

GENERATE = "/inference/v1/generate"
"""vLLM's route for token ids in and out."""
VERSION_HEADER = "x-spmdflow-version"
"""Header of a request to generate: the run and the version of the weights that it wants."""
SERVED = "SPMDFLOW_SERVED"
"""Set in a vLLM server that draws row noise and takes weights from runs."""
KEY_FILE = "SPMDFLOW_SERVER_KEY_FILE"
"""Path of the file with the server's key; "" for a server that anybody may use."""


def is_served() -> bool:
    """Whether this process belongs to a server that `spmdflow serve` has started."""
    return os.environ.get(SERVED) == "1"


def server_key() -> str:
    """The key that every request must carry; "" if the server has none.

    ConfigError if its file cannot be read or is empty.
    """
    path = os.environ.get(KEY_FILE)
    if path is None:
        raise ConfigError(
            "generation server: it was not started by spmdflow serve, so it has no key; start it "
            "with spmdflow serve MODEL --key-file FILE"
        )
    if not path:
        return ""
    return read_key(path)


def read_key(path: str) -> str:
    """The key in a file. ConfigError if it cannot be read, or has fewer than 16 characters."""
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as err:
        raise ConfigError.of(
            "key file", f"{path}: {err}", "a file with the server's key", "check the path"
        ) from err
    if len(key) < 16 or any(letter.isspace() for letter in key):
        raise ConfigError.of(
            "key file",
            f"{path} with {len(key)} characters",
            "one line of at least 16 characters",
            "write one with: openssl rand -hex 32",
        )
    return key
