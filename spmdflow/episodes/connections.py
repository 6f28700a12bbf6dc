"""Which connections an endpoint has, and which of them are closed. Knows no HTTP.

A new connection is unidentified until a request over it names a running episode. Unidentified
connections have a short deadline and their own limits, of one address and in all, so that they
never displace an episode's connections: if there are too many, the oldest one is closed. Each
episode has a limit too. When it ends, its connections become idle and may serve another episode. If
there are too many idle connections, the oldest are closed.

There is a limit of all connections together, because each needs a descriptor of the process. A new
connection beyond it closes one on which no request is under way: an unidentified one, otherwise one
whose episode has ended, otherwise the one that has been idle for longest. If there is none, the new
connection is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections of each kind an endpoint has."""

    strangers: int = 1024
    """Without a valid request."""
    strangers_of_address: int = 768
    """The same, from one address."""
    idle: int = 256
    """Whose episodes have ended."""
    of_episode: int = 128
    total: int = 4096
    stranger_seconds: float = 5.0
    """Time within which a new connection must send a valid request."""


class ClientConnection:
    """One client connection."""

    def __init__(self, close: Callable[[], None], deadline: float, address: str) -> None:
        """close: closes it at once. deadline: time by which it must send its first valid
        request."""
        self.close = close
        self.deadline: float | None = deadline
        """None: it has sent a valid request."""
        self.address = address
        self.episode: str | None = None
        """Id of the running episode that last used it."""


class Connections:
    """All open connections of an endpoint. Used only in the endpoint's thread."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # dicts are used as ordered sets, oldest first
        self._strangers: dict[ClientConnection, None] = {}
        self._idle: dict[ClientConnection, None] = {}
        self._of_episode: dict[str, dict[ClientConnection, None]] = {}
        self._resting: dict[ClientConnection, None] = {}
        """Connections of running episodes without a request under way, idle for longest first."""

    def __len__(self) -> int:
        """Number of open connections."""
        own = sum(map(len, self._of_episode.values()))
        return len(self._strangers) + len(self._idle) + own

    def admit(
        self, close: Callable[[], None], now: float, address: str = ""
    ) -> tuple[ClientConnection, bool]:
        """Registers a new connection. Returns it, and whether one was closed because of it.

        That one may be the new connection itself.
        """
        limits = self._limits
        connection = ClientConnection(close, now + limits.stranger_seconds, address)
        self._strangers[connection] = None
        closed = False
        if len(self._strangers) > limits.strangers_of_address:
            neighbours: dict[ClientConnection, None] = {}
            for stranger in self._strangers:
                if stranger.address == address:
                    neighbours[stranger] = None
            closed |= self._close_oldest(neighbours, limits.strangers_of_address)
        closed |= self._close_oldest(self._strangers, limits.strangers)
        if len(self) > limits.total:
            oldest = next(iter(self._strangers))
            others = [*self._idle, *self._resting]
            self._close_one(others[0] if oldest is connection and others else oldest)
            closed = True
        return connection, closed

    def claim(self, connection: ClientConnection, name: str) -> bool:
        """Assigns a connection to the episode with the id `name`, whose request arrived over it.

        Returns False, and changes nothing, if the episode has its maximum number of connections.
        Otherwise the connection leaves the group that it was in and loses its deadline. True also
        if it belongs to the episode already.
        """
        if connection.episode == name:
            self._resting.pop(connection, None)
            return True
        own = self._of_episode.setdefault(name, {})
        if len(own) >= self._limits.of_episode:
            return False
        self.drop(connection)
        own[connection] = None
        connection.episode = name
        connection.deadline = None
        return True

    def rest(self, connection: ClientConnection) -> None:
        """Records that the request of a connection has been answered."""
        if connection.episode is not None:
            self._resting[connection] = None

    def end_episode(self, name: str) -> None:
        """Makes the connections of an episode idle, so that other episodes may use them.

        If there are then too many idle connections, the oldest are closed.
        """
        for connection in self._of_episode.pop(name, {}):
            connection.episode = None
            self._resting.pop(connection, None)
            self._idle[connection] = None
        self._close_oldest(self._idle, self._limits.idle)

    def drop(self, connection: ClientConnection) -> None:
        """Removes a connection from all groups, without closing it.

        It was closed elsewhere, or another episode will own it.
        """
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        self._resting.pop(connection, None)
        if connection.episode is not None:
            self._of_episode[connection.episode].pop(connection, None)

    def close_all(self) -> None:
        """Closes all connections."""
        for group in (self._strangers, self._idle, *self._of_episode.values()):
            for connection in group:
                connection.close()

    def _close_oldest(self, group: dict[ClientConnection, None], limit: int) -> bool:
        """Closes the oldest connections of a group until `limit` are left.

        Returns whether any was closed.
        """
        surplus = list(islice(group, max(0, len(group) - limit)))
        for connection in surplus:
            self._close_one(connection)
        return len(surplus) > 0

    def _close_one(self, connection: ClientConnection) -> None:
        self.drop(connection)
        connection.episode = None
        connection.close()
