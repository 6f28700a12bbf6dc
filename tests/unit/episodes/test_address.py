"""The endpoint at an address that other machines reach: TLS, keys, and what is refused."""

from __future__ import annotations

import asyncio
import http.client
import logging
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from spmdflow.config.endpoint import EndpointConfig, check_endpoint
from spmdflow.envs.client import CERTIFICATE_VARIABLE, ChatClient
from spmdflow.episodes.address import EndpointAddress, open_address
from spmdflow.episodes.connections import ConnectionLimits
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.pending import GenerationRequest
from spmdflow.errors import ConfigError
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_endpoint import TOKENIZER, WAIT_SECONDS, Agent

KEY = "actor.rollout.episode.endpoint"
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the program openssl is not installed"
)


def address_of_this_machine() -> str:
    """An address that is not loopback. Skips the test if the machine has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@contextmanager
def opened(limits: ConnectionLimits | None = None, **settings: Any) -> Iterator[Endpoint]:
    """An endpoint with these settings."""
    endpoint = Endpoint(address=open_address(EndpointConfig(**settings)), limits=limits)
    try:
        yield endpoint
    finally:
        endpoint.close()


def trusting(address: EndpointAddress) -> ssl.SSLContext:
    """What a client has that was given the certificate, with the strictest checks."""
    context = ssl.create_default_context(cafile=address.certificate_path)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


class SecureAgent(Agent):
    """The client of an episode, over TLS, to the host of its URL."""

    def connect(self) -> socket.socket:
        host = self.endpoint._address.url.partition("://")[2].rpartition(":")[0]
        plain = socket.create_connection((host, self.port), WAIT_SECONDS)
        context = trusting(self.endpoint._address)
        return context.wrap_socket(plain, server_hostname=host)


def reply_to_next(endpoint: Endpoint, text: str) -> None:
    """Generates the next reply."""
    draw = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(draw, GenerationRequest)
    draw.done(words(TOKENIZER, text))


@needs_openssl
def test_clients_of_another_address_are_answered_over_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = address_of_this_machine()
    ask: list[Any] = [{"role": "user", "content": "a"}]
    with opened(address="0.0.0.0", certificate="self-signed") as endpoint:
        agent = SecureAgent(endpoint)
        _, told = endpoint.open(1, agent.recorder)
        monkeypatch.setenv(CERTIFICATE_VARIABLE, str(endpoint._address.certificate_path))

        async def chat() -> Any:
            async with ChatClient(**told) as client:
                return await client.chat(ask)

        replies = []
        for text in ("b", "c"):
            thread = threading.Thread(target=reply_to_next, args=(endpoint, text), daemon=True)
            thread.start()
            if text == "b":
                replies.append(asyncio.run(chat())["content"])
                continue
            trusted = httpx.Client(verify=trusting(endpoint._address))
            with openai.OpenAI(
                base_url=told["base_url"], api_key=told["api_key"], http_client=trusted
            ) as client:
                done = client.chat.completions.create(model="policy", messages=ask)
                replies.append(done.choices[0].message.content)

    assert told["base_url"].startswith(f"https://{host}:{endpoint.port}/episodes/")
    assert replies == ["b", "c"]


@needs_openssl
def test_beyond_loopback_every_request_needs_the_key_of_its_episode() -> None:
    address = address_of_this_machine()
    with opened(address=address, certificate="self-signed") as endpoint:
        agent = SecureAgent(endpoint)
        other = SecureAgent(endpoint, 1)
        right = agent.head
        statuses = {}
        messages = {}
        for name, head in {
            "none": right.partition("\r\n")[0] + "\r\n",
            "wrong": right[:-4] + "xx\r\n",
            "another's": other.head,
        }.items():
            agent.head = head
            statuses[name], said = agent.ask({"prompt": "a"})
            messages[name] = said["error"]["message"]
        agent.head = right
        is_answered = agent.is_answered()

    assert statuses == {"none": 401, "wrong": 401, "another's": 401}
    assert "no key" in messages["none"] and "api_key" in messages["none"]
    assert is_answered


def test_on_loopback_the_id_is_enough_and_behind_a_public_url_it_is_not() -> None:
    statuses = []
    for url in (None, "http://localhost:{port}"):
        with opened(public_url=url) as endpoint:
            agent = Agent(endpoint)
            agent.head = agent.head.partition("\r\n")[0] + "\r\n"
            statuses.append(agent.ask(b"[")[0])

    assert statuses == [400, 401]


@needs_openssl
def test_plain_http_at_a_tls_port_is_closed_and_the_log_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened(certificate="self-signed") as endpoint:
        for _ in range(3):
            agent = Agent(endpoint)
            with agent.connect() as connection:
                connection.sendall(agent.request({"prompt": "a"}))
                received = read_to_end(connection)
            assert b"HTTP/" not in received
        is_answered = SecureAgent(endpoint).is_answered()

    assert is_answered
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "could not begin TLS" in record.getMessage()
    assert "https URL" in record.getMessage() and record.exc_info is None


def read_to_end(connection: socket.socket) -> bytes:
    """What a server sends before it closes the connection."""
    received = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionError:
            return received
        if not part:
            return received
        received += part


@needs_openssl
@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02"])
def test_client_that_is_slow_to_begin_tls_is_closed(data: bytes) -> None:
    limits = ConnectionLimits(stranger_seconds=0.05)
    with opened(limits, certificate="self-signed") as endpoint:
        with socket.create_connection(("127.0.0.1", endpoint.port), WAIT_SECONDS) as connection:
            connection.sendall(data)

            received = read_to_end(connection)

    assert received == b""


@needs_openssl
def test_handshakes_of_one_address_count_against_its_limit() -> None:
    limits = ConnectionLimits(strangers=8, strangers_of_address=2, stranger_seconds=WAIT_SECONDS)
    with ExitStack() as stack:
        endpoint = stack.enter_context(opened(limits, certificate="self-signed"))
        connections = []
        for _ in range(3):
            connection = socket.create_connection(("127.0.0.1", endpoint.port), WAIT_SECONDS)
            connections.append(stack.enter_context(connection))

        assert read_to_end(connections[0]) == b""
        assert SecureAgent(endpoint).is_answered()


@needs_openssl
def test_self_signed_certificate_leaves_no_key_and_no_file() -> None:
    with opened(certificate="self-signed", public_url="https://box.example:{port}") as endpoint:
        address = endpoint._address
        assert address.folder is not None
        names = [each.name for each in address.folder.iterdir()]
        mode = address.folder.stat().st_mode & 0o777
        context = trusting(address)
        plain = socket.create_connection(("127.0.0.1", endpoint.port), WAIT_SECONDS)
        with context.wrap_socket(plain, server_hostname="box.example") as connection:
            version = connection.version()
        url = address.url

    assert (names, mode) == (["cert.pem"], 0o700)
    assert version == "TLSv1.3" and url == f"https://box.example:{endpoint.port}"
    assert not address.folder.exists()


@needs_openssl
def test_certificate_of_the_settings_is_used(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    certificate = tmp_path / "cert.pem"
    settings = {"certificate": str(certificate), "private_key": str(tmp_path / "key.pem")}
    with opened(address="localhost", **settings) as endpoint:
        agent = Agent(endpoint)
        context = ssl.create_default_context(cafile=str(certificate))
        secure = http.client.HTTPSConnection("localhost", endpoint.port, context=context)
        secure.request("GET", f"{agent.path}/models")
        status = secure.getresponse().status
        secure.close()
        told = endpoint._address.certificate_path

    assert status == 200
    assert told is None  # it is the user's, who knows who trusts it
    with pytest.raises(ConfigError, match=r"cannot be used .*expected a certificate and its key"):
        open_address(EndpointConfig(certificate=str(certificate)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "0.0.0.0"}, r"certificate: got null with .*address=0.0.0.0, expected TLS"),
        (
            {"address": "gpu7"},
            r"set .*certificate to a PEM file or to self-signed, or .*plain_text",
        ),
        ({"private_key": "k.pem"}, r"private_key: got k.pem with .*certificate=null"),
        ({"certificate": "no.pem"}, r"certificate: got 'no.pem', which is no file"),
        ({"public_url": "box:80"}, r"public_url: got 'box:80', expected a URL"),
        ({"public_url": "https://a:{ports}"}, r"public_url: .*\{host\} and \{port\} become"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_words(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_endpoint(KEY, EndpointConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"address": "::1"},
        {"address": "0.0.0.0", "plain_text": True},
        {"address": "0.0.0.0", "certificate": "self-signed"},
        {"public_url": "https://box.example:{port}/episodes-of-{host}"},
    ],
)
def test_settings_that_fit_are_taken(settings: dict[str, Any]) -> None:
    check_endpoint(KEY, EndpointConfig(**settings))


def test_ranks_of_a_node_take_ports_in_order_and_a_taken_one_is_named() -> None:
    with ExitStack() as stack:
        first = open_address(EndpointConfig())
        stack.enter_context(first.listener).listen()
        cfg = EndpointConfig(port=first.port - 1)
        with pytest.raises(ConfigError, match=rf"port: got {first.port}, which another program"):
            open_address(cfg, 1)
        with pytest.raises(ConfigError, match="port would be 65536, expected ports up to 65535"):
            open_address(EndpointConfig(port=65535), 1)
        with pytest.raises(ConfigError, match=r"address: got 192\.0\.2\.77:0 .*set .*=0\.0\.0\.0"):
            open_address(EndpointConfig(address="192.0.2.77"))


def test_rank_on_its_node_is_counted_from_the_first_rank_of_the_node() -> None:
    layout = Layout.data_parallel((0, 1, 2, 3))
    cpu = torch.device("cpu")
    numbers = []
    for rank in range(4):
        context = WorkerContext("actor", layout, rank, GroupTable(rank), cpu, 0, nodes=(0, 1, 1, 0))
        numbers.append(context.rank_on_node)

    assert numbers == [0, 0, 1, 1]


def test_ipv6_address_is_written_into_the_url_in_brackets() -> None:
    try:
        address = open_address(EndpointConfig(address="::1"))
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with address.listener:
        assert address.url == f"http://[::1]:{address.port}"
