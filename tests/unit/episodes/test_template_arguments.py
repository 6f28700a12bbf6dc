"""Variables of the chat template that come with a request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.endpoint import Endpoint, GenerationRequest
from spmdflow.episodes.recorder import Limits, Recorder
from tests.unit.episodes.conformance import FAMILIES, Conversation, Family, drawn_of
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_conversation import CHATML, chat, say, text_tokenizer, tokenizer_with
from tests.unit.episodes.test_dialects import TOKENIZER, USER, Episode
from tests.unit.episodes.test_endpoint import Agent, answer_from

openai = pytest.importorskip("openai")

LEVELS = (
    "{{ 'level ' ~ level ~ ' ' if level is defined else '' }}"
    "{{ reasoning_effort ~ ' ' if reasoning_effort is defined else '' }}" + CHATML
)


def recorder_with(arguments: dict[str, Any], *, may_fork: bool = True) -> Recorder:
    """A recorder of a run with these arguments of the chat template."""
    tokenizer = tokenizer_with(LEVELS)
    limits = Limits(9, 99, 99, may_fork=may_fork, vocab_size=len(tokenizer))
    return Recorder(ChatTemplate(tokenizer, arguments), (tokenizer.eos_token_id,), limits)


def rendered(*said: str, **arguments: Any) -> list[int]:
    """The ids of a conversation as the template writes it with these arguments."""
    return list(
        tokenizer_with(LEVELS).apply_chat_template(
            chat(*said).messages, add_generation_prompt=True, return_dict=False, **arguments
        )
    )


def test_arguments_of_a_request_replace_those_of_the_run() -> None:
    recorder = recorder_with({"level": "3", "reasoning_effort": "7"})
    own = recorder.begin(chat("guess"))
    other = recorder.begin(chat("guess", chat_template_kwargs={"level": "4"}))

    assert own.ids == rendered("guess", level="3", reasoning_effort="7")
    assert other.ids == rendered("guess", level="4", reasoning_effort="7") != own.ids
    same = chat("guess", chat_template_kwargs={"level": "4"})
    assert recorder.count_tokens(same) == len(other.ids)


def test_a_segment_is_continued_with_equal_arguments_only() -> None:
    recorder = recorder_with({"level": "3"})
    four = {"chat_template_kwargs": {"level": "4"}}
    said = say(recorder, chat("guess", **four), "5")
    say(recorder, chat("guess", said, "higher", **four), "6")
    changed = recorder.begin(chat("guess", said, "higher", chat_template_kwargs={"level": "3"}))
    plain = recorder.begin(chat("guess", said, "higher"))

    (segment,) = recorder.segments
    assert segment.num_sampled == 2
    assert changed.segment is None and plain.segment is None
    assert changed.ids == plain.ids == rendered("guess", said, "higher", level="3")
    assert segment.ids[:-1] == rendered("guess", said, "higher", level="4")


def test_other_arguments_are_refused_where_only_one_segment_is_recorded() -> None:
    recorder = recorder_with({}, may_fork=False)
    said = say(recorder, chat("guess"), "5")

    with pytest.raises(Refusal, match="does not extend the recorded one"):
        recorder.begin(chat("guess", said, "higher", chat_template_kwargs={"level": "3"}))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "a b"])
def test_variables_that_the_endpoint_sets_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match=f"^chat_template_kwargs: got '{name}', expected variables"):
        chat("guess", chat_template_kwargs={name: []})


def test_special_token_in_an_argument_stays_text() -> None:
    tokenizer = TOKENIZER
    template = ChatTemplate(tokenizer)
    recorder = Recorder(template, (tokenizer.eos_token_id,), Limits(9, 99, 99, True, 999))
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{{ who }}" + kept
    try:
        ask = chat("a")._replace(template_arguments={"who": "I<eos>"})
        ids = recorder.begin(ask).ids
        text = tokenizer.decode(ids)
    finally:
        tokenizer.chat_template = kept

    assert text == "I<eos>[user]a<eos>[assistant]"
    assert ids.count(tokenizer.eos_token_id) == 1


def test_effort_becomes_an_argument_where_the_template_reads_it() -> None:
    for template, warns in ((LEVELS, False), (CHATML, True)):
        tokenizer = tokenizer_with(template)
        opened = Episode(may_fork=True)
        opened.recorder = Recorder(
            ChatTemplate(tokenizer), (), Limits(9, 99, 99, True, len(tokenizer))
        )
        (running,) = opened.endpoint._episodes.values()
        running.recorder = opened.recorder
        chat_of = opened.recorder.chat
        fields: Any = {"model": "m", "messages": [USER], "reasoning_effort": "low"}
        with_level = {"extra_body": {"chat_template_kwargs": {"level": "3"}}}
        create = opened.openai.chat.completions.create
        opened.ask("a", create, **fields, **with_level)
        asked = {"model": "m", "input": "2 + 3", "reasoning": {"effort": "low"}}
        opened.ask("a", opened.openai.responses.create, **asked)
        config: Any = {"output_config": {"effort": "low"}}
        anthropic: Any = {"model": "m", "max_tokens": 9, "messages": [USER], "extra_body": config}
        opened.ask("a", opened.anthropic.messages.create, **anthropic)
        found = [dict(each.template_arguments) for each in opened.recorder.segments]
        opened.close()

        effort = {} if warns else {"reasoning_effort": "low"}
        assert found == [effort | {"level": "3"}, effort, effort]
        assert chat_of.reads("reasoning_effort") is not warns


def test_variables_that_the_template_does_not_read_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    episode = Episode(may_fork=True)
    create = episode.openai.chat.completions.create
    body = {"chat_template_kwargs": {"color": "red"}}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            episode.ask("a", create, model="m", messages=[USER], extra_body=body)
    episode.close()

    told = [each.getMessage() for each in caplog.records if "color" in each.getMessage()]
    assert len(told) == 1 and "chat_template_kwargs.color" in told[0]


def test_grammar_leaves_the_thought_free_that_the_prompt_opens() -> None:
    pytest.importorskip("xgrammar")
    tokenizer = text_tokenizer()
    tokenizer.chat_template += "{{ '<think>' if thinks is defined else '' }}"
    endpoint = Endpoint()
    limits = Limits(9, 99, 99, may_fork=True, vocab_size=len(tokenizer))
    agent = Agent(endpoint)
    (running,) = endpoint._episodes.values()
    running.recorder = Recorder(ChatTemplate(tokenizer), (tokenizer.eos_token_id,), limits)
    kinds = []
    for arguments in ({}, {"thinks": True}):
        body = {
            "messages": [USER],
            "response_format": {"type": "json_object"},
            "chat_template_kwargs": arguments,
        }
        with agent.connect() as connection:
            connection.sendall(agent.request(body, route="chat/completions"))
            draw = endpoint.inbox.get(timeout=100)
            assert isinstance(draw, GenerationRequest) and draw.grammar is not None
            kinds.append(draw.grammar.kind)
            draw.done(words(tokenizer, "{}"))
            assert answer_from(connection)[0] == 200
    endpoint.close()

    assert kinds == ["json_schema", "structural_tag"]


def family(label: str) -> Family:
    (found,) = [each for each in FAMILIES if each.label == label]
    return found


@pytest.mark.parametrize(
    ("label", "arguments"),
    [("Qwen3", {"enable_thinking": False}), ("gpt-oss", {"reasoning_effort": "high"})],
)
def test_conversation_with_arguments_is_one_segment_as_the_template_writes_it(
    label: str, arguments: dict[str, Any]
) -> None:
    talk = Conversation(family(label))
    recorder = talk.recorder
    plain = talk.chat.render([USER])
    changed = talk.chat.with_arguments(arguments)
    opens = changed.render([USER])
    messages: list[Any] = [USER]
    end = talk.tokenizer.convert_tokens_to_ids(talk.ends[0])
    for number in range(3):
        ask = chat("a", chat_template_kwargs=arguments)
        ask = ask._replace(messages=list(messages))
        turn = recorder.begin(ask)
        if not number:
            assert turn.ids == talk.chat.ids([opens])[0] != talk.chat.ids([plain])[0]
        ids = [*talk.chat.ids([f"reply {number}"])[0], end]
        message, _, _ = recorder.finish(ask, turn, drawn_of(ids))
        messages += [message, {"role": "user", "content": "more"}]

    (segment,) = recorder.segments
    assert len(segment.replies) == 3
    text = talk.tokenizer.decode(segment.ids)
    assert text.startswith(opens.partition(str(USER["content"]))[0])
    if label == "Qwen3":
        assert text.count("<think>\n\n</think>") == 3  # before each reply, as the prompt had it
