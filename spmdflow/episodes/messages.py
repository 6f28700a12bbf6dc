"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

Blocks become messages of a chat: results of tools become messages of the role `tool`, thoughts the
`reasoning_content` of a reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spmdflow.episodes.ask import (
    Ask,
    EarlierReply,
    Message,
    Refusal,
    Reply,
    ToolChoice,
    function_tool,
    join_parts,
    read_choice,
    read_effort,
    read_limit,
    read_object,
    read_stop,
    read_template_arguments,
    warn_of_ignored,
)
from spmdflow.episodes.dialect import ApiDialect, EventStream, write_event
from spmdflow.episodes.guided import format_grammar

_SUPPORTED = {
    "chat_template_kwargs",
    "compaction",
    "max_tokens",
    "mcp_servers",
    "messages",
    "metadata",
    "model",
    "output_config",
    "output_format",
    "stop_sequences",
    "stream",
    "system",
    "thread",
    "tool_choice",
    "tools",
}
_ALLOWED: dict[str, tuple[Any, ...]] = {"compaction": (None,), "mcp_servers": (None, [])}
"""Values of fields that would otherwise ask for something that the endpoint does not do."""
_LOST_THREAD = "thread_not_found"
"""Anthropic's clients answer this code by sending the whole conversation."""
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}


class MessagesDialect(ApiDialect):
    """`/v1/messages`."""

    def parse(
        self, body: object, *, past: Mapping[str, EarlierReply], warned_fields: set[str]
    ) -> Ask:
        """See ApiDialect.parse."""
        fields = read_object(body)
        warn_of_ignored(fields, _SUPPORTED, warned_fields)
        for name, values in _ALLOWED.items():
            if fields.get(name) not in values:
                raise Refusal(f"{name}: got {fields[name]!r}, expected {values[-1]!r} or nothing")
        earlier = _continued_reply(fields.get("thread"), past)
        messages = list(earlier.messages)
        system = fields.get("system")
        if system:
            text = system if isinstance(system, str) else join_parts("system", system)
            messages.append({"role": "system", "content": text})
        given = fields.get("messages")
        if not isinstance(given, list) or not given:
            raise Refusal("messages: got no list of messages; expected at least one")
        for message in given:
            messages += _read_message(read_object(message))
        offered = _offered_tools(fields) or earlier.tools
        tools, choice, one_call = _read_choice(fields, offered)
        config = read_object(fields.get("output_config") or {})
        form = config.get("format") or fields.get("output_format")
        return Ask(
            messages,
            tools=tools,
            max_tokens=read_limit(fields, "max_tokens"),
            stop=read_stop("stop_sequences", fields.get("stop_sequences")),
            stream=bool(fields.get("stream")),
            grammar=format_grammar("output_config.format", form),
            choice=choice,
            one_call=one_call,
            template_arguments=read_template_arguments(fields.get("chat_template_kwargs")),
            reasoning_effort=read_effort("output_config.effort", config.get("effort")),
            is_kept=bool(fields.get("thread")),
            kept_tools=offered,
        )

    def answer(self, ask: Ask, reply: Reply) -> dict[str, Any]:
        """See ApiDialect.answer."""
        return _head(reply.name, ask.model, reply.num_prompt_tokens) | {
            "content": _blocks(reply.message),
            **_stop_of(reply),
            "usage": _usage(reply.num_prompt_tokens, reply.num_tokens),
        }

    def stream(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> EventStream:
        """See ApiDialect.stream."""
        return _MessageStream(name, ask.model, num_prompt_tokens)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """See ApiDialect.error: in Anthropic's form."""
        kind = _ERRORS.get(refusal.status, "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": str(refusal)}
        if refusal.code == _LOST_THREAD:
            error["details"] = {"error_code": refusal.code}
        return {"type": "error", "error": error}

    def past_of(self, ask: Ask, reply: Reply) -> tuple[str, EarlierReply] | None:
        """See ApiDialect.past_of: with the system prompt and the tools, which are inherited."""
        if not ask.is_kept:
            return None
        return f"msg_{reply.name}", EarlierReply([*ask.messages, reply.message], ask.kept_tools)


def _continued_reply(thread: object, past: Mapping[str, EarlierReply]) -> EarlierReply:
    """What the `thread` of a request continues; nothing if it begins one, or there is none.

    Refusal for a reply that no request with a `thread` of this episode has had.
    """
    fields = read_object(thread or {"type": "create"})
    if fields.get("type") == "create":
        return EarlierReply([], None)
    previous = fields.get("previous_message_id")
    if fields.get("type") != "continue" or not isinstance(previous, str):
        raise Refusal(f"thread: got {fields!r}, expected the type create, or continue with an id")
    if previous not in past:
        raise Refusal(
            f"thread: got previous_message_id {previous!r}, expected the id of a reply to a "
            f"request with `thread` in this episode",
            status=404,
            code=_LOST_THREAD,
        )
    return past[previous]


def _read_message(message: Mapping[str, Any]) -> list[Message]:
    """The messages of a chat that one message with blocks stands for."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise Refusal(f"messages: got the role {role!r}, expected user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise Refusal("messages: got no content; expected a text or a list of blocks")
    if role == "assistant":
        return [_read_reply(content)]
    results: list[Message] = []
    others = []
    for entry in content:
        block = read_object(entry)
        if block.get("type") == "tool_result":
            results.append(_result_of(block))
        else:
            others.append(block)
    if others:
        results.append({"role": role, "content": join_parts("messages", others)})
    return results


def _result_of(block: Mapping[str, Any]) -> Message:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else join_parts("messages", content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _read_reply(content: list[Any]) -> Message:
    """A reply of the model, from its blocks."""
    texts = []
    thoughts = []
    calls = []
    for entry in content:
        block = read_object(entry)
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            texts.append(join_parts("messages", [block]))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _offered_tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a request, in the form of chat completions."""
    tools: list[Any] = []
    for entry in fields.get("tools") or ():
        tool = read_object(entry)
        if tool.get("type", "custom") not in (None, "custom"):
            raise Refusal(
                f"tools: got a tool of the type {tool['type']!r}, expected a name and an "
                f"input_schema: the endpoint runs no tools itself",
                code="unsupported_tool",
            )
        tools.append(function_tool({**tool, "parameters": tool.get("input_schema")}))
    return tools or None


def _read_choice(
    fields: Mapping[str, Any], offered: list[Any] | None
) -> tuple[list[Any] | None, ToolChoice | None, bool]:
    """(tools that may be called, call that the reply must have, whether the first call ends it)."""
    choice = read_object(fields.get("tool_choice") or {"type": "auto"})
    one_call = offered is not None and choice.get("disable_parallel_tool_use") is True
    kind = choice.get("type")
    if kind == "none":
        return None, None, False
    if kind == "auto":
        return offered, None, one_call
    if kind == "any":
        return offered, read_choice(None, offered), one_call
    if kind == "tool":
        return offered, read_choice(str(choice.get("name")), offered), one_call
    raise Refusal(f"tool_choice: got {choice!r}, expected the type auto, any, tool or none")


def _input_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a call: an object, or what the model wrote in its place.

    Then the program reports to the model what is wrong with them, and what it sends back is the
    recorded call.
    """
    text = call["function"]["arguments"]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _blocks(message: Message) -> list[dict[str, Any]]:
    """The blocks of a reply: its thought, its text and its calls."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append(
            {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
        )
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": name, "input": _input_of(call)}
        )
    return blocks


