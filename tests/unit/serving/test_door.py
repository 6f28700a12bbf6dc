"""The door of a server: its key on every route, its own routes, and the version of the weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from spmdflow.serving.door import Door
from spmdflow.serving.settings import GENERATE

KEY = "k" * 32
GOOD = {"authorization": f"Bearer {KEY}"}
VLLM_ROUTES = ["/pause", "/resume", "/sleep", "/collective_rpc", "/update_weights", "/v1/models"]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """What stands behind the door: answers 200 to everything."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"reached"})


def ask(
    door: Door, path: str, headers: Mapping[str, str], *, method: str = "POST", body: bytes = b"{}"
) -> tuple[int, bytes]:
    """Make a request; return status and body."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    state = SimpleNamespace(state=SimpleNamespace(engine_client=None))
    scope = {"type": "http", "path": path, "method": method, "headers": pairs, "app": state}
    asyncio.run(door(scope, receive, send))
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)


@pytest.mark.parametrize("path", [*VLLM_ROUTES, GENERATE, "/health", "/spmdflow/switch"])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer x"}, {"authorization": KEY}])
def test_no_route_answers_without_the_key(path: str, headers: dict[str, str]) -> None:
    status, body = ask(Door(application, KEY), path, headers)

    assert status == 401
    assert b"reached" not in body


@pytest.mark.parametrize("path", [*VLLM_ROUTES, GENERATE, "/health"])
def test_routes_of_vllm_are_reached_with_the_key(path: str) -> None:
    assert ask(Door(application, KEY), path, GOOD) == (200, b"reached")


def test_rows_for_other_weights_are_refused_with_both_versions() -> None:
    status, body = ask(Door(application, KEY), GENERATE, {**GOOD, "x-spmdflow-version": "ab:3"})

    assert status == 409
    assert json.loads(body)["error"] == "weights :-1, not ab:3"


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"{", "no JSON"), (b"[]", "no JSON object"), (b"{}", "KeyError"), (b"[" * 9999, "no JSON")],
)
def test_a_body_that_is_none_gets_status_400(body: bytes, reason: str) -> None:
    status, answer = ask(Door(application, KEY), "/spmdflow/connect", GOOD, body=body)

    assert status == 400
    assert reason in json.loads(answer)["error"]


def test_an_unknown_route_of_the_door_gets_status_404() -> None:
    assert ask(Door(application, KEY), "/spmdflow/other", GOOD)[0] == 404
