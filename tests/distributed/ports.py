"""Ports that a program is told before it listens there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(address: str) -> Iterator[int]:
    """A port that nobody is given meanwhile; whoever sets SO_REUSEADDR, as torch's store does, may
    listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        yield held.getsockname()[1]
