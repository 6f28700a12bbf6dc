"""`ScrapeServer`: a thread that answers GET /metrics over HTTP, and everything else with 404.

It knows no metrics: a function gives it the text. One thread serves all connections and never waits
for a client, so a slow one delays nobody. Nothing in a run waits for this thread.

| limit | value |
|---|---|
| open connections; one more closes the oldest | 32 |
| time of a connection, from its start to its end | 10 s |
| bytes of a request | 8 KiB |
| how often the text is written anew | once a second |
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spmdflow.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
MAX_SECONDS = 10.0
MAX_REQUEST_BYTES = 8 << 10
FRESH_SECONDS = 1.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""
_PATH = b"/metrics"
_PLAIN = "text/plain; charset=utf-8"
_CLOSE_SECONDS = 2.0
_NO_DESCRIPTOR_SECONDS = 0.5


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that is bound to an IP address and a port (0: the system chooses one).

    It does not listen yet. OSError if the port is taken, or this node does not have the address.
    """
    is_v6 = ipaddress.ip_address(address).version == 6
    bound = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def address_problem(err: OSError, *, address: str, port: int) -> ConfigError:
    """Return the error for an address or a port of run.metrics_* that cannot be bound."""
    got = f"{port} on {address} ({err.strerror or err})"
    expected = "a port and an address that this node can listen on"
    do = "set run.metrics_port to a free port, 0 (the system chooses) or null (no page), "
    do += "or change run.metrics_address"
    return ConfigError.of("run.metrics_port", got, expected, do)


def check_address(address: str, port: int) -> None:
    """ConfigError unless this process can listen there now. It binds the port, and releases it."""
    try:
        listen(address, port).close()
    except OSError as err:
        raise address_problem(err, address=address, port=port) from err


@dataclass(eq=False)
class _Connection:
    """A client: what it has sent, and what it has not received yet."""

    socket: socket.socket
    deadline: float
    received: bytes = b""
    reply: bytes | None = None
    """None: the request is not complete. b"": everything is sent, the client closes next."""


class ScrapeServer:
    """Serves one page from its construction to `close`."""

    def __init__(
        self,
        address: str,
        port: int,
        write_text: Callable[[], bytes],
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_seconds: float = MAX_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
    ) -> None:
        """Listen and start the thread. OSError if the address cannot be bound.

        write_text: called by the thread; its text is reused for fresh_seconds.
        """
        self._write_text = write_text
        self._max_connections = max_connections
        self._max_seconds = max_seconds
        self._fresh_seconds = fresh_seconds
        self._text = b""
        self._text_until = float("-inf")
        self._has_warned = False
        self._connections: dict[_Connection, None] = {}  # an ordered set, oldest first
        self._listener = listen(address, port)
        self._listener.listen(max_connections)
        self._listener.setblocking(False)
        host, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="metrics page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the port and all connections; waits 2 s at most."""
        with contextlib.suppress(OSError):  # closed before
            self._wake.send(b"x")
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        """Serve clients until `close`, then close everything."""
        try:
            while self._serve_ready_clients():
                self._close_late_clients()
        finally:
            for connection in list(self._connections):
                self._end(connection)
            for each in (self._listener, self._woken, self._wake):
                each.close()
            self._selector.close()

    def _serve_ready_clients(self) -> bool:
        """Wait for clients until the next deadline, and serve those that are ready.

        Returns False after `close`.
        """
        oldest = next(iter(self._connections), None)
        patience = None
        if oldest is not None:
            patience = max(0.0, oldest.deadline - time.monotonic())
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:  # not closed since, to make room
                self._serve(key.data)
        return True

    def _accept(self) -> None:
        """Take one client; if there are too many, close the oldest."""
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone
            return
        except OSError:  # no free descriptor: the client waits, and this thread does not spin
            time.sleep(_NO_DESCRIPTOR_SECONDS)
            return
        client.setblocking(False)
        if len(self._connections) >= self._max_connections:
            self._end(next(iter(self._connections)))
        connection = _Connection(client, time.monotonic() + self._max_seconds)
        self._connections[connection] = None
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection) -> None:
        """Read from a client or send to it, whichever is next. Close it after an error."""
        try:
            if connection.reply:
                self._send(connection)
            else:
                self._receive(connection)
        except BlockingIOError:
            return
        except OSError:
            self._end(connection)

    def _receive(self, connection: _Connection) -> None:
        """Read a piece of the request; once its head is complete, prepare the reply.

        What a client sends after that is dropped, so that it can read the reply before it closes.
        """
        data = connection.socket.recv(MAX_REQUEST_BYTES)
        if not data:
            self._end(connection)
            return
        if connection.reply is not None:
            return
        connection.received += data
        is_complete = b"\r\n\r\n" in connection.received or b"\n\n" in connection.received
        if is_complete or len(connection.received) > MAX_REQUEST_BYTES:
            connection.reply = self._reply(connection.received if is_complete else b"")
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _send(self, connection: _Connection) -> None:
        """Send as much of the reply as the client takes now; after its end, wait for the client."""
        assert connection.reply
        sent = connection.socket.send(connection.reply)
        connection.reply = connection.reply[sent:]
        if not connection.reply:
            connection.socket.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _close_late_clients(self) -> None:
        """Close the connections whose time is over."""
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.deadline > now:
                return
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """Close a connection."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection]

    def _reply(self, request: bytes) -> bytes:
        """Return the reply to a request: the text for GET /metrics, otherwise 404."""
        if not _asks_for_metrics(request):
            return _response("404 Not Found", _PLAIN, b"only GET /metrics is answered\n")
        now = time.monotonic()
        if now >= self._text_until:
            try:
                self._text = self._write_text()
            except Exception as err:  # of the library too: the thread goes on
                self._warn_once(err)
                return _response("500 Internal Server Error", _PLAIN, b"see the log of the run\n")
            self._text_until = now + self._fresh_seconds
        return _response("200 OK", CONTENT_TYPE, self._text)

    def _warn_once(self, err: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = f"{type(err).__name__}: {err}"
            logger.warning("warning: %s cannot be written: %s", self.url, text)


def _asks_for_metrics(request: bytes) -> bool:
    """Whether the first line of a request is GET /metrics; a query after ? is ignored."""
    words = request.partition(b"\n")[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return False
    return words[0] == b"GET" and words[1].partition(b"?")[0] == _PATH


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
