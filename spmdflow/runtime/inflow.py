"""Notices a message that never ends, of which a socket shows nothing.

libzmq keeps the parts of a message until its last one, without a limit on their number. But the
kernel counts what came over a connection (Linux 4.2, TCP_INFO). A connection that goes on while
none of its messages ends is shut down, which frees the parts.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from dataclasses import dataclass

from spmdflow.parallel.message import MAX_MESSAGE_BYTES

_MOST_BYTES = MAX_MESSAGE_BYTES + 2**24
"""What may come before a message ends: one, and what is sealed around it."""
_RECEIVED = struct.Struct("128xQ")
"""tcpi_bytes_received of struct tcp_info."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: who still sends is told at once, when the socket is closed."""


@dataclass
class _Connection:
    num_messages: int = 0
    """Read from it when a look last found new ones."""
    num_bytes: int = 0
    """That had come then."""
    is_late: bool = False
    """Whether the last look found too many bytes since."""


class Inflow:
    """The TCP connections of a socket, by descriptor. Used by one thread at a time."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self._ranks: dict[int, int] = {}
        """Who sends over a connection; may be known before `opened` was called."""
        self.num_messages: Counter[int] = Counter()
        """Messages that were read, by rank."""

    def add_connection(self, descriptor: int) -> None:
        """Somebody has connected."""
        self._connections[descriptor] = _Connection()

    def remove_connection(self, descriptor: int) -> None:
        """A connection is gone."""
        self._connections.pop(descriptor, None)

    def belongs_to(self, descriptor: int, rank: int) -> None:
        """A message of rank (-1: of nobody known) came over a connection."""
        if rank >= 0:
            self._ranks[descriptor] = rank

    def cut_endless(self, ports: set[int]) -> list[int]:
        """Shut down connections to these ports on which no message ends; the ranks (-1: unknown).

        To be called between the reading of all that is there: a connection with much to read has
        been read from at the next call.
        """
        cut = []
        for descriptor, known in list(self._connections.items()):
            rank = self._ranks.get(descriptor, -1)
            received = _received_or_none(descriptor)
            read = self.num_messages[rank] if rank >= 0 else 0
            if received is None:
                self.remove_connection(descriptor)
            elif read > known.num_messages:
                known.num_messages = read
                known.num_bytes = received
                known.is_late = False
            elif received > known.num_bytes + _MOST_BYTES:
                if known.is_late and _shut_down(descriptor, ports):
                    cut.append(rank)
                    self.remove_connection(descriptor)
                known.is_late = True
        return cut


def _received_or_none(descriptor: int) -> int | None:
    """Bytes that came over a connection; None if there is no such connection any more."""
    with contextlib.suppress(OSError, struct.error):
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
            return int(_RECEIVED.unpack(info)[0])
        finally:
            peer.detach()
    return None


def _shut_down(descriptor: int, ports: set[int]) -> bool:
    """Whether the connection was one to these ports: the descriptor may be of another by now."""
    with contextlib.suppress(OSError):
        peer = socket.socket(fileno=descriptor)
        try:
            if peer.getsockname()[1] in ports:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.shutdown(socket.SHUT_RDWR)
                return True
        finally:
            peer.detach()
    return False
