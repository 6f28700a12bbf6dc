"""Requests of agent programs as they sent them, answered by the endpoint.

agent_requests.json has their headers and bodies, recorded while each did a task with one tool;
long instructions are cut to a sentence. The tests say what the model says to each.
"""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.recorder import Limits, Recorder
from spmdflow.rollout.resumable import VersionedResponse
from tests.unit.episodes.test_conversation import text_tokenizer

RECORDED = json.loads((Path(__file__).parent / "agent_requests.json").read_text())


def replay(name: str, *, may_fork: bool = False) -> tuple[list[tuple[int, str]], Recorder]:
    """(status and body of each answer, what was recorded), over one connection."""
    tokenizer = text_tokenizer()
    program = RECORDED[name]
    limits = Limits(
        9, max_prompt_tokens=900, max_new_tokens=2000, may_fork=may_fork, vocab_size=len(tokenizer)
    )
    recorder = Recorder(ChatTemplate(tokenizer), (tokenizer.eos_token_id,), limits)
    endpoint = Endpoint()
    answers = []
    try:
        _, told = endpoint.open(0, recorder)
        place = urlsplit(told["base_url"])
        client = http.client.HTTPConnection(place.hostname, place.port, timeout=100)
        headers = program["headers"] | {"authorization": f"Bearer {told['api_key']}"}

        def ask(body: dict[str, Any]) -> tuple[int, str]:
            client.request("POST", f"{place.path}/chat/completions", json.dumps(body), headers)
            answer = client.getresponse()
            return answer.status, answer.read().decode()

        with ThreadPoolExecutor(1) as pool:
            for turn in program["turns"]:
                coming = pool.submit(ask, turn["body"])
                coming.add_done_callback(lambda _: endpoint.inbox.put(None))
                while (draw := endpoint.inbox.get(timeout=100)) is not None:
                    draw.done(words(tokenizer, turn["says"]))
                answers.append(coming.result())
        client.close()
    finally:
        endpoint.close()
    return answers, recorder


def words(tokenizer: Any, text: str) -> VersionedResponse:
    """The model says this, and ends."""
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return VersionedResponse(
        0,
        torch.tensor(ids),
        torch.full((len(ids),), -0.5),
        versions=torch.zeros(len(ids)).int(),
    )


def called(answer: tuple[int, str]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the call in an answer."""
    (choice,) = json.loads(answer[1])["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert answer[0] == 200 and choice["finish_reason"] == "tool_calls"
    assert re.fullmatch("[0-9a-zA-Z]{9}", call["id"])
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_openai_agents_has_one_conversation_with_a_tool_and_a_streamed_turn() -> None:
    answers, recorder = replay("agents")

    assert called(answers[0]) == ("add", {"a": 2, "b": 3})
    (choice,) = json.loads(answers[1][1])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("5", "stop")
    *events, end = answers[2][1].split("data: ")[1:]
    parts = [json.loads(event)["choices"][0] for event in events]
    assert parts[0]["delta"]["content"] == "Yes" and parts[-1]["finish_reason"] == "stop"
    assert end.strip() == "[DONE]" and recorder.num_turns == 3
    (segment,) = recorder.segments
    said = [len(turn["says"]) + 1 for turn in RECORDED["agents"]["turns"]]
    assert segment.num_sampled == sum(said)
    ((name, given),), *later = segment.calls
    assert (name, json.loads(given), later) == ("add", {"a": 2, "b": 3}, [[], []])


def test_smolagents_tool_agent_is_answered_though_it_requires_a_call() -> None:
    answers, recorder = replay("tools", may_fork=True)

    assert [called(answer) for answer in answers] == [
        ("add", {"a": 2, "b": 3}),
        ("final_answer", {"answer": "5"}),
    ]
    assert len(recorder.segments) == 2  # it tells calls as text of its own


def test_smolagents_code_agent_gets_its_code_up_to_the_stop_string() -> None:
    answers, recorder = replay("code", may_fork=True)

    said = [json.loads(body)["choices"][0] for _, body in answers]
    assert [choice["finish_reason"] for choice in said] == ["stop", "stop"]
    assert said[0]["message"]["content"] == "Thought: add.\n<code>\nprint(add(2, 3))\n"
    assert said[1]["message"]["content"] == "<code>\nfinal_answer(5)\n"
    assert len(recorder.segments) == 2


@pytest.mark.parametrize("name", ["tools", "code"])
def test_program_that_retells_a_reply_is_told_to_allow_segments(name: str) -> None:
    (first, _), (second, body) = replay(name)[0]

    assert (first, second) == (200, 400)
    assert "actor.rollout.episode.segments=all" in json.loads(body)["error"]["message"]
