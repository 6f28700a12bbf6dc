"""The HTTP side of published weights: what is asked, and what is said when it is refused."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.serving.server import VllmServer


@contextmanager
def listening(status: int, answer: str) -> Iterator[tuple[str, list[tuple[str, str, object]]]]:
    """A server that gives one answer to all; its address, and what it was asked."""
    asked: list[tuple[str, str, object]] = []

    class Routes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.command, self.path, json.loads(body) if body else None))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Routes)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_each_call_is_the_route_and_body_that_vllm_takes() -> None:
    with listening(200, '{"world_size": 4}') as (url, asked):
        server = VllmServer(url + "/", seconds=60)
        workers = server.num_workers()
        server.init_weight_transfer_engine({"facts": {"port": 1}})
        server.pause()
        server.start_weight_update()
        server.update_weights({"facts": {}})
        server.finish_weight_update("7")
        server.resume()

    assert workers == 4
    assert asked == [
        ("GET", "/get_world_size", None),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"facts": {"port": 1}}}),
        ("POST", "/pause?mode=wait&clear_cache=true", None),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"facts": {}}}),
        ("POST", "/finish_weight_update", {"weight_version": "7"}),
        ("POST", "/resume", None),
    ]


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (404, '{"detail":"Not Found"}', r"got status 404: .*Not Found.* from /start_weight_update"),
        (500, "no backend", "got status 500: no backend from /start_weight_update"),
        (200, "<html>", "got Expecting value.* from /start_weight_update"),
    ],
)
def test_refusal_says_what_came_and_how_to_start_a_server(
    status: int, answer: str, problem: str
) -> None:
    with listening(status, answer) as (url, _):
        with pytest.raises(WeightSyncError, match=problem) as caught:
            VllmServer(url, seconds=60).start_weight_update()

    assert "VLLM_SERVER_DEV_MODE=1" in str(caught.value)
    assert '{"backend": "spmdflow"}' in str(caught.value)


def test_server_that_is_not_there_is_an_error_that_names_it() -> None:
    with socket.socket() as held:  # nobody else is given its port, and nobody listens there
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        with pytest.raises(WeightSyncError, match=f"weight server {url}: got .*refused"):
            VllmServer(url, seconds=60).num_workers()


@pytest.mark.parametrize("url", ["localhost:8000", "tcp://host:1", "http://"])
def test_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        VllmServer(url, seconds=60)