def _head(name: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(num_prompt_tokens, 0),
    }


def _usage(prompt: int, response: int) -> dict[str, int]:
    return {"input_tokens": prompt, "output_tokens": response}


def _stop_of(reply: Reply) -> dict[str, Any]:
    """Why a reply ended, in Anthropic's words."""
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = reasons[reply.reason]
    if reply.stopped_by is not None and reason == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": reason, "stop_sequence": None}


class _MessageStream(EventStream):
    """The events of a message: its blocks one after another."""

    def __init__(self, name: str, model: str, num_prompt_tokens: int) -> None:
        super().__init__()
        self._start = _head(name, model, num_prompt_tokens)
        self._index = 0

    def _event(self, kind: str, **fields: Any) -> bytes:
        return write_event({"type": kind, **fields}, name=kind)

    def begin(self) -> bytes:
        """See EventStream.begin."""
        return self._event("message_start", message=self._start)

    def _begin_block(self, block: Mapping[str, Any]) -> bytes:
        return self._event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        data = self._event("content_block_stop", index=self._index)
        self._index += 1
        return data

    def write_thought(self, more: str) -> bytes:
        """See EventStream.write_thought."""
        data = b""
        if self.sent_thought == more:
            data = self._begin_block({"type": "thinking", "thinking": "", "signature": ""})
        delta = {"type": "thinking_delta", "thinking": more}
        return data + self._event("content_block_delta", index=self._index, delta=delta)

    def write_text(self, more: str) -> bytes:
        """See EventStream.write_text."""
        data = b""
        if self.sent == more:
            data = self._end_block() if self.sent_thought else b""
            data += self._begin_block({"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": more}
        return data + self._event("content_block_delta", index=self._index, delta=delta)

    def finish(self, reply: Reply) -> bytes:
        """See EventStream.finish."""
        data = self._end_block() if self.sent or self.sent_thought else b""
        for block in _blocks(reply.message):
            if block["type"] == "tool_use":
                text = json.dumps(block["input"])
                delta = {"type": "input_json_delta", "partial_json": text}
                data += self._begin_block({**block, "input": {}})
                data += self._event("content_block_delta", index=self._index, delta=delta)
                data += self._end_block()
        usage = _usage(reply.num_prompt_tokens, reply.num_tokens)
        data += self._event("message_delta", delta=_stop_of(reply), usage=usage)
        return data + self._event("message_stop")

    def fail(self, refusal: Refusal) -> bytes:
        """See EventStream.fail."""
        error = {"type": "api_error", "message": str(refusal)}
        return self._event("error", error=error)
