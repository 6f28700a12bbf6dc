"""Sampled tokens -> the assistant's message: its thought, its text and its tool calls.

Knows no conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.message_form import (
    Message,
    ThoughtMarks,
    answer_of,
    form_of,
    to_template_messages,
)
from spmdflow.rollout.vllm_tools import CallReader

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_OPENING_TOKENS = 8
"""Tokens of the prompt that may open a thought, besides one for each byte of the mark."""


class Sampled(NamedTuple):
    """A reply as it was sampled."""

    text: str
    """What the client may see: without special tokens, and cut before a stop string."""
    raw: str
    """The same text with special tokens, but not the one that ends the reply."""
    ids: list[int]
    """All of them."""
    prompt: list[int]
    """The ids that the model read."""


class ReplyReader:
    """Reads replies, and recognises them when a client sends them back."""

    def __init__(self, chat: ChatTemplate, read_calls: CallReader | None = None) -> None:
        """read_calls: parses tool calls, from text with special tokens. None: see `read`."""
        self._chat = chat
        self._tokenizer = chat.tokenizer
        self._read_calls = read_calls
        self._marks = form_of(chat).marks

    @property
    def thought_marks(self) -> ThoughtMarks | None:
        """The marks around thoughts; None if the chat template knows no thoughts."""
        return self._marks

    def opens_thought(self, prompt: list[int]) -> bool:
        """Whether the prompt with these ids ends with the mark that opens a thought."""
        if self._marks is None:
            return False
        last = prompt[-_OPENING_TOKENS - len(self._marks.start.encode()) :]
        return bool(self._tokenizer.decode(last).rstrip().endswith(self._marks.start))

    def read(
        self, sampled: Sampled, tools: list[Any] | None, call_id: Callable[[int], str]
    ) -> Message:
        """Returns the assistant's message.

        reasoning_content: the thought, if the chat template knows thoughts and the reply has one.
        content: the other text; with calls, the text outside of them, or None if that is empty.
        tool_calls: only if tools were offered. Parsed by `read_calls` if it is given, otherwise by
        the tokenizer's response template if it has one, otherwise in the form
        <tool_call>{"name": ..., "arguments": ...}</tool_call>. The id of a call is the one that the
        model wrote, if the parser gives it, otherwise call_id(index of the call).
        """
        thought, text, raw = self._split_thought(sampled)
        message: Message = {"role": "assistant", "content": text}
        calls: list[dict[str, Any]] = []
        if tools:
            content, calls = self._parse_calls(sampled, text, raw, tools)
            if calls:
                message["content"] = content.strip() or None
        if thought:
            message["reasoning_content"] = thought
        if calls:
            entries = []
            for index, call in enumerate(calls):
                entries.append(_tool_call(call, sampled.raw, call_id(index)))
            message["tool_calls"] = entries
        return message

    def are_equal(self, recorded: list[Message], repeated: list[Message]) -> bool:
        """Whether a client's messages say the same as the recorded ones.

        Roles, texts without white space around them, and names and arguments of calls are compared;
        of an assistant's text only the answer, because clients send a thought in the text, in a
        field of its own, or not at all.
        """
        if recorded == repeated:
            return True
        if len(recorded) != len(repeated):
            return False
        return all(map(self._is_equal, recorded, repeated))

    def _is_equal(self, recorded: Message, repeated: Message) -> bool:
        return self._comparison_key(recorded) == self._comparison_key(repeated)

    def _comparison_key(self, message: Message) -> tuple[Any, ...]:
        """Returns (role, text, [(name, arguments)] of the tool calls). Equal messages have equal
        keys."""
        (plain,) = to_template_messages([message])
        text = plain["content"].strip()
        if plain.get("role") == "assistant":
            text = answer_of(text, self._marks)
        calls = []
        for call in plain.get("tool_calls") or ():
            calls.append((call["function"].get("name"), call["function"].get("arguments")))
        return plain.get("role"), text, calls

    def _split_thought(self, sampled: Sampled) -> tuple[str, str, str]:
        """Returns (thought, other text, the same with special tokens)."""
        marks = self._marks
        if marks is None:
            return "", sampled.text, sampled.raw
        is_open = self.opens_thought(sampled.prompt)
        thought, raw = marks.split(sampled.raw, is_open=is_open)
        if raw == sampled.raw:
            return "", sampled.text, sampled.raw
        if self._chat.remove_special(sampled.raw) == sampled.raw:
            thought, text = marks.split(sampled.text, is_open=is_open)
        else:
            text = self._chat.remove_special(raw)
        return self._chat.remove_special(thought), text, raw

    def _parse_calls(
        self, sampled: Sampled, text: str, raw: str, tools: list[Any]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Returns (text outside of calls, calls with name, arguments and perhaps id).

        text, raw: without the thought. No calls if one of them cannot be read.
        """
        if self._read_calls is not None:
            return self._read_calls(raw, tools)
        if getattr(self._tokenizer, "response_template", None) is None:
            return _CALL.sub("", text), _json_calls(text)
        try:
            parsed = self._tokenizer.parse_response(sampled.ids, prefix=sampled.prompt, tools=tools)
        except (ValueError, LookupError):  # what the model wrote does not fit the template
            return text, []
        calls = []
        for call in parsed.get("tool_calls") or ():
            calls.append(call.get("function", call))
        if not all(isinstance(call.get("name"), str) for call in calls):
            return text, []
        return self._chat.remove_special(str(parsed.get("content") or "")), calls


def _tool_call(call: dict[str, Any], raw: str, new_id: str) -> dict[str, Any]:
    """Returns a tool call in OpenAI's form, with the id that the model wrote or a new one."""
    written = str(call.get("id") or "")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": written if written and written in raw else new_id,
        "type": "function",
        "function": {"name": str(call["name"]), "arguments": arguments},
    }


def calls_of(message: Message) -> list[list[str]]:
    """Returns [name, arguments as JSON] of each tool call of a message."""
    calls = []
    for call in message.get("tool_calls") or ():
        calls.append([call["function"]["name"], call["function"]["arguments"]])
    return calls


def _json_calls(text: str) -> list[dict[str, Any]]:
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


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string in it, or the complete text without one.

    Clients do not see stop strings.
    """
    positions = []
    for string in stop:
        if string in text:
            positions.append(text.index(string))
    if positions:
        return text[: min(positions)]
    return text
