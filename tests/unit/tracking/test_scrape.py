"""The thread that serves /metrics: what it answers, and what clients cannot do to it."""

from __future__ import annotations

import http.client
import logging
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from spmdflow.errors import ConfigError
from spmdflow.tracking.scrape import CONTENT_TYPE, ScrapeServer, check_address

LIMIT = 60.0
"""Seconds after which a wait counts as hung."""
Serve = Callable[..., ScrapeServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers on ports that the system chooses, and closes them."""
    servers = []

    def start(write_text: Callable[[], bytes] = lambda: b"x 1\n", **limits: float) -> ScrapeServer:
        server = ScrapeServer("127.0.0.1", 0, write_text, **limits)  # type: ignore[arg-type]
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def request(server: ScrapeServer, path: str = "/metrics", **more: str) -> tuple[int, bytes]:
    """(status, body) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT)
    connection.request(more.get("method", "GET"), path, body=more.get("body"))
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body


def connect(server: ScrapeServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT)


def read_to_end(client: socket.socket) -> bytes:
    """What the server sends until it closes; b"" also if it resets the connection."""
    data = b""
    try:
        while piece := client.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


def test_metrics_are_answered_as_text_of_prometheus(serve: Serve) -> None:
    server = serve()

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT)
    connection.request("GET", "/metrics")
    reply = connection.getresponse()

    assert (reply.status, reply.read()) == (200, b"x 1\n")
    assert reply.headers["Content-Type"] == CONTENT_TYPE
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert request(server, "/metrics?from=prometheus") == (200, b"x 1\n")


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/metrics/../x", "//metrics", "/%"])
def test_other_paths_are_not_found(serve: Serve, path: str) -> None:
    status, body = request(serve(), path)

    assert (status, body) == (404, b"only GET /metrics is answered\n")


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_not_found(serve: Serve, method: str) -> None:
    status, _ = request(serve(), method=method, body="a=1" * 1000)

    assert status == 404


@pytest.mark.parametrize(
    "data",
    [
        b"\n\n",
        b"GET /metrics\r\n\r\n",
        b"get /metrics HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\n\n",
        b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 20_000,
    ],
)
def test_what_is_no_request_for_metrics_is_not_found(serve: Serve, data: bytes) -> None:
    with connect(serve()) as client:
        client.sendall(data)

        assert read_to_end(client).startswith(b"HTTP/1.1 404 Not Found\r\n")


def test_request_in_pieces_is_answered(serve: Serve) -> None:
    with connect(serve()) as client:
        for piece in (b"GET /met", b"rics HTT", b"P/1.1\r\n\r", b"\n"):
            client.sendall(piece)

        assert read_to_end(client).endswith(b"\r\n\r\nx 1\n")


def test_slow_clients_do_not_delay_the_next_scrape(serve: Serve) -> None:
    text = b"x 1\n" * 4_000_000  # larger than what the kernel takes of a reply that nobody reads
    server = serve(lambda: text, max_seconds=LIMIT)
    silent = connect(server)
    unfinished = connect(server)
    unfinished.sendall(b"GET /metrics HTTP/1.1\r\n")
    unread = connect(server)
    unread.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert unread.recv(1), "its reply has begun"

    assert request(server) == (200, text)

    for client in (silent, unfinished, unread):
        client.close()


def test_connection_is_closed_when_its_time_is_over_whatever_it_sends(serve: Serve) -> None:
    server = serve(max_seconds=0.3)
    silent = connect(server)
    dripping = connect(server)
    is_open = True
    until = time.monotonic() + LIMIT
    while is_open:
        assert time.monotonic() < until
        try:
            dripping.sendall(b"x")
            time.sleep(0.05)
        except OSError:
            is_open = False

    assert read_to_end(silent) == b""
    for client in (silent, dripping):
        client.close()


def test_one_connection_too_many_closes_the_oldest(serve: Serve) -> None:
    server = serve(max_connections=3, max_seconds=LIMIT)
    clients = []
    for _ in range(3):
        clients.append(connect(server))

    assert request(server) == (200, b"x 1\n")

    assert read_to_end(clients[0]) == b""
    clients[2].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert read_to_end(clients[2]).endswith(b"x 1\n")
    for client in clients:
        client.close()


def test_text_is_written_once_for_scrapes_that_follow_each_other(serve: Serve) -> None:
    written = []

    def write_text() -> bytes:
        written.append(None)
        return b"x %d\n" % len(written)

    kept = serve(write_text, fresh_seconds=LIMIT)
    assert [request(kept)[1], request(kept)[1]] == [b"x 1\n", b"x 1\n"]

    fresh = serve(write_text, fresh_seconds=0.0)
    assert [request(fresh)[1], request(fresh)[1]] == [b"x 2\n", b"x 3\n"]


def test_text_that_cannot_be_written_is_status_500_with_one_warning_and_the_thread_goes_on(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    texts = iter([ValueError("no number"), ValueError("again"), b"x 1\n"])

    def write_text() -> bytes:
        text = next(texts)
        if isinstance(text, Exception):
            raise text
        return text

    server = serve(write_text)
    with caplog.at_level(logging.WARNING):
        statuses = [request(server)[0] for _ in range(3)]

    assert statuses == [500, 500, 200]
    (message,) = caplog.messages
    assert message == f"warning: {server.url} cannot be written: ValueError: no number"


def test_port_in_use_is_refused_with_what_to_set(serve: Serve) -> None:
    server = serve()

    with pytest.raises(ConfigError) as caught:
        check_address("127.0.0.1", server.port)

    said = str(caught.value)
    assert said.startswith(f"run.metrics_port: got {server.port} on 127.0.0.1 (Address already in")
    assert "expected a port and an address that this node can listen on" in said
    assert "; set run.metrics_port to a free port" in said


def test_address_of_another_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 9400 on 203\.0\.113\.1 \(Cannot assign requested"):
        check_address("203.0.113.1", 9400)


def test_closed_server_frees_its_port_and_ends_its_connections(serve: Serve) -> None:
    server = serve()
    client = connect(server)
    assert request(server)[0] == 200

    server.close()
    server.close()

    assert read_to_end(client) == b""
    check_address("127.0.0.1", server.port)
    again = ScrapeServer("127.0.0.1", server.port, lambda: b"y 2\n")
    assert request(again) == (200, b"y 2\n")
    again.close()
    client.close()


def test_address_counts_as_free_while_others_check_it_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    bound = []
    for _ in range(3):
        check_address("127.0.0.1", port)
        bound.append(socket.socket())
        bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound[-1].bind(("127.0.0.1", port))

    for each in bound:
        each.close()
