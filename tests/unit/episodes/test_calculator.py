"""The calculator that a system prompt describes, against a server that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from spmdflow.rewards.child import find_function

TOOL = Path(__file__).parents[3] / "algos" / "calculator" / "tool.py"
ROW = {"prompt": "as text", "question": "What is 23 * 45?", "answer": "1035"}


@contextmanager
def policy_that_says(*replies: str) -> Iterator[tuple[str, list[Any]]]:
    """(base_url of a chat endpoint that gives these replies in turn, the requests it got)."""
    requests: list[Any] = []

    class Endpoint(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            requests.append(json.loads(self.rfile.read(size)))
            message = {"role": "assistant", "content": replies[len(requests) - 1]}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # poll, seconds
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def play(*replies: str, name: str = "episode") -> tuple[dict[str, float], list[Any]]:
    """What an episode with these replies returns, and the messages of its last request.

    name: of the environment in the file.
    """
    episode = find_function(f"{TOOL}:{name}", "environment")
    with policy_that_says(*replies) as (url, requests):
        measured = asyncio.run(episode(ROW, base_url=url, model="policy", api_key="key"))
    return measured, requests[-1]["messages"]


def test_result_of_a_call_is_the_next_message_and_the_answer_is_scored() -> None:
    measured, messages = play("CALC(23 * 45)", "1035")

    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[-1]["content"] == "1035"
    assert measured == {"score": 1.2, "accuracy": 1.0, "used": 1.0}


def test_answer_without_the_calculator_counts_and_a_wrong_one_does_not() -> None:
    assert play("It is 1,035.")[0] == {"score": 1.0, "accuracy": 1.0, "used": 0.0}
    assert play("1025")[0] == {"score": 0.0, "accuracy": 0.0, "used": 0.0}


def test_policy_that_only_calls_has_no_answer() -> None:
    assert play(*["CALC(1 + 1)"] * 3)[0] == {"score": 0.2, "accuracy": 0.0, "used": 1.0}


CALL = "<think>I need 23 * 45.</think><tool_call>23 * 45</tool_call>"


def think(*replies: str) -> tuple[dict[str, float], list[Any]]:
    return play(*replies, name="episode_with_thoughts")


def test_result_of_a_call_behind_a_thought_is_the_next_message() -> None:
    found, messages = think(CALL, "It is 1,035.")

    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[-2]["content"] == CALL, "the thought stays in the conversation"
    assert messages[-1]["content"] == "1035"
    assert found == {"score": 1.0, "accuracy": 1.0, "used": 1.0, "thought": 1.0}


def test_only_the_answer_is_scored_whatever_the_call_was() -> None:
    assert think(CALL, "1034")[0]["score"] == 0
    assert think(CALL.replace("45", "46"), "1035")[0]["score"] == 1


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>23 * 45</tool_call>",
        "<think>I need 23 * 45.<tool_call>23 * 45</tool_call>",
        "<tool_call>23 * 45</tool_call><think>I need 23 * 45.</think>",
    ],
)
def test_call_without_a_thought_before_it_is_not_computed(reply: str) -> None:
    found, messages = think(reply, "no idea")

    assert messages[-1]["content"].startswith("error: write a thought")
    assert found["score"] == found["used"] == 0


def test_policy_may_correct_its_call() -> None:
    found, messages = think("<think>Now.</think><tool_call>23 x 45</tool_call>", CALL, "1035")

    assert messages[3]["content"].startswith("error: write whole numbers")
    assert messages[-1]["content"] == "1035"
    assert found["score"] == found["used"] == 1


@pytest.mark.parametrize(
    "last", ["<think>1035</think>", CALL + " 1035", "<think>It is 1035.</think> I do not know."]
)
def test_number_in_a_thought_or_beside_a_call_is_no_answer(last: str) -> None:
    assert think(CALL, CALL, last)[0]["score"] == 0


def test_answer_without_a_call_is_scored_and_its_thought_is_not() -> None:
    found, _ = think("<think>23 times 45 is 1000.</think>1035")

    assert found == {"score": 1.0, "accuracy": 1.0, "used": 0.0, "thought": 1.0}


def test_call_that_was_cut_off_is_computed_if_it_can_be() -> None:
    assert think("<think>a</think><tool_call>23 * 45", "1035")[0]["used"] == 1
    assert think("<think>a</think><tool_call>23 *", "1035")[0]["used"] == 0


def test_random_score_says_nothing_of_the_answer_and_keeps_the_true_numbers() -> None:
    right, _ = play(CALL, "1035", name="episode_with_random_score")
    again, _ = play(CALL, "1035", name="episode_with_random_score")
    wrong, _ = play(CALL, "1034", name="episode_with_random_score")

    assert right == again
    assert (right["accuracy"], wrong["accuracy"]) == (1, 0)
    assert 0 <= right["score"] < 1 and 0 <= wrong["score"] < 1
    assert right["score"] != wrong["score"]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("23 * 45", "1035"), ("-3 - 4 * 2", "-11"), (" 7 ", "7")],
)
def test_calculator_computes_whole_numbers(expression: str, result: str) -> None:
    assert find_function(f"{TOOL}:compute", "tool")(expression) == result


@pytest.mark.parametrize(
    "expression", ["2 ** 99", "1 / 3", "x + 1", "open('a')", "1 +", "True + 1", "9999999999 * 2"]
)
def test_calculator_says_what_it_takes_and_runs_nothing_else(expression: str) -> None:
    assert find_function(f"{TOOL}:compute", "tool")(expression).startswith("error: write whole")
