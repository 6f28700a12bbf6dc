"""The form of messages that a chat template takes: arguments of calls, thoughts, ends of turns.

It is found once for each template, by rendering a few messages. Knows no conversations.

| question | answer |
|---|---|
| are arguments of calls an object or a text? | the first that the template writes as JSON |
| what is the content beside calls? | "", unless the template writes calls only without content |
| which field has a thought? | the first of `_THOUGHT_FIELDS` that the template writes |
| between which marks? | what it writes before and after; without a field, see `_thoughts` |
| what ends a turn? | the text after an answer that is the last message |
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.errors import DataError

Message = dict[str, Any]

_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a thought, and templates read it."""
_THOUGHT = "a stand-in"
_ANSWER = "the answer"
_USER: Message = {"role": "user", "content": "ok"}
_LAST_MARK = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
"""A mark such as <think> or [THINK] at the end of a text."""
_FIRST_MARK = re.compile(r"\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\])")
_CALL_ID = "call00000"


class ThoughtMarks(NamedTuple):
    """The marks around a thought in a reply, without white space beside them."""

    start: str
    end: str
    """It may include what opens the answer (gpt-oss: the channel `final`)."""
    answer_start: str = ""
    """What stands before an answer without a thought."""

    def split(self, text: str, *, is_open: bool = False) -> tuple[str, str]:
        """Returns (thought, answer) of a reply; ("", the text) for a reply without a thought.

        is_open: the prompt has opened the thought already. A thought that is not closed takes the
        rest of the text, up to the first token of the closing mark. A closing mark alone closes a
        thought that began with the text.
        """
        body = text.lstrip()
        if body.startswith(self.start):
            body = body.removeprefix(self.start)
        elif not is_open and self.end not in body:
            if self.answer_start and body.startswith(self.answer_start):
                return "", body.removeprefix(self.answer_start)
            return "", text
        thought, found, answer = body.partition(self.end)
        if not found:
            thought, _, answer = body.partition(self.end_token)
        return thought.strip(), answer.strip()

    @property
    def end_token(self) -> str:
        """The first token of the closing mark."""
        match = re.match(r"<[^<>]+>", self.end)
        return match[0] if match else self.end


THINK = ThoughtMarks("<think>", "</think>")
"""The marks of most families."""


class MessageForm(NamedTuple):
    """What a chat template takes and writes."""

    text_arguments: bool = False
    """Whether arguments of calls are JSON texts instead of objects."""
    no_text: str | None = ""
    """Content of a message that has calls and no text."""
    thought_field: str | None = None
    """The field of an assistant's message that holds its thought. None: the template has none."""
    marks: ThoughtMarks | None = None
    """None: the template knows no thoughts, and replies are not split."""
    end_of_turn: str = ""
    """What the template writes after an answer that is the last message."""
    prompt: str = ""
    """What it writes after a user's turn to open the reply."""


@lru_cache(maxsize=16)  # templates, also those with the arguments of requests
def form_of(chat: ChatTemplate) -> MessageForm:
    """Returns the form of the messages of a chat template; the default without a template."""
    if not chat.tokenizer.chat_template:
        return MessageForm()
    plain = {"role": "assistant", "content": _ANSWER}
    try:
        before = chat.render([_USER])
        closed = chat.render([_USER], answered=True)
        answered = chat.render([_USER, plain], answered=True)
    except DataError:
        return _call_form(chat)
    start, _, end = answered.rpartition(_ANSWER)
    answer_start = ""
    if start.startswith(before):
        answer_start = start.removeprefix(before).strip()
    field, marks = _thoughts(chat, before)
    if marks is not None and not answer_start.startswith(marks.start):
        marks = marks._replace(answer_start=answer_start)
    prompt = before[len(commonprefix([before, closed])) :]
    return _call_form(chat)._replace(
        thought_field=field, marks=marks, end_of_turn=end, prompt=prompt
    )


_DEFAULT_FORM = MessageForm()


