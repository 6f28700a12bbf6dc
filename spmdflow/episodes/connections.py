"""Which connections an endpoint has, and which of them are closed. Knows no HTTP.

A new connection is unidentified until a request over it names a running episode. Unidentified
connections have their own limit and a short deadline, so that they never displace an episode's
connections: if there are too many, the oldest one is closed. Each episode has a limit too. When it
ends, its connections become idle and may serve another episode. If there are too many idle
connections, the oldest are closed.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_STRANGERS = 256
MOST_IDLE = 256
"""Maximum number of connections whose episodes have ended."""
MOST_OF_EPISODE = 32
STRANGER_SECONDS = 5.0


class ClientConnection:
    """One client connection."""

    def __init__(self, close: Callable[[], None], deadline: float) -> None:
        """close: closes it at once. deadline: time by which it must send its first valid
        request."""
        self.close = close
        self.deadline: float | None = deadline
        """None: it has sent a valid request."""
        self.episode: str | None = None
        """Id of the running episode that last used it."""


class Connections:
    """All open connections of an endpoint. Used only in the endpoint's thread."""

    def __init__(
        self,
        *,
        most_strangers: int = MOST_STRANGERS,
        most_idle: int = MOST_IDLE,
        most_of_episode: int = MOST_OF_EPISODE,
        stranger_seconds: float = STRANGER_SECONDS,
    ) -> None:
        """stranger_seconds: time within which a new connection must send a valid request."""
        self._stranger_seconds = stranger_seconds
        self._most_strangers = most_strangers
        self._most_idle = most_idle
        self._most_of_episode = most_of_episode
        # dicts are used as ordered sets, oldest first
        self._strangers: dict[ClientConnection, None] = {}
        self._idle: dict[ClientConnection, None] = {}
        self._of_episode: dict[str, dict[ClientConnection, None]] = {}

    def admit(self, close: Callable[[], None], now: float) -> tuple[ClientConnection, bool]:
        """Registers a new connection. Returns it, and whether another one was closed to make
        room."""
        connection = ClientConnection(close, now + self._stranger_seconds)
        self._strangers[connection] = None
        return connection, _close_oldest(self._strangers, self._most_strangers)

    def claim(self, connection: ClientConnection, name: str) -> bool:
        """Assigns a connection to the episode with the id `name`, whose request arrived over it.

        Returns False, and changes nothing, if the episode has its maximum number of connections.
        Otherwise the connection leaves the group that it was in and loses its deadline. True also
        if it belongs to the episode already.
        """
        if connection.episode == name:
            return True
        own = self._of_episode.setdefault(name, {})
        if len(own) >= self._most_of_episode:
            return False
        self.drop(connection)
        own[connection] = None
        connection.episode = name
        connection.deadline = None
        return True

    def end_episode(self, name: str) -> None:
        """Makes the connections of an episode idle, so that other episodes may use them.

        If there are then too many idle connections, the oldest are closed.
        """
        for connection in self._of_episode.pop(name, {}):
            connection.episode = None
            self._idle[connection] = None
        _close_oldest(self._idle, self._most_idle)

    def drop(self, connection: ClientConnection) -> None:
        """Removes a connection from all groups, without closing it.

        It was closed elsewhere, or another episode will own it.
        """
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        if connection.episode is not None:
            self._of_episode[connection.episode].pop(connection, None)

    def close_all(self) -> None:
        """Closes all connections."""
        for group in (self._strangers, self._idle, *self._of_episode.values()):
            for connection in group:
                connection.close()


def _close_oldest(group: dict[ClientConnection, None], limit: int) -> bool:
    """Closes and removes the oldest connections of a group until `limit` are left.

    Returns whether any was closed.
    """
    surplus = list(group)[: max(0, len(group) - limit)]
    for connection in surplus:
        del group[connection]
        connection.close()
    return len(surplus) > 0
