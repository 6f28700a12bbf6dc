"""HTTP at the endpoint: chunks, Expect, many requests on a connection, and what is no HTTP."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from spmdflow.episodes.connections import ConnectionLimits
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.pending import GenerationRequest
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_endpoint import TOKENIZER, WAIT_SECONDS, Agent, answer_from

BODY = b'{"prompt": "a"}'


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint()
    yield opened
    opened.close()


def reply(endpoint: Endpoint, text: str = "b") -> None:
    """Generates the next reply."""
    draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(draw, GenerationRequest)
    draw.done(words(TOKENIZER, text))


def head(agent: Agent, *fields: str) -> bytes:
    lines = [f"POST {agent.path}/completions HTTP/1.1", *agent.head.splitlines(), *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def test_body_in_chunks_is_read(endpoint: Endpoint) -> None:
    agent = Agent(endpoint)
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, BODY[i : i + 1]) for i in range(len(BODY)))
    with agent.connect() as connection:
        connection.sendall(head(agent, "transfer-encoding: chunked") + chunks + b"0\r\n\r\n")
        reply(endpoint)

        assert answer_from(connection)[0] == 200


def test_client_that_expects_to_be_told_to_continue_is_told(endpoint: Endpoint) -> None:
    agent = Agent(endpoint)
    with agent.connect() as connection:
        connection.sendall(head(agent, f"content-length: {len(BODY)}", "expect: 100-continue"))
        told = connection.recv(1 << 16)
        connection.sendall(BODY)
        reply(endpoint)

        assert told.startswith(b"HTTP/1.1 100")
        assert answer_from(connection)[0] == 200


def test_client_that_waits_to_send_too_much_is_refused_before_it_sends(endpoint: Endpoint) -> None:
    agent = Agent(endpoint)
    with agent.connect() as connection:
        connection.sendall(head(agent, f"content-length: {5 << 20}", "expect: 100-continue"))

        status, said = answer_from(connection)

    assert status == 413 and "at most 4194304" in said["error"]["message"]


def test_requests_sent_at_once_over_a_connection_are_answered_in_their_order(
    endpoint: Endpoint,
) -> None:
    agent = Agent(endpoint)
    request = agent.request({"prompt": "a"})
    with agent.connect() as connection:
        connection.sendall(request + request)
        reply(endpoint, "first")
        reply(endpoint, "second")
        received = b""
        while received.count(b"text_completion") < 2:
            received += connection.recv(1 << 16)

    assert received.index(b"first") < received.index(b"second")
    assert len(agent.recorder.segments) == 2


def test_client_that_asks_for_it_has_its_connection_closed(endpoint: Endpoint) -> None:
    agent = Agent(endpoint)
    with agent.connect() as connection:
        connection.sendall(head(agent, f"content-length: {len(BODY)}", "connection: close") + BODY)
        reply(endpoint)

        assert answer_from(connection)[0] == 200
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\n",
        b"\x00\xff\xfe\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: zip\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"A" * 70_000,
    ],
)
def test_what_is_no_http_is_answered_without_a_traceback(
    endpoint: Endpoint, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(endpoint)
    with agent.connect() as connection:
        connection.sendall(data)
        status, said = answer_from(connection)

    assert 400 <= status < 502 and said["error"]["message"]
    assert agent.is_answered()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_idle_connections_beyond_all_slots_keep_no_episode_out() -> None:
    limits = ConnectionLimits(strangers=8, strangers_of_address=8, total=8)
    endpoint = Endpoint(limits=limits)
    idle = Agent(endpoint, 1)
    busy = Agent(endpoint, 2)
    with ExitStack() as opened:
        waiting = opened.enter_context(busy.connect())
        waiting.sendall(busy.request({"prompt": "a"}))
        draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(draw, GenerationRequest)
        for _ in range(3 * limits.total):  # used once, then idle for good
            connection = opened.enter_context(idle.connect())
            connection.sendall(idle.request(b"", route="models"))
            assert answer_from(connection)[0] == 200

        is_answered = Agent(endpoint, 3).is_answered()

        draw.done(words(TOKENIZER, "b"))
        assert answer_from(waiting)[0] == 200  # a connection with a request is never closed
    endpoint.close()

    assert is_answered


def test_strangers_of_one_address_have_a_limit_of_their_own() -> None:
    limits = ConnectionLimits(strangers=8, strangers_of_address=2, stranger_seconds=WAIT_SECONDS)
    endpoint = Endpoint(limits=limits)
    agent = Agent(endpoint)
    with ExitStack() as opened:
        first, *_ = [opened.enter_context(agent.connect()) for _ in range(3)]

        assert first.recv(1) == b""
    endpoint.close()


def test_request_that_never_ends_is_given_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdflow.episodes.http.REQUEST_SECONDS", 0.05)
    agent = Agent(endpoint)
    with agent.connect() as connection:
        connection.sendall(head(agent, "content-length: 9"))

        assert connection.recv(1) == b""


def test_client_that_does_not_read_its_stream_is_given_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdflow.episodes.http.REQUEST_SECONDS", 0.05)
    for listening in endpoint._server.sockets:  # accepted connections inherit the small buffer
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    agent = Agent(endpoint)
    with agent.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.sendall(agent.request({"prompt": "a", "stream": True}))
        draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(draw, GenerationRequest) and draw.progress is not None
        tokens = words(TOKENIZER, "x" * 400_000).tokens.tolist()
        draw.progress(tokens[:-1])

        item = endpoint.inbox.get(timeout=WAIT_SECONDS)

    assert item == draw.identity  # it is abandoned
    assert agent.recorder.segments == []
