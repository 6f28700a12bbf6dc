"""Detects a message that never ends, which a ZeroMQ socket does not report.

libzmq keeps the parts of a message until its last part arrives, without a limit on their number.
But the kernel counts the bytes that a connection received (Linux 4.2, TCP_INFO). A connection that
keeps receiving while none of its messages ends is shut down, which frees the parts.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from dataclasses import dataclass

from spmdflow.message import MAX_MESSAGE_BYTES

_MAX_BYTES = MAX_MESSAGE_BYTES + 2**24
"""Bytes that may arrive before a message ends: the largest message, and its envelope."""
_RECEIVED = struct.Struct("128xQ")
"""tcpi_bytes_received of struct tcp_info."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: when the socket is closed, the sender gets a reset at once."""


@dataclass
class _Connection:
    num_messages: int = 0
    """Messages that had been read when the last check saw new ones."""
    num_bytes: int = 0
    """Bytes that had been received at that check."""
    is_late: bool = False
    """Whether the last check saw too many bytes since then."""


class Inflow:
    """The TCP connections of a socket, by descriptor. Used by one thread at a time."""

    def __init__(self) -> None:
        """Begins without connections."""
        self._connections: dict[int, _Connection] = {}
        self._ranks: dict[int, int] = {}
        """The rank at the other end of a connection. It may precede `add_connection`."""
        self.num_messages: Counter[int] = Counter()
        """Messages that were read, by rank."""

    def add_connection(self, descriptor: int) -> None:
        """Watch a new connection."""
        self._connections[descriptor] = _Connection()

    def remove_connection(self, descriptor: int) -> None:
        """Forget a connection that was closed."""
        self._connections.pop(descriptor, None)

    def set_rank(self, descriptor: int, rank: int) -> None:
        """Note which rank (-1: unknown) a message on this connection came from."""
        if rank >= 0:
            self._ranks[descriptor] = rank

    def cut_endless(self, ports: set[int]) -> list[int]:
        """Shut down connections on which a message never ends; return their ranks (-1: unknown).

        A connection is shut down if at two successive checks more than _MAX_BYTES (the largest
        message and its envelope) had arrived since its rank's last complete message. Only
        connections to `ports` are. Call it each time after reading everything that had arrived, so
        that one with much unread data is not mistaken. Forgets connections that are gone.
        """
        cut = []
        for descriptor, connection in list(self._connections.items()):
            rank = self._ranks.get(descriptor, -1)
            received = _received_or_none(descriptor)
            read = self.num_messages[rank] if rank >= 0 else 0
            if received is None:
                self.remove_connection(descriptor)
            elif read > connection.num_messages:
                connection.num_messages = read
                connection.num_bytes = received
                connection.is_late = False
            elif received > connection.num_bytes + _MAX_BYTES:
                if connection.is_late and _shut_down(descriptor, ports):
                    cut.append(rank)
                    self.remove_connection(descriptor)
                connection.is_late = True
        return cut


def _received_or_none(descriptor: int) -> int | None:
    """Return how many bytes a connection has received (TCP_INFO); None if it no longer exists.

    Does not close the descriptor.
    """
    with contextlib.suppress(OSError, struct.error):
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
            return int(_RECEIVED.unpack(info)[0])
        finally:
            peer.detach()
    return None


def _shut_down(descriptor: int, ports: set[int]) -> bool:
    """Shut down a TCP connection whose local port is in `ports`; return whether that was done.

    False for any other descriptor, because its number may have been reused by now. The sender gets
    a reset when the descriptor is closed. Errors of the system are ignored (False).
    """
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
