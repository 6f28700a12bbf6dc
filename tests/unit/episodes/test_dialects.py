"""Clients of OpenAI and Anthropic at a real endpoint, in each dialect; replies are scripted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.recorder import Limits, Recorder
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_conversation import text_tokenizer

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

TOKENIZER = text_tokenizer()
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "The sum.", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL: Any = {"name": "add", "description": "The sum.", "input_schema": SCHEMA}
USER: Any = {"role": "user", "content": "2 + 3"}


class Episode:
    """An episode whose model says what the test says, with a client of each kind."""

    def __init__(
        self, *, max_turns: int = 9, may_fork: bool = False, tokenizer: Any = TOKENIZER
    ) -> None:
        limits = Limits(
            max_turns,
            max_prompt_tokens=900,
            max_new_tokens=2000,
            may_fork=may_fork,
            vocab_size=len(tokenizer),
        )
        self.tokenizer = tokenizer
        self.recorder = Recorder(ChatTemplate(tokenizer), (tokenizer.eos_token_id,), limits)
        self.endpoint = Endpoint()
        _, told = self.endpoint.open(0, self.recorder)
        url = told["base_url"]
        key = told["api_key"]
        self.openai = openai.OpenAI(base_url=url, api_key=key, max_retries=3)
        without_version = url.removesuffix("/v1")
        self.anthropic = anthropic.Anthropic(base_url=without_version, api_key=key, max_retries=3)
        self._pool = ThreadPoolExecutor(1)
        self.shown_sizes: Iterable[int] = (1, 3, 5)
        """After how many tokens a streamed reply is looked at."""
        self.num_requests = 0
        """Those that reached the generator."""

    def ask(self, says: str | list[str], request: Callable[..., Any], **fields: Any) -> Any:
        """The result of a client's request; the model says `says`, in parts if it is streamed.

        A list: what it says in each choice.
        """
        texts = iter([says] if isinstance(says, str) else says)
        coming = self._pool.submit(request, **fields)
        coming.add_done_callback(lambda _: self.endpoint.inbox.put(None))  # type: ignore[arg-type]
        while (draw := self.endpoint.inbox.get(timeout=100)) is not None:
            self.num_requests += 1
            response = words(self.tokenizer, next(texts))
            if draw.progress is not None:
                for size in self.shown_sizes:
                    draw.progress(response.tokens[:size].tolist())
                    self._let_endpoint_write()
            draw.done(response)
        return coming.result()

    def _let_endpoint_write(self) -> None:
        """Returns after a few turns of the endpoint's loop, in which it has sent what it knows."""
        for _ in range(5):
            turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.endpoint._loop)
            turn.result(100)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()
        self.endpoint.close()
        self._pool.shutdown()


@pytest.fixture
def episode() -> Iterator[Episode]:
    opened = Episode()
    yield opened
    opened.close()


def test_responses_api_plays_a_tool_loop_as_one_conversation(episode: Episode) -> None:
    create = episode.openai.responses.create
    asked: dict[str, Any] = {"model": "policy", "tools": [FLAT_TOOL], "instructions": "Add."}

    first = episode.ask(CALL, create, input="2 + 3", **asked)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    second = episode.ask("It is 5", create, input=[USER, call.to_dict(), result], **asked)
    third = episode.ask("Yes", create, input="Sure?", previous_response_id=second.id, **asked)

    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
    assert re.fullmatch("[0-9a-zA-Z]{9}", call.call_id)
    assert (second.output_text, third.output_text) == ("It is 5", "Yes")
    assert second.status == "completed" and second.usage.output_tokens == len("It is 5") + 1
    (segment,) = episode.recorder.segments
    assert segment.num_sampled == len(CALL) + len("It is 5") + len("Yes") + 3


def stream_response(client: Any, **fields: Any) -> tuple[list[str], Any]:
    """(types of the events, the final response) of a streamed response."""
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_response()


def test_responses_api_streams_text_and_calls_as_its_client_reads_them(episode: Episode) -> None:
    asked = {"client": episode.openai, "model": "policy", "tools": [FLAT_TOOL]}

    kinds, first = episode.ask("I add. " + CALL, stream_response, input="2 + 3", **asked)
    message, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    _, second = episode.ask("5", stream_response, input=[USER, message, call, result], **asked)

    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 1
    assert message.content[0].text == "I add."
    assert json.loads(call.arguments) == {"a": 2, "b": 3}
    assert second.output_text == "5" and len(episode.recorder.segments) == 1


