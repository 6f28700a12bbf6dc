"""Messages -> token ids that extend the recorded ones, by the chat template.

What the model said is in the ids already. What is new comes from the template: the conversation is
rendered with a stand-in for the model's last reply, and what follows the stand-in is encoded. So a
template must be append-only: a later turn never changes what it wrote for earlier ones. One that
drops the thoughts of earlier turns, for example, is not. `check_template` tries it before a run.
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
    """A later turn changed how the template writes an earlier one."""


class Template:
    """A chat template whose conversations grow. Its texts are those of `ChatTemplate`."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.tokenizer = chat.tokenizer
        self._template = chat
        self._ends = {str(self.tokenizer.eos_token)} - {"None"}

    def text(self, messages: list[Message], tools: list[Any] | None) -> str:
        """The conversation as text, up to where the model goes on. DataError if it is refused."""
        return self._template.render(messages, tools=tools)

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has written the special tokens already."""
        return list(self._template.ids([text])[0])

    def tail(
        self, before: str, messages: list[Message], place: int, tools: list[Any] | None
    ) -> str:
        """What the template writes after the reply messages[place].

        before: the text of the messages before it. NotAppendOnly if that text, or the reply, is
        not in the rendered whole as it was.
        """
        stand_in = [*messages]
        stand_in[place] = {"role": "assistant", "content": _STAND_IN}
        whole = self.text(stand_in, tools)
        self._check(before, whole, _STAND_IN, messages, place, tools)
        said = messages[place].get("content")
        if said and not messages[place].get("tool_calls"):
            actual = self.text(messages, tools)
            self._check(before, actual, str(said).strip(), messages, place, tools)
        return whole[whole.index(_STAND_IN, len(before)) + len(_STAND_IN) :]

    def _check(
        self,
        before: str,
        whole: str,
        reply: str,
        messages: list[Message],
        place: int,
        tools: list[Any] | None,
    ) -> None:
        if whole.startswith(before) and whole[len(before) :].lstrip().startswith(reply):
            return
        turn = place + 1
        for number in range(1, place):
            if messages[number]["role"] != "assistant":
                continue
            if not whole.startswith(self.text(messages[:number], tools)):
                turn = number
                break
        raise NotAppendOnly(
            f"the chat template writes message {turn} of {len(messages)} "
            f"({messages[turn - 1]['role']}) differently once later messages follow"
        )


def check_template(chat: ChatTemplate) -> None:
    """ConfigError unless the chat template is append-only, with the turn that changes.

    Tried with a conversation of three turns, and with thoughts if the template knows them.
    """
    tokenizer = chat.tokenizer
    if not tokenizer.chat_template:
        return  # only completions are answered
    template = Template(chat)
    replies = [_STAND_IN] + [_THOUGHT] * ("</think>" in str(tokenizer.chat_template))
    for reply in replies:
        messages: list[Message] = [{"role": "user", "content": _STAND_IN}]
        text = template.text(messages, None)
        for _ in range(2):
            place = len(messages)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": _STAND_IN},
            ]
            key = "actor.rollout.episode.segments"
            do = "set it to longest, or change the template"
            try:
                tail = template.tail(text, messages, place, None)
            except NotAppendOnly as err:
                expected = "an append-only one, as segments is one"
                raise ConfigError.of(key, f"a tokenizer where {err}", expected, do) from err
            text = template.text(messages, None)
            own = template.ids(tail)
            whole = template.ids(text)
            if own != whole[len(whole) - len(own) :]:
                got = f"a tokenizer that encodes {tail!r} differently inside of a conversation"
                raise ConfigError.of(key, got, "the same ids", do)


def reply_of(
    text: str,
    tools: list[Any] | None,
    tokenizer: Any,
    *,
    raw: str = "",
    read_calls: CallReader | None = None,
) -> Message:
    """The assistant's message: its text, and tool calls if tools were offered.

    Calls are read by `read_calls`, from the text with its special tokens (raw), if it is given;
    else by the tokenizer's own response template if it has one, else in the form
    <tool_call>{"name": ..., "arguments": ...}</tool_call>.
    """
    message: Message = {"role": "assistant", "content": text}
    if not tools:
        return message
    rest: str | None
    if read_calls is not None:
        rest, calls = read_calls(raw, tools)
        rest = rest.strip()
    elif getattr(tokenizer, "response_template", None) or getattr(
        tokenizer, "response_schema", None
    ):
        parsed = tokenizer.parse_response(text)
        calls = []
        for call in parsed.get("tool_calls") or ():
            calls.append(call.get("function", call))
        rest = parsed.get("content")
    else:
        calls = _calls_in(text)
        rest = _CALL.sub("", text).strip()
    if not calls:
        return message
    message["content"] = rest or None
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


def _calls_in(text: str) -> list[dict[str, Any]]:
    """The calls in a text; what is no JSON with a name is text, and no call."""
    found = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match[1])
        except ValueError:
            return []
        if not isinstance(call.get("name"), str):
            return []
        found.append(call)
    return found


def _as_json(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments)


def for_template(messages: list[Message]) -> list[Message]:
    """The messages as templates want them: text parts joined, arguments of calls as objects."""
    made = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        content = message.get("content", "")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        message["content"] = content
        if message.get("role") == "developer":
            message["role"] = "system"
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_with_object(call) for call in calls]
        made.append(message)
    return made


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    try:
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    except ValueError:
        pass
    return {"type": "function", **call, "function": function}
