"""The endpoint over real sockets: what a request, a client or a stranger cannot do."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.connections import (
    ConnectionLimits,
    Connections,
)
from spmdflow.episodes.endpoint import (
    AbandonedRequest,
    Endpoint,
    EpisodeFault,
    GenerationRequest,
)
from spmdflow.episodes.recorder import Limits, Recorder
from spmdflow.rollout.vllm_tools import CallReader
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_conversation import text_tokenizer

TOKENIZER = text_tokenizer()
WAIT_SECONDS = 100.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint()
    yield opened
    opened.close()


class Agent:
    """The client of one episode."""

    def __init__(
        self, endpoint: Endpoint, number: int = 0, *, read_calls: CallReader | None = None
    ) -> None:
        limits = Limits(
            max_turns=900,
            max_prompt_tokens=900,
            max_new_tokens=2000,
            may_fork=True,
            vocab_size=len(TOKENIZER),
        )
        ends = (TOKENIZER.eos_token_id,)
        self.recorder = Recorder(ChatTemplate(TOKENIZER), ends, limits, read_calls)
        self.endpoint = endpoint
        self.name, told = endpoint.open(number, self.recorder)
        place = urlsplit(told["base_url"])
        assert place.port is not None
        self.port = place.port
        self.path = place.path
        self.head = f"host: {place.netloc}\r\nauthorization: Bearer {told['api_key']}\r\n"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_SECONDS)

    def request(
        self, body: object, *, route: str = "completions", size: str | None = None
    ) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = str(len(data)) if size is None else size
        first = f"POST {self.path}/{route} HTTP/1.1\r\n{self.head}"
        return f"{first}content-length: {length}\r\n\r\n".encode("latin-1") + data

    def ask(self, body: object, *, route: str = "completions", size: str | None = None) -> Any:
        """(status, JSON) of the answer to a request that is refused."""
        with self.connect() as connection:
            connection.sendall(self.request(body, route=route, size=size))
            return answer_from(connection)

    def is_answered(self) -> bool:
        """Whether a good request is drawn and answered."""
        with self.connect() as connection:
            connection.sendall(self.request({"prompt": "a"}))
            draw = self.endpoint.inbox.get(timeout=WAIT_SECONDS)
            assert isinstance(draw, GenerationRequest)
            draw.done(words(TOKENIZER, "b"))
            return bool(answer_from(connection)[0] == 200)


def answer_from(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def is_readable(endpoint: Endpoint) -> bool:
    return bool(select.select([endpoint.wake], [], [], 0.0)[0])


def test_reader_is_woken_again_for_what_comes_after_it_has_taken_all(endpoint: Endpoint) -> None:
    for _ in range(2):
        for _ in range(3):
            endpoint.notify()
        assert is_readable(endpoint)

        assert endpoint.take_all() == []
        assert not is_readable(endpoint)


@pytest.mark.parametrize("token", [10_000, 2**31, 2**63, 2**70])
def test_token_id_beyond_the_vocabulary_is_answered_with_400(
    endpoint: Endpoint, token: int
) -> None:
    agent = Agent(endpoint)

    status, said = agent.ask({"prompt": [1, token], "max_tokens": 1})

    last = len(TOKENIZER) - 1
    assert status == 400
    assert f"got the token id {token}, expected ids from 0 to {last}" in said["error"]["message"]
    assert endpoint.inbox.empty() and agent.recorder.num_turns == 0
    assert agent.is_answered()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"prompt": ' + b"[" * 200_000,
        b"[]",
        b'"prompt"',
        b"\xff\xfe",
        b"9" * 5000,
    ],
)
def test_request_that_cannot_be_read_is_answered_with_400_and_counted(
    endpoint: Endpoint, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(endpoint)

    status, said = agent.ask(body)

    assert status == 400 and said["error"]["message"]
    assert endpoint._episodes[agent.name].refused == 1
    assert agent.is_answered()
    assert [record.exc_info for record in caplog.records if record.exc_info] == []


def test_error_that_no_request_should_cause_is_logged_answered_and_named_as_the_cause(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    def read_calls(raw: str, tools: list[Any]) -> tuple[str, list[Any]]:
        raise RuntimeError("a parser with a fault")

    agent = Agent(endpoint, 7, read_calls=read_calls)
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    with agent.connect() as connection:
        connection.sendall(agent.request(body, route="chat/completions"))
        draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(draw, GenerationRequest)

        draw.done(words(TOKENIZER, "b"))

        status, said = answer_from(connection)
    fault = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(fault, EpisodeFault)
    assert (fault.number, fault.name) == (7, agent.name)
    assert "RuntimeError: a parser with a fault" in fault.cause
    assert status == 500 and "a parser with a fault" in said["error"]["message"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "a parser with a fault" in record.getMessage() and record.exc_info


def test_request_that_the_generator_does_not_take_fails_its_episode_with_the_cause(
    endpoint: Endpoint,
) -> None:
    agent = Agent(endpoint, 7)
    neighbour = Agent(endpoint, 8)
    with agent.connect() as connection:
        connection.sendall(agent.request({"prompt": "a"}))
        draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(draw, GenerationRequest)

        draw.fail(OverflowError("no room"))

        status, said = answer_from(connection)
    fault = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(fault, EpisodeFault)
    assert fault.number == 7 and "OverflowError: no room" in fault.cause
    assert status == 500 and "OverflowError: no room" in said["error"]["message"]
    assert neighbour.is_answered()


def test_reply_to_a_client_that_has_left_is_not_recorded(endpoint: Endpoint) -> None:
    agent = Agent(endpoint)
    connection = agent.connect()
    connection.sendall(agent.request({"prompt": "a"}))
    draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(draw, GenerationRequest)
    connection.close()
    for _ in range(3):  # turns of the loop: it has read the end of the connection then
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), endpoint._loop).result(WAIT_SECONDS)

    draw.done(words(TOKENIZER, "unheard"))

    left = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert left == AbandonedRequest(draw.number, draw.name, draw.turn)
    assert agent.is_answered()
    (segment,) = agent.recorder.segments
    assert TOKENIZER.decode(segment.tokens[:-1]) == "b"


def test_idle_strangers_keep_no_episode_out() -> None:
    endpoint = Endpoint(limits=ConnectionLimits(stranger_seconds=WAIT_SECONDS))
    agent = Agent(endpoint)
    with ExitStack() as strangers:
        for _ in range(ConnectionLimits.strangers + 50):
            strangers.enter_context(agent.connect())
        is_answered = agent.is_answered()
    endpoint.close()

    assert is_answered


def test_stranger_who_says_nothing_is_closed() -> None:
    endpoint = Endpoint(limits=ConnectionLimits(stranger_seconds=0.05))
    with Agent(endpoint).connect() as stranger:
        received = stranger.recv(1)
    endpoint.close()

    assert received == b""  # closed by the endpoint: it sent nothing


def test_connection_of_an_episode_has_no_deadline_and_is_no_stranger() -> None:
    closed: list[str] = []
    connections = Connections(ConnectionLimits(strangers=1, stranger_seconds=5.0))
    first, _ = connections.admit(lambda: closed.append("first"), 100.0)
    assert first.deadline == 105.0

    assert connections.claim(first, "episode")
    connections.admit(lambda: closed.append("second"), 101.0)
    connections.admit(lambda: closed.append("third"), 102.0)

    assert first.deadline is None
    assert closed == ["second"]


def test_episode_that_leaks_connections_is_told_so_and_shuts_no_neighbour_out(
    endpoint: Endpoint,
) -> None:
    agent = Agent(endpoint, 7)
    neighbour = Agent(endpoint, 8)
    with ExitStack() as leaked:
        for _ in range(ConnectionLimits.of_episode):
            connection = leaked.enter_context(agent.connect())
            connection.sendall(agent.request(b"", route="models"))
            assert answer_from(connection)[0] == 200

        status, said = agent.ask(b"[")

        assert status == 429
        assert "more than 128 open connections of one episode" in said["error"]["message"]
        assert neighbour.is_answered()
        for _ in range(100):
            agent.ask(b"[")
    fault = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(fault, EpisodeFault)
    assert fault.number == 7 and "more than 128 open connections" in fault.cause


def test_connections_of_an_ended_episode_serve_the_next_one(endpoint: Endpoint) -> None:
    first = Agent(endpoint, 1)
    second = Agent(endpoint, 2)
    with first.connect() as connection:
        connection.sendall(first.request(b"["))
        assert answer_from(connection)[0] == 400
        endpoint.forget(first.name)

        connection.sendall(second.request(b"["))

        assert answer_from(connection)[0] == 400
    assert endpoint._episodes[second.name].refused == 1


def test_warnings_that_strangers_cause_are_logged_once_in_a_while(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(endpoint)
    agent.path = "/episodes/unknown/v1"
    agent.head = "host: localhost\r\n"

    answers = [agent.ask({"prompt": "a"})[0] for _ in range(20)]

    assert answers == [404] * 20
    (record,) = caplog.records
    assert "asked for an episode that is not its own" in record.getMessage()


def test_long_parts_of_a_request_are_shortened_in_answers_and_in_the_log(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(endpoint)
    long = "x" * 1_000_000

    status, said = agent.ask({"prompt": "a", "n": long, long: 1})

    assert status == 400 and len(said["error"]["message"]) < 1100
    assert max(len(record.getMessage()) for record in caplog.records) < 300