def stream_message(client: Any, **fields: Any) -> tuple[list[str], Any]:
    """(types of the events, the final message) of a streamed message."""
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
def test_messages_api_plays_a_tool_loop_as_one_conversation(
    episode: Episode, streams: bool
) -> None:
    def request(**fields: Any) -> Any:
        if streams:
            return stream_message(episode.anthropic, **fields)[1]
        return episode.anthropic.messages.create(**fields)

    asked = {"model": "policy", "max_tokens": 99, "tools": [ANTHROPIC_TOOL], "system": "Add."}
    first = episode.ask("I add. " + CALL, request, messages=[USER], **asked)
    text, call = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    messages: Any = [USER, {"role": "assistant", "content": first.content}]
    messages.append({"role": "user", "content": [result]})
    second = episode.ask("It is 5", request, messages=messages, **asked)

    assert (text.text, call.name, call.input) == ("I add.", "add", {"a": 2, "b": 3})
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert second.content[0].text == "It is 5"
    assert second.usage.output_tokens == len("It is 5") + 1
    (segment,) = episode.recorder.segments
    assert segment.num_sampled == len("I add. " + CALL) + len("It is 5") + 2


def test_messages_api_streams_text_and_arguments_in_events_of_their_own(episode: Episode) -> None:
    kinds, message = episode.ask(
        "I add. " + CALL,
        stream_message,
        client=episode.anthropic,
        model="policy",
        max_tokens=99,
        messages=[USER],
        tools=[ANTHROPIC_TOOL],
    )

    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("text") > 1 and "input_json" in kinds
    assert message.content[1].input == {"a": 2, "b": 3}


def test_conversation_is_continued_in_every_dialect(episode: Episode) -> None:
    chat: Any = [USER]
    fields: Any = {"model": "policy", "tools": [CHAT_TOOL]}
    said = episode.ask(CALL, episode.openai.chat.completions.create, messages=chat, **fields)
    (call,) = said.choices[0].message.tool_calls

    blocks: Any = [
        {"type": "tool_use", "id": call.id, "name": "add", "input": {"a": 2, "b": 3}},
    ]
    result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "5"}]
    episode.ask(
        "It is 5",
        episode.anthropic.messages.create,
        model="policy",
        max_tokens=99,
        tools=[ANTHROPIC_TOOL],
        messages=[
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": result},
        ],
    )
    items: Any = [
        USER,
        {
            "type": "function_call",
            "call_id": call.id,
            "name": "add",
            "arguments": call.function.arguments,
        },
        {"type": "function_call_output", "call_id": call.id, "output": "5"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is 5"}]},
        {"role": "user", "content": "Sure?"},
    ]
    episode.ask(
        "Yes", episode.openai.responses.create, model="policy", tools=[FLAT_TOOL], input=items
    )

    (segment,) = episode.recorder.segments
    assert segment.num_sampled == len(CALL) + len("It is 5") + len("Yes") + 3


def test_tokens_of_a_message_are_counted_without_a_turn(episode: Episode) -> None:
    count = episode.ask(
        "", episode.anthropic.messages.count_tokens, model="policy", messages=[USER]
    )

    assert count.input_tokens == len("[user]2 + 3[assistant]") + 1  # and <eos>
    assert episode.recorder.num_turns == 0


def test_chat_is_streamed_while_it_is_generated(episode: Episode) -> None:
    def request() -> list[str]:
        chunks = episode.openai.chat.completions.create(
            model="policy", messages=[USER], stream=True, stop=["END"]
        )
        return [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]

    parts = episode.ask("one two ENDLESS", request)

    assert "".join(parts) == "one two "
    assert len([part for part in parts if part]) > 1


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "'image_url', expected text"),
        ({"messages": [{"role": "guest", "content": "a"}]}, "got the role 'guest'"),
        ({"messages": [USER], "extra_body": {"continue_final_message": True}}, "continue_final"),
        ({"messages": [USER], "n": 2}, "n: got 2"),
        ({"messages": [USER], "tool_choice": "required"}, "expected tools with it"),
        ({"messages": [USER], "stop": ["\ud800"]}, "half a character"),
    ],
)
def test_what_cannot_be_given_is_refused_in_words_and_not_retried(
    episode: Episode, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises((openai.BadRequestError, UnicodeEncodeError)) as caught:
        episode.ask("", episode.openai.chat.completions.create, model="policy", **fields)

    if isinstance(caught.value, openai.BadRequestError):
        assert text in str(caught.value)
    (running,) = episode.endpoint._episodes.values()
    assert running.refused <= 1 and episode.num_requests == 0


def test_picture_in_anthropics_form_is_refused_in_anthropics_form(episode: Episode) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": ""}
    picture: Any = {"role": "user", "content": [{"type": "image", "source": source}]}

    with pytest.raises(anthropic.BadRequestError, match="'image', expected text") as caught:
        episode.ask(
            "", episode.anthropic.messages.create, model="m", max_tokens=9, messages=[picture]
        )

    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_request_after_the_last_turn_is_refused_once() -> None:
    episode = Episode(max_turns=1)
    create = episode.openai.chat.completions.create
    episode.ask("a", create, model="policy", messages=[USER])
    more: Any = [USER, {"role": "assistant", "content": "a"}, USER]

    with pytest.raises(openai.BadRequestError, match="max_turns=1"):
        episode.ask("b", create, model="policy", messages=more)

    (running,) = episode.endpoint._episodes.values()
    episode.close()
    assert running.refused == 1


def test_forms_of_numbers_and_prompts_that_openai_accepts_are_accepted(episode: Episode) -> None:
    said = episode.ask(
        "a", episode.openai.completions.create, model="m", prompt=["one"], max_tokens=5.0
    )

    assert said.choices[0].text == "a"


def test_ids_differ_between_turns_and_are_the_same_in_a_repeated_run() -> None:
    ids = []
    for seed in (1, 1, 2):
        episode = Episode()
        episode.recorder.id_seed = seed
        create = episode.openai.chat.completions.create
        fields: Any = {"model": "policy", "tools": [CHAT_TOOL]}
        first = episode.ask(CALL + CALL, create, messages=[USER], **fields)
        message = first.choices[0].message
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls
        ]
        second = episode.ask(CALL, create, messages=[USER, message, *results], **fields)
        episode.close()
        calls = [*message.tool_calls, *second.choices[0].message.tool_calls]
        ids.append([first.id, second.id, *(call.id for call in calls)])

    assert ids[0] == ids[1]
    assert len(set(ids[0] + ids[2])) == 10