def to_template_messages(
    messages: list[Message], form: MessageForm = _DEFAULT_FORM
) -> list[Message]:
    """Returns copies of the messages in the form that the chat template expects.

    Text parts are joined to one text, and missing content becomes "", or the form's beside calls.
    Arguments of tool calls become objects, or texts if the form says so. A thought goes into the
    form's field. The role developer becomes system. Other keys stay, unless their value is None.
    """
    result = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        content = message.get("content", "")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        message["content"] = content
        if message.get("role") == "developer":
            message["role"] = "system"
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_convert_call(call, form.text_arguments) for call in calls]
            message["content"] = content or form.no_text
        if form.thought_field is not None:
            _move_thought(message, form.thought_field)
        result.append(message)
    return result


def answer_of(text: str, marks: ThoughtMarks | None) -> str:
    """Returns an assistant's text without its thought, whether marked by `marks` or <think>."""
    for each in (marks, THINK):
        if each is not None:
            text = each.split(text)[1]
    return text.strip()


def _move_thought(message: Message, field: str) -> None:
    """Renames the thought of a message, in place, whatever name the client uses."""
    for name in _THOUGHT_FIELDS:
        if name in message and name != field:
            thought = message.pop(name)
            message.setdefault(field, thought)


def _convert_call(call: dict[str, Any], text_arguments: bool) -> dict[str, Any]:
    """Returns a copy of a tool call with its arguments as an object, or as JSON text.

    Empty arguments are {}. Arguments that are not JSON stay texts. A missing type becomes
    "function".
    """
    function = dict(call.get("function", {}))
    arguments = function.get("arguments") or "{}"
    if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    if not text_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass
    function["arguments"] = arguments
    return {"type": "function", **call, "function": function}


def _call_form(chat: ChatTemplate) -> MessageForm:
    """Returns the form of messages with calls: the first in which the template writes arguments.

    The default if the template writes no calls, or none as JSON, text or marks. Objects that it
    shows as Python code do not count.
    """
    for no_text in ("", None):
        for text_arguments in (False, True):
            form = MessageForm(text_arguments, no_text)
            try:
                text = _render_call(chat, form)
            except DataError:
                continue
            if _THOUGHT in text and f"'{_THOUGHT}'" not in text:
                return form
    return MessageForm()


def _render_call(chat: ChatTemplate, form: MessageForm) -> str:
    """Returns a rendered conversation with a call and its result. DataError if that fails."""
    arguments: Any = {"ok": _THOUGHT}
    if form.text_arguments:
        arguments = json.dumps(arguments)
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "ok", "arguments": arguments}}
    messages = [
        _USER,
        {"role": "assistant", "content": form.no_text, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "name": "ok", "tool_call_id": _CALL_ID},
    ]
    return chat.render(messages)


def _thoughts(chat: ChatTemplate, before: str) -> tuple[str | None, ThoughtMarks | None]:
    """Returns (field of a thought, the marks that the template writes around it).

    Without such a field the marks are <think> and </think> if the template mentions the latter.
    before: the rendered conversation up to the answer.
    """
    call = {"type": "function", "id": _CALL_ID, "function": {"name": "ok", "arguments": {}}}
    for calls in ({}, {"tool_calls": [call]}):
        for field in _THOUGHT_FIELDS:
            message = {"role": "assistant", "content": _ANSWER, field: _THOUGHT, **calls}
            try:
                text = chat.render([_USER, message], answered=True)
            except DataError:
                continue
            marks = _marks_in(text, before)
            if marks is not None:
                return field, marks
    if THINK.end in str(chat.tokenizer.chat_template):
        return None, THINK
    return None, None


def _marks_in(text: str, before: str) -> ThoughtMarks | None:
    """Returns the marks around the thought in a rendered conversation; None if it has none.

    The closing mark reaches up to the answer, or is the first mark after the thought if the answer
    does not follow.
    """
    start, found, rest = text.partition(_THOUGHT)
    closing, is_answered, _ = rest.partition(_ANSWER)
    if found and not (is_answered and closing.strip()):
        match = _FIRST_MARK.match(rest)
        closing = match[0] if match else ""
    opening = start.removeprefix(before).strip()
    if not opening or not start.startswith(before):  # the prompt opens the thought itself
        match = _LAST_MARK.search(start)
        opening = match[0].strip() if match else ""
    if not opening or not closing.strip():
        return None
    return ThoughtMarks(opening, closing.strip())
