"""Several choices of one request, as OpenAI's client gets them from a real endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from spmdflow.episodes.credit import CreditRule, credit_segments
from spmdflow.episodes.pending import AbandonedRequest, GenerationRequest
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_dialects import CALL, CHAT_TOOL, TOKENIZER, USER, Episode
from tests.unit.episodes.test_endpoint import Agent, answer_from

SAID = ["one", "a second", "the third"]


@pytest.fixture
def episode() -> Iterator[Episode]:
    opened = Episode(may_fork=True, max_turns=64)
    yield opened
    opened.close()


def sampled(episode: Episode) -> list[str]:
    """What the model said in each segment."""
    result = []
    for segment in episode.recorder.segments:
        own = [i for i, chosen in zip(segment.tokens, segment.mask, strict=True) if chosen]
        result.append(TOKENIZER.decode(own).replace(TOKENIZER.eos_token, "|"))
    return result


def test_chat_has_a_choice_for_each_reply_and_any_of_them_is_continued(episode: Episode) -> None:
    create = episode.openai.chat.completions.create
    fields: Any = {"model": "policy", "logprobs": True, "extra_body": {"return_token_ids": True}}
    answer = episode.ask(SAID, create, messages=[USER], n=3, **fields)
    chosen = answer.choices[2].message
    more: Any = [USER, chosen, USER]
    episode.ask("so", create, model="policy", messages=more)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == SAID
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for choice in answer.choices:
        assert len(choice.token_ids) == len(choice.logprobs.content)
    num_tokens = [len(text) + 1 for text in SAID]
    assert answer.usage.completion_tokens == sum(num_tokens)
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert sampled(episode) == ["one|", "a second|", "the third|so|"]


def test_choices_have_calls_of_their_own(episode: Episode) -> None:
    create = episode.openai.chat.completions.create
    answer = episode.ask(
        [CALL, "It is 5", CALL], create, model="policy", messages=[USER], tools=[CHAT_TOOL], n=3
    )

    reasons = [choice.finish_reason for choice in answer.choices]
    assert reasons == ["tool_calls", "stop", "tool_calls"]
    ids = [call.id for c in answer.choices for call in c.message.tool_calls or ()]
    assert len(ids) == len(set(ids)) == 2


def stream(create: Any, **fields: Any) -> list[Any]:
    return list(create(stream=True, stream_options={"include_usage": True}, **fields))


def test_choices_are_streamed_by_their_index(episode: Episode) -> None:
    chunks = episode.ask(
        SAID, stream, create=episode.openai.chat.completions.create, model="m", messages=[USER], n=3
    )

    texts = ["", "", ""]
    reasons: list[list[str]] = [[], [], []]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == SAID and reasons == [["stop"]] * 3
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1 and chunks[-1].usage
    assert usages[0].completion_tokens == sum(len(text) + 1 for text in SAID)
    assert sampled(episode) == ["one|", "a second|", "the third|"]


def test_completion_has_choices_streamed_and_not(episode: Episode) -> None:
    create = episode.openai.completions.create
    answer = episode.ask(SAID, create, model="m", prompt="say", n=3, best_of=3)
    chunks = episode.ask(SAID, stream, create=create, model="m", prompt="say", n=3)

    assert [choice.text for choice in answer.choices] == SAID
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == SAID and len(episode.recorder.segments) == 6


def test_choice_is_scored_by_the_id_of_the_response_and_its_index(episode: Episode) -> None:
    create = episode.openai.chat.completions.create
    answer = episode.ask(SAID, create, model="policy", messages=[USER], n=3)
    scores = {f"{answer.id}:{index}": float(index) for index in range(3)}
    recorder = episode.recorder

    credited = credit_segments(
        recorder.segments,
        recorder.turn_of_reply,
        0.5,
        {"segment_scores": scores, "turn_scores": {answer.id: 10.0}},
        CreditRule("segment", 0.9),
    )

    assert [each.score for each in credited] == [0.0, 1.0, 2.0]
    assert [each.weight for each in credited] == [1 / 3] * 3
    assert [sum(each.rewards) for each in credited] == [10.0, 1.0, 2.0]


def test_all_choices_of_a_client_that_has_left_are_given_up() -> None:
    episode = Episode(may_fork=True)
    agent = Agent(episode.endpoint, 3)
    inbox = episode.endpoint.inbox
    with agent.connect() as connection:
        connection.sendall(agent.request({"prompt": "a", "n": 3}))
        draws = [inbox.get(timeout=100) for _ in range(3)]
    left = [inbox.get(timeout=100) for _ in range(3)]
    episode.close()

    assert all(isinstance(draw, GenerationRequest) for draw in draws)
    assert left == [AbandonedRequest(3, agent.name, turn) for turn in range(3)]
    assert agent.recorder.segments == []


def test_choice_that_cannot_be_generated_fails_the_request_and_gives_up_the_others() -> None:
    episode = Episode(may_fork=True)
    agent = Agent(episode.endpoint, 3)
    inbox = episode.endpoint.inbox
    with agent.connect() as connection:
        connection.sendall(agent.request({"prompt": "a", "n": 3}))
        draws: Any = [inbox.get(timeout=100) for _ in range(3)]
        draws[0].done(words(TOKENIZER, "b"))
        draws[1].fail(OverflowError("no room"))
        status, said = answer_from(connection)
    left = inbox.get(timeout=100)
    episode.close()

    assert left == AbandonedRequest(3, agent.name, 2)
    assert status == 500 and "no room" in json.dumps(said)
    assert agent.recorder.segments == []