def test_reply_ends_with_its_first_call_where_calls_may_not_be_parallel(episode: Episode) -> None:
    said = episode.ask(
        CALL + CALL,
        episode.openai.chat.completions.create,
        model="policy",
        messages=[USER],
        tools=[CHAT_TOOL],
        parallel_tool_calls=False,
    )

    assert len(said.choices[0].message.tool_calls) == 1
    (segment,) = episode.recorder.segments
    assert segment.num_sampled == len(CALL)


def test_legacy_functions_are_offered_and_called(episode: Episode) -> None:
    create = episode.openai.chat.completions.create
    functions: Any = [FUNCTION]

    said = episode.ask(CALL, create, model="policy", messages=[USER], functions=functions)
    message = said.choices[0].message
    result: Any = {"role": "function", "name": "add", "content": "5"}
    episode.ask("5", create, model="policy", messages=[USER, message, result], functions=functions)

    assert said.choices[0].finish_reason == "function_call"
    assert json.loads(message.function_call.arguments) == {"a": 2, "b": 3}
    assert len(episode.recorder.segments) == 1


@pytest.mark.parametrize("arguments", ["[2, 3]", '"2 + 3"', "null"])
@pytest.mark.parametrize("streams", [False, True])
def test_arguments_that_are_no_object_reach_anthropics_client_and_are_recognised(
    episode: Episode, arguments: str, streams: bool
) -> None:
    def request(**fields: Any) -> Any:
        if streams:
            return stream_message(episode.anthropic, **fields)[1]
        return episode.anthropic.messages.create(**fields)

    said = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    asked = {"model": "policy", "max_tokens": 99, "tools": [ANTHROPIC_TOOL]}
    first = episode.ask(said, request, messages=[USER], **asked)
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "no", "is_error": True}
    block = {"type": "tool_use", "id": call.id, "name": "add", "input": call.input}
    messages: Any = [USER, {"role": "assistant", "content": [block]}]
    messages.append({"role": "user", "content": [result]})
    episode.ask("Sorry", request, messages=messages, **asked)

    assert call.input == json.loads(arguments)
    assert len(episode.recorder.segments) == 1


def test_thread_of_anthropic_is_continued_with_its_prompt_and_tools(episode: Episode) -> None:
    create = episode.anthropic.beta.messages.create
    asked = {"model": "policy", "max_tokens": 99}
    first = episode.ask(
        CALL,
        create,
        messages=[USER],
        system="Add.",
        tools=[ANTHROPIC_TOOL],
        thread={"type": "create"},
        **asked,
    )
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "5"}
    message: Any = {"role": "user", "content": [result]}
    thread = {"type": "continue", "previous_message_id": first.id}
    second = episode.ask("It is 5", create, messages=[message], thread=thread, **asked)

    assert second.content[0].text == "It is 5"
    (segment,) = episode.recorder.segments
    assert segment.num_sampled == len(CALL) + len("It is 5") + 2


def test_thread_that_is_not_known_is_refused_so_that_its_client_begins_it_anew(
    episode: Episode,
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        episode.ask(
            "",
            episode.anthropic.beta.messages.create,
            model="policy",
            max_tokens=9,
            messages=[USER],
            thread={"type": "continue", "previous_message_id": "msg_other"},
        )

    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    assert episode.num_requests == 0


def test_summary_that_anthropics_servers_would_write_is_refused(episode: Episode) -> None:
    with pytest.raises(anthropic.BadRequestError, match="compaction: got"):
        episode.ask(
            "",
            episode.anthropic.messages.create,
            model="policy",
            max_tokens=9,
            messages=[USER],
            extra_body={"compaction": {"type": "enabled"}},
        )
