"""Messages -> token ids that extend the recorded ones, by the chat template.

The recorded ids already contain the model's replies. New ids come from the template: the
conversation is rendered with a placeholder for the model's last reply, and the text after the
placeholder is encoded. The template must therefore be append-only: a later turn never changes the
text of earlier ones. A template that drops the thoughts of earlier turns, for example, is not.
`check_template` tests it before a run.
"""

from __future__ import annotations

import json
import re
from typing import Any

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.errors import ConfigError, DataError
from spmdflow.rollout.vllm_tools import CallReader

Message = dict[str, Any]
_STAND_IN = "ok"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THOUGHT = "<think>\nok\n</think>\n\nok"


class NotAppendOnly(DataError):
    """A later turn changes how the template renders an earlier one."""


class AppendOnlyTemplate:
    """Renders conversations that grow turn by turn with a `ChatTemplate`."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.tokenizer = chat.tokenizer
        self._template = chat
        self._ends = {str(self.tokenizer.eos_token)} - {"None"}

    def text(self, messages: list[Message], tools: list[Any] | None) -> str:
        """The conversation as text, up to where the model's reply begins. DataError if the template
        fails."""
        return self._template.render(messages, tools=tools)

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text, which already contains the special tokens."""
        return list(self._template.ids([text])[0])

    def tail(
        self, before: str, messages: list[Message], index: int, tools: list[Any] | None
    ) -> str:
        """Returns the text that the template renders after the reply messages[index].

        The conversation is rendered with a placeholder as the reply; the result is the text after
        it. before: the text of messages[:index]. NotAppendOnly if that text or the reply does not
        appear unchanged in the rendered conversation; a reply with tool calls is not compared.
        """
        stand_in = [*messages]
        stand_in[index] = {"role": "assistant", "content": _STAND_IN}
        rendered = self.text(stand_in, tools)
        self._check(before, rendered, _STAND_IN, messages, index, tools)
        reply = messages[index].get("content")
        if reply and not messages[index].get("tool_calls"):
            actual = self.text(messages, tools)
            self._check(before, actual, str(reply).strip(), messages, index, tools)
        return rendered[rendered.index(_STAND_IN, len(before)) + len(_STAND_IN) :]

    def _check(
        self,
        before: str,
        rendered: str,
        reply: str,
        messages: list[Message],
        index: int,
        tools: list[Any] | None,
    ) -> None:
        """NotAppendOnly unless the rendered text begins with `before` and the reply.

        White space between the two is ignored. The error reports the first message that the
        template renders differently once later ones follow, at the latest the reply
        messages[index].
        """
        if rendered.startswith(before) and rendered[len(before) :].lstrip().startswith(reply):
            return
        turn = index + 1
        for number in range(1, index):
            if messages[number]["role"] != "assistant":
                continue
            if not rendered.startswith(self.text(messages[:number], tools)):
                turn = number
                break
        raise NotAppendOnly(
            f"the chat template renders message {turn} of {len(messages)} "
            f"({messages[turn - 1]['role']}) differently once later messages follow"
        )


def check_template(chat: ChatTemplate) -> None:
    """Checks that the chat template is append-only; a tokenizer without a template passes.

    ConfigError with the turn that changes, or if the text after a reply is encoded differently
    alone than within the conversation. Tested with a conversation of three turns, and with thoughts
    if the template has "</think>".
    """
    tokenizer = chat.tokenizer
    if not tokenizer.chat_template:
        return  # without a template, only completions are supported
    template = AppendOnlyTemplate(chat)
    replies = [_STAND_IN] + [_THOUGHT] * ("</think>" in str(tokenizer.chat_template))
    for reply in replies:
        messages: list[Message] = [{"role": "user", "content": _STAND_IN}]
        text = template.text(messages, None)
        for _ in range(2):
            index = len(messages)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": _STAND_IN},
            ]
            key = "actor.rollout.episode.segments"
            do = "set it to longest, or change the template"
            try:
                tail = template.tail(text, messages, index, None)
            except NotAppendOnly as err:
                expected = "an append-only template, because segments is one"
                raise ConfigError.of(key, f"a tokenizer where {err}", expected, do) from err
            text = template.text(messages, None)
            tail_ids = template.ids(tail)
            all_ids = template.ids(text)
            if tail_ids != all_ids[len(all_ids) - len(tail_ids) :]:
                got = f"a tokenizer that encodes {tail!r} differently within a conversation"
                raise ConfigError.of(key, got, "the same ids", do)


def reply_of(
    text: str,
    tools: list[Any] | None,
    tokenizer: Any,
    *,
    raw: str = "",
    read_calls: CallReader | None = None,
) -> Message:
    """Returns the assistant's message: its text and, if tools were offered, its tool calls.

    Tool calls are parsed by `read_calls`, from the text with special tokens (raw), if it is given;
    otherwise by the tokenizer's response template, if it has one; otherwise in the form
    <tool_call>{"name": ..., "arguments": ...}</tool_call>. A message with calls has the text
    outside of them as its content (None if empty), and ids call_0, call_1, ... Without calls, the
    content is `text`.
    """
    message: Message = {"role": "assistant", "content": text}
    if not tools:
        return message
    content: str | None
    if read_calls is not None:
        content, calls = read_calls(raw, tools)
        content = content.strip()
    elif getattr(tokenizer, "response_template", None) or getattr(
        tokenizer, "response_schema", None
    ):
        parsed = tokenizer.parse_response(text)
        calls = []
        for call in parsed.get("tool_calls") or ():
            calls.append(call.get("function", call))
        content = parsed.get("content")
    else:
        calls = _parse_calls(text)
        content = _CALL.sub("", text).strip()
    if not calls:
        return message
    message["content"] = content or None
    message["tool_calls"] = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {
                "name": str(call["name"]),
                "arguments": _as_json(call.get("arguments", {})),
            },
        }
        for number, call in enumerate(calls)
    ]
    return message


def _parse_calls(text: str) -> list[dict[str, Any]]:
    """Returns the tool calls in a text, as dicts with "name", in order; [] if there are none.

    A call is <tool_call>{"name": ..., "arguments": ...}</tool_call>. If one of them is not JSON or
    has no name, the text has no calls.
    """
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match[1])
        except ValueError:
            return []
        if not isinstance(call.get("name"), str):
            return []
        calls.append(call)
    return calls


def _as_json(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments)


def to_template_messages(messages: list[Message]) -> list[Message]:
    """Returns copies of the messages in the form that chat templates expect.

    Text parts are joined to one text, and missing content becomes "". Arguments of tool calls
    become objects. The role developer becomes system. Other keys stay, unless their value is None.
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
            message["tool_calls"] = [_parse_arguments(call) for call in calls]
        result.append(message)
    return result


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a tool call whose arguments are parsed from JSON; {} if they are empty.

    Arguments that are not JSON stay texts. A missing type becomes "function".
    """
    function = dict(call.get("function", {}))
    try:
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    except ValueError:
        pass
    return {"type": "function", **call, "function": function}
