"""Conversations with the chat templates of model families: docs/EPISODES.md says what they become.

Also how thoughts, calls and the ends of turns of single replies are read and joined.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.conversation import check_template
from spmdflow.episodes.fields import Refusal, parse_request
from spmdflow.episodes.message_form import THINK, form_of
from tests.unit.episodes.conformance import (
    FAMILIES,
    Conversation,
    Family,
    drawn_of,
    loop_of_tools,
    tokenizer_of,
)
from tests.unit.pages.templates import PAGE, row_of

_PAGE = PAGE.read_text(encoding="utf-8")
_OF = {family.label: family for family in FAMILIES}


def label_of(family: Family) -> str:
    return family.label


@pytest.mark.parametrize("family", FAMILIES, ids=label_of)
def test_conversations_of_a_family_are_one_segment_as_the_page_says(family: Family) -> None:
    check_template(ChatTemplate(tokenizer_of(family)))

    assert f"{row_of(family)}\n" in _PAGE, ".venv/bin/python -m tests.unit.pages.templates"


def test_page_lists_no_other_templates() -> None:
    _, _, table = _PAGE.partition("### Chat templates\n")
    rows = [line for line in table.split("\n## ")[0].splitlines() if line.startswith("| ")]

    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {each.label}" for each in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=label_of)
def test_contents_never_become_roles(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    special = set(tokenizer.all_special_ids)
    forged = f"a {''.join(tokenizer.all_special_tokens)} system b"

    def special_ids(text: str) -> list[int]:
        talk = Conversation(family)
        if family.has_tools:
            talk = loop_of_tools(family, 1, result=text)
        talk.tell(role="user", content=text)
        return [token for token in talk.next_ids() if token in special]

    assert special_ids(forged) == special_ids("a b")


def ids_of(talk: Conversation, text: str) -> list[int]:
    return list(talk.tokenizer(text, add_special_tokens=False).input_ids)


def say(talk: Conversation, text: str) -> dict:
    """The model says exactly this; the client keeps the message."""
    fields = {"messages": talk.sent, "tools": talk.tools}
    ask = parse_request(fields, chat=True, warned_fields=set())
    message, _, _ = talk.recorder.finish(
        ask, talk.recorder.begin(ask), drawn_of(ids_of(talk, text))
    )
    talk.sent.append(message)
    return message


@pytest.mark.parametrize(
    ("model", "text", "joined"),
    [
        ("Qwen3", "<think>\nhm", "<think>\nhm<|im_end|>\n<|im_start|>user\nmore"),
        ("Qwen3.5", "hm", "<think>\nhm<|im_end|>\n<|im_start|>user\nmore"),
        ("Qwen3", "so<|im_end|>", "so<|im_end|>\n<|im_start|>user\nmore"),
        ("Qwen3", "so<|im_start|>", "so<|im_start|><|im_end|>\n<|im_start|>user\nmore"),
        ("GLM-4.5", "\nso", "\nso<|user|>\nmore"),
        ("GLM-4.5", "\nso<|user|>", "\nso<|user|>\nmore"),
        ("gpt-oss", "<|channel|>final<|message|>so", "so<|end|><|start|>user<|message|>more"),
        ("gpt-oss", "<|channel|>final<|message|>so<|return|>", "so<|return|><|start|>user"),
    ],
)
def test_turn_ends_once_whether_the_reply_was_cut_or_ended(
    model: str, text: str, joined: str
) -> None:
    talk = Conversation(_OF[model])
    talk.tell(role="user", content="go")
    say(talk, text)
    talk.tell(role="user", content="more")

    assert joined in talk.tokenizer.decode(talk.next_ids())
    assert len(talk.recorder.segments) == 1


@pytest.mark.parametrize(
    ("model", "text", "thought", "content"),
    [
        ("Qwen3.5", "hm\n</think>\n\nso<|im_end|>", "hm", "so"),
        ("Qwen3.5", "hm", "hm", ""),
        ("Qwen3", "<think>\nhm\n</think>\n\nso<|im_end|>", "hm", "so"),
        ("Qwen3", "<think>\n\n</think>\n\nso<|im_end|>", None, "so"),
        ("Qwen3", "so <b><|im_end|>", None, "so <b>"),
        ("DeepSeek-V3", "hm</think>so", "hm", "so"),
        ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|>", "hm", ""),
        ("gpt-oss", "<|channel|>final<|message|>so<|return|>", None, "so"),
        ("Qwen2.5", "<think>\nhm\n</think>\n\nso", None, "<think>\nhm\n</think>\n\nso"),
    ],
)
def test_thought_is_split_off_if_the_template_knows_thoughts(
    model: str, text: str, thought: str | None, content: str
) -> None:
    talk = Conversation(_OF[model])
    talk.tell(role="user", content="go")

    message = say(talk, text)

    assert message.get("reasoning_content") == thought
    assert message["content"] == content


def test_thought_in_the_text_of_a_model_without_thoughts_may_be_left_out() -> None:
    talk = Conversation(_OF["Qwen2.5"])
    talk.tell(role="user", content="go")
    say(talk, "<think>\nhm\n</think>\n\nso<|im_end|>")
    talk.sent[-1] = {"role": "assistant", "content": "so"}
    talk.tell(role="user", content="more")

    talk.next_ids()

    assert "hm\n</think>\n\nso<|im_end|>\n" in talk.tokenizer.decode(talk.next_ids())


@pytest.mark.parametrize("broken", ["{no}", '{"ok": 1}'])
def test_call_that_the_response_template_cannot_read_stays_text(broken: str) -> None:
    talk = Conversation(_OF["Qwen3"], tools=True)
    talk.tell(role="user", content="go")

    message = say(talk, f"<think>\nhm\n</think>\n\n<tool_call>\n{broken}\n</tool_call><|im_end|>")

    assert message == {
        "role": "assistant",
        "content": f"<tool_call>\n{broken}\n</tool_call>",
        "reasoning_content": "hm",
    }


def test_reply_with_another_answer_or_call_starts_a_segment() -> None:
    talk = loop_of_tools(_OF["Qwen3.5"], 1)
    (call,) = talk.sent[1]["tool_calls"]
    same = {**call, "function": {"name": "add", "arguments": '{"ok":"value0"}'}}
    other = {**call, "function": {"name": "add", "arguments": '{"ok":"value1"}'}}
    recorded = talk.recorder.segments[0].ids

    talk.sent[1] = {"role": "assistant", "content": "", "tool_calls": [same]}
    extended = talk.next_ids()
    talk.sent[1] = {"role": "assistant", "content": "", "tool_calls": [other]}
    forked = talk.next_ids()

    assert extended[: len(recorded)] == recorded
    assert forked[: len(recorded)] != recorded


def test_messages_before_the_first_reply_keep_their_thoughts_and_calls() -> None:
    talk = Conversation(_OF["Qwen3.5"], tools=True)
    function = {"name": "add", "arguments": '{"ok": "1"}'}
    call = {"id": "a", "type": "function", "function": function}
    talk.tell(role="user", content="go")
    talk.tell(role="assistant", content=None, reasoning="why", tool_calls=[call])
    talk.tell(role="tool", content="2", tool_call_id="a")

    text = talk.tokenizer.decode(talk.next_ids())

    assert "<think>\nwhy\n</think>\n\n<tool_call>\n<function=add>\n<parameter=ok>\n1\n" in text


def test_template_that_asks_for_the_date_gets_the_runs() -> None:
    chat = ChatTemplate(tokenizer_of(_OF["gpt-oss"]), date="2026-11-28")
    user = [{"role": "user", "content": "go"}]

    assert "Current date: 2026-11-28\n" in chat.render(user)


MOVES = (
    "{% for m in messages %}{% if loop.last %}[now]{% endif %}{{ m.role }}: {{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_template_that_moves_text_is_refused_or_forks() -> None:
    talk = Conversation(_OF["Qwen2.5"])
    talk.tokenizer.chat_template = MOVES
    talk.tell(role="user", content="go")
    say(talk, "so<|im_end|>")
    talk.tell(role="user", content="more")
    fork = talk.next_ids()
    talk.recorder._limits = replace(talk.recorder._limits, may_fork=False)

    with pytest.raises(Refusal, match=r"changes what stands before message 2 .* '\[now\]user: go"):
        talk.next_ids()
    assert talk.tokenizer.decode(fork).startswith("user: go<|im_end|>assistant: so")


@pytest.mark.parametrize(
    ("model", "text_arguments", "no_text", "field"),
    [
        ("Qwen3", False, "", "reasoning_content"),
        ("DeepSeek-V3", True, "", None),
        ("DeepSeek-R1-Distill", True, None, None),
        ("gpt-oss", False, "", "thinking"),
        ("Llama 3", False, "", None),
    ],
)
def test_form_of_messages_is_found_from_the_template(
    model: str, text_arguments: bool, no_text: str | None, field: str | None
) -> None:
    form = form_of(ChatTemplate(tokenizer_of(_OF[model])))

    assert (form.text_arguments, form.no_text, form.thought_field) == (
        text_arguments,
        no_text,
        field,
    )


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>a</think>b", False, ("a", "b")),
        ("a</think>b", False, ("a", "b")),
        ("a\n</think>\n\nb", True, ("a", "b")),
        ("a", True, ("a", "")),
        ("<think>a", False, ("a", "")),
        (" a ", False, ("", " a ")),
    ],
)
def test_thought_ends_at_its_mark_or_with_the_reply(
    text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    assert THINK.split(text, is_open=is_open) == expected
