"""Streams of a model with thoughts: the thought comes first and early, in each dialect's events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.episodes.conformance import Family, tokenizer_of
from tests.unit.episodes.test_dialects import (
    ANTHROPIC_TOOL,
    CALL,
    CHAT_TOOL,
    FLAT_TOOL,
    USER,
    Episode,
    stream_message,
    stream_response,
)

QWEN3 = Family("Qwen3", "qwen3", ("<|im_end|>",))
SAID = f"<think>\nI add two numbers.\n</think>\n\nI add. {CALL}"


@pytest.fixture
def episode() -> Iterator[Episode]:
    opened = Episode(tokenizer=tokenizer_of(QWEN3))
    opened.shown_sizes = range(1, 30)
    yield opened
    opened.close()


def stream_chat(client: Any, **fields: Any) -> list[tuple[str, str]]:
    """(field, text) of each part of a streamed chat; without the text of calls."""
    parts = []
    for chunk in client.chat.completions.create(model="policy", stream=True, **fields):
        for choice in chunk.choices:
            for name, value in choice.delta.model_dump(exclude_none=True).items():
                if value and name not in ("role", "function_call"):
                    parts.append((name, value if isinstance(value, str) else ""))
    return parts


def joined(parts: list[tuple[str, str]], name: str) -> str:
    return "".join(text for field, text in parts if field == name)


def test_chat_streams_the_thought_then_the_text_then_the_calls(episode: Episode) -> None:
    parts = episode.ask(
        SAID, stream_chat, client=episode.openai, messages=[USER], tools=[CHAT_TOOL]
    )

    fields = [name for name, _ in parts]
    assert fields == sorted(fields, key=["reasoning_content", "content", "tool_calls"].index)
    assert fields.count("reasoning_content") > 3 and fields.count("content") > 1
    assert joined(parts, "reasoning_content") == "I add two numbers."
    assert joined(parts, "content") == "I add."


def test_text_without_a_thought_is_streamed_early(episode: Episode) -> None:
    parts = episode.ask("It is five.", stream_chat, client=episode.openai, messages=[USER])

    assert joined(parts, "content") == "It is five." and len(parts) > 3


def test_text_that_a_closing_mark_makes_a_thought_is_streamed_to_its_end(
    episode: Episode,
) -> None:
    parts = episode.ask("so so</think>five", stream_chat, client=episode.openai, messages=[USER])
    sent = joined(parts, "content")
    more: Any = [USER, {"role": "assistant", "content": sent}, USER]
    episode.ask("Yes", episode.openai.chat.completions.create, model="policy", messages=more)

    assert sent == "so so</think>five"
    assert len(episode.recorder.segments) == 1


def test_responses_stream_the_thought_as_an_item_of_its_own(episode: Episode) -> None:
    kinds, response = episode.ask(
        SAID, stream_response, client=episode.openai, model="policy", input="2", tools=[FLAT_TOOL]
    )

    assert kinds.count("response.reasoning_text.delta") > 3
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "I add two numbers."
    assert response.output_text == "I add."


def test_messages_stream_the_thought_before_the_text(episode: Episode) -> None:
    kinds, message = episode.ask(
        SAID,
        stream_message,
        client=episode.anthropic,
        model="policy",
        max_tokens=99,
        messages=[USER],
        tools=[ANTHROPIC_TOOL],
    )

    assert kinds.count("thinking") > 3 and kinds.count("text") > 1
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "I add two numbers."


@pytest.mark.parametrize(
    ("said", "thought"), [("<think>\nhm", "hm"), ("<think>\nhm</think>", "hm"), ("<thi", "")]
)
def test_reply_that_ends_within_its_thought_or_mark_is_complete(
    episode: Episode, said: str, thought: str
) -> None:
    parts = episode.ask(said, stream_chat, client=episode.openai, messages=[USER])

    assert joined(parts, "reasoning_content") == thought
    assert joined(parts, "content") == ("" if thought else said)
