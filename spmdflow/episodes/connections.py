"""Which connections an endpoint has, and which of them have to go. It knows no HTTP.

A new connection is a stranger's until a request over it names a running episode. Strangers are
counted apart and have little time, so that none of them takes a place from an episode: when there
are too many, the oldest one is closed. An episode has a limit of its own. When it ends, its
connections may serve another one; those that do not are closed, the oldest first, when there are
too many of them.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_STRANGERS = 256
MOST_IDLE = 256
"""Connections whose episodes have ended."""
MOST_OF_EPISODE = 32
STRANGER_SECONDS = 5.0


class Connection:
    """One connection."""

    def __init__(self, close: Callable[[], None], deadline: float) -> None:
        """close: ends it at once. deadline: of its first valid request."""
        self.close = close
        self.deadline: float | None = deadline
        """None: it has made a valid request."""
        self.episode: str | None = None
        """Id of the running episode that used it last."""


class Connections:
    """All open connections of an endpoint; belongs to the endpoint's thread."""

    def __init__(
        self,
        *,
        most_strangers: int = MOST_STRANGERS,
        most_idle: int = MOST_IDLE,
        most_of_episode: int = MOST_OF_EPISODE,
        stranger_seconds: float = STRANGER_SECONDS,
    ) -> None:
        """stranger_seconds: until a new connection must have made a valid request."""
        self._stranger_seconds = stranger_seconds
        self._most_strangers = most_strangers
        self._most_idle = most_idle
        self._most_of_episode = most_of_episode
        # dicts as ordered sets: the oldest comes first
        self._strangers: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._of_episode: dict[str, dict[Connection, None]] = {}

    def admit(self, close: Callable[[], None], now: float) -> tuple[Connection, bool]:
        """(a new connection, whether another stranger was closed to make room for it)."""
        connection = Connection(close, now + self._stranger_seconds)
        self._strangers[connection] = None
        return connection, _close_oldest(self._strangers, self._most_strangers)

    def claim(self, connection: Connection, name: str) -> bool:
        """Count a connection for the episode that made a request; False if it has too many."""
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
        """The connections of an episode may serve others from now on."""
        for connection in self._of_episode.pop(name, {}):
            connection.episode = None
            self._idle[connection] = None
        _close_oldest(self._idle, self._most_idle)

    def drop(self, connection: Connection) -> None:
        """Forget a connection, which has ended or changes its owner."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        if connection.episode is not None:
            self._of_episode[connection.episode].pop(connection, None)

    def close_all(self) -> None:
        """End all connections."""
        for group in (self._strangers, self._idle, *self._of_episode.values()):
            for connection in group:
                connection.close()


def _close_oldest(group: dict[Connection, None], most: int) -> bool:
    """Close what is too many; whether any was."""
    surplus = list(group)[: max(0, len(group) - most)]
    for connection in surplus:
        del group[connection]
        connection.close()
    return len(surplus) > 0
