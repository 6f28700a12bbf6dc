"""Bridges to tools of MCP servers, OpenEnv's environments and verifiers; all of them are real."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spmdflow.envs.mcp import episode as play_mcp
from spmdflow.envs.openenv import action_of, text_of
from spmdflow.envs.openenv import episode as play_openenv
from spmdflow.envs.verifiers import episode as play_verifiers
from spmdflow.envs.verifiers import write_rows
from tests.unit.envs.scripted_server import call, say, serve_replies

HERE = Path(__file__).parent
SECONDS = 120
HAS_VERIFIERS = importlib.util.find_spec("verifiers") is not None
CALLER = {"model": "policy", "api_key": "k"}


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def count_messages(row: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, float]:
    """The score of a conversation: its number of tool results."""
    results = [each["content"] for each in messages if each["role"] == "tool"]
    return {"score": float(len(results)), "right": float(results[-1] == str(row["answer"]))}


@contextmanager
def started(script: str) -> Iterator[int]:
    """A server of this folder that listens at the port that it gives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([sys.executable, str(HERE / script), str(port)])
    try:
        end = time.monotonic() + SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


async def play_sums(server: str) -> tuple[Any, list[dict[str, Any]]]:
    replies = [call("nothing"), call("fail"), call("add", a=2, b=3), say("5")]
    async with serve_replies(replies) as policy:
        score = await play_mcp(
            {"prompt": "2 + 3", "answer": 5},
            base_url=policy.url,
            server=server,
            score=f"{__file__}:count_messages",
            **CALLER,
        )
        return score, policy.requests


def check_sums(score: Any, requests: list[dict[str, Any]]) -> None:
    assert score == {"score": 3.0, "right": 1.0}
    names = [tool["function"]["name"] for tool in requests[0]["tools"]]
    assert names == ["add", "fail"]
    assert requests[0]["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    results = [each["content"] for each in requests[-1]["messages"] if each["role"] == "tool"]
    assert results[0].startswith("error: ") and "nothing" in results[0]
    assert results[1].startswith("error: ") and results[2] == "5"


@needs("mcp")
def test_the_policy_calls_tools_of_an_mcp_server_that_is_started_for_it() -> None:
    check_sums(*asyncio.run(play_sums(f"{sys.executable} {HERE / 'mcp_tools.py'}")))


@needs("mcp")
@pytest.mark.drill
def test_the_policy_calls_tools_of_an_mcp_server_behind_a_url() -> None:
    with started("mcp_tools.py") as port:
        check_sums(*asyncio.run(play_sums(f"http://127.0.0.1:{port}/mcp")))


@needs("openenv")
def test_the_policy_plays_an_environment_of_openenv_in_a_session_of_its_own() -> None:
    async def play(url: str, seed: int, replies: list[str]) -> dict[str, float]:
        async with serve_replies([say(text) for text in replies]) as policy:
            row = {"seed": seed}
            return await play_openenv(row, base_url=policy.url, url=url, text="text", **CALLER)

    async def play_two(url: str) -> list[dict[str, float]]:
        return await asyncio.gather(
            play(url, 4, ["8", "10", "12"]), play(url, 20, ["40", "no", "44"])
        )

    with started("openenv_game.py") as port:
        one, two = asyncio.run(play_two(f"http://127.0.0.1:{port}"))

    assert one == {"score": 3.0, "turns": 3.0}
    assert two == {"score": 2.0, "turns": 3.0}


@needs("verifiers")
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv, which verifiers starts, is missing")
def test_the_policy_plays_tasks_of_verifiers_and_gets_its_rewards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    path = tmp_path / "rows.jsonl"
    assert write_rows("doubled_numbers", path, count=3) == 3
    *_, row = map(json.loads, path.read_text().splitlines())
    assert row["messages"][0] == {"role": "system", "content": "Only digits."}

    async def play() -> tuple[list[Any], list[dict[str, Any]]]:
        async with serve_replies([say("4"), say("five"), say("4")]) as policy:
            scores = []
            for python in (None, None, sys.executable):
                settings = {"taskset": "doubled_numbers", "python": python, **CALLER}
                scores.append(await play_verifiers(row, base_url=policy.url, **settings))
            return scores, policy.requests

    scores, requests = asyncio.run(play())

    right = {"score": 2.0, "turns": 1.0, "reward_right": 1.0, "metric_letters": 1.0}
    wrong = {"score": 0.0, "turns": 1.0, "reward_right": 0.0, "metric_letters": 4.0}
    assert scores == [right, wrong, right]
    asked = [each["content"] for each in requests[0]["messages"]]
    assert asked == ["Only digits.", "Double 2."]


@pytest.mark.skipif(HAS_VERIFIERS, reason="verifiers is installed")
def test_interpreter_without_verifiers_is_named_with_its_error() -> None:
    settings = {"taskset": "doubled_numbers", "python": sys.executable, **CALLER}
    cause = "ended with status 1: (?s:.*)No module named 'verifiers"
    with pytest.raises(RuntimeError, match=cause):
        asyncio.run(play_verifiers({"task": {}}, base_url="http://127.0.0.1:9/v1", **settings))


def test_observations_are_shown_and_replies_become_actions() -> None:
    assert text_of({"text": "a", "round": 1}, "") == "a"
    assert text_of({"text": "a", "other": "b"}, "other") == "b"
    assert text_of({"text": "a", "other": "b"}, "") == '{"text": "a", "other": "b"}'
    assert action_of("go", "message") == {"message": "go"}
    assert action_of('I say {"x": {"y": 1}} now', "json") == {"x": {"y": 1}}
    assert action_of("{no", "json") == {"message": "{no"}
