"""OpenAI's Responses API: `/v1/responses`.

A request's items become messages of a chat, and its flat tools those of chat completions. An
earlier reply of the same episode may be continued by `previous_response_id`. Nothing is stored for
longer than the episode, whatever `store` says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from spmdflow.episodes.ask import (
    ROLES,
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
    read_template_arguments,
    warn_of_ignored,
)
from spmdflow.episodes.dialect import (
    ApiDialect,
    EventStream,
    check_log_probs,
    write_event,
)
from spmdflow.episodes.fields import likeliest_tokens, token_entry
from spmdflow.episodes.guided import format_grammar

_SUPPORTED = {
    "background",
    "chat_template_kwargs",
    "conversation",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "store",
    "stream",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
}
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
}
_LOG_PROBS = "message.output_text.logprobs"


class ResponsesDialect(ApiDialect):
    """`/v1/responses`."""

    def parse(
        self, body: object, *, past: Mapping[str, EarlierReply], warned_fields: set[str]
    ) -> Ask:
        """See ApiDialect.parse."""
        fields = read_object(body)
        warn_of_ignored(fields, _SUPPORTED, warned_fields)
        for name, values in _ALLOWED.items():
            if fields.get(name) not in values:
                raise Refusal(f"{name}: got {fields[name]!r}, expected {values[-1]!r} or nothing")
        messages: list[Message] = []
        if isinstance(fields.get("instructions"), str):
            messages.append({"role": "system", "content": fields["instructions"]})
        earlier = fields.get("previous_response_id")
        if earlier is not None:
            if not isinstance(earlier, str) or earlier not in past:
                raise Refusal(
                    f"previous_response_id: got {earlier!r}, expected the id of a reply to "
                    f"/v1/responses in this episode",
                    status=404,
                    code="not_found",
                )
            messages += past[earlier].messages
        messages += _read_input(fields.get("input"))
        tools, choice = _read_tools(fields)
        num_likeliest = check_log_probs("top_logprobs", fields.get("top_logprobs"))
        text = read_object(fields.get("text") or {})
        reasoning = read_object(fields.get("reasoning") or {})
        warn_of_ignored(reasoning, {"effort"}, warned_fields)
        return Ask(
            messages,
            tools=tools,
            max_tokens=read_limit(fields, "max_output_tokens"),
            stream=bool(fields.get("stream")),
            log_probs=_LOG_PROBS in (fields.get("include") or ()) or num_likeliest > 0,
            top_log_probs=num_likeliest,
            grammar=format_grammar("text.format", text.get("format")),
            choice=choice,
            one_call=bool(tools) and fields.get("parallel_tool_calls") is False,
            num_instructions=int(bool(messages) and isinstance(fields.get("instructions"), str)),
            template_arguments=read_template_arguments(fields.get("chat_template_kwargs")),
            reasoning_effort=read_effort("reasoning.effort", reasoning.get("effort")),
        )

    def answer(self, ask: Ask, reply: Reply) -> dict[str, Any]:
        """See ApiDialect.answer."""
        return _response(ask, reply.name, _output(ask, reply), reply)

    def stream(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> EventStream:
        """See ApiDialect.stream."""
        return _ResponseStream(ask, name)

    def past_of(self, ask: Ask, reply: Reply) -> tuple[str, EarlierReply]:
        """See ApiDialect.past_of: all messages but the instructions, which are not inherited."""
        messages = [*ask.messages[ask.num_instructions :], reply.message]
        return f"resp_{reply.name}", EarlierReply(messages, ask.tools)


def _read_input(given: object) -> list[Message]:
    """The messages of a request's input: a text, or a list of items."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refusal("input: got neither a text nor a list of items; expected one of them")
    messages: list[Message] = []
    thought = ""
    for entry in given:
        item = read_object(entry)
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _thought_of(item)
            continue
        if kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else join_parts("input", output)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        elif kind == "function_call":
            call = _call_of(item)
            if messages and messages[-1]["role"] == "assistant" and not thought:
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "message":
            message = _message_of(item)
        else:
            raise Refusal(
                f"input: got an item of the type {kind!r}, expected message, function_call, "
                f"function_call_output or reasoning",
                code="unsupported_content",
            )
        if message["role"] == "assistant" and thought:
            message["reasoning_content"] = thought
            thought = ""
        messages.append(message)
    return messages


def _message_of(item: Mapping[str, Any]) -> Message:
    role = item.get("role")
    if role not in ROLES or role == "tool":
        raise Refusal(f"input: got the role {role!r}, expected system, developer, user, assistant")
    content = item.get("content")
    text = content if isinstance(content, str) else join_parts("input", content)
    return {"role": role, "content": text}


def _call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("name"), str):
        raise Refusal("input: got a function_call without a name; expected name and arguments")
    function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _thought_of(item: Mapping[str, Any]) -> str:
    texts = []
    for part in item.get("content") or item.get("summary") or ():
        texts.append(str(read_object(part).get("text", "")))
    return "".join(texts)


def _read_tools(fields: Mapping[str, Any]) -> tuple[list[Any] | None, ToolChoice | None]:
    """The offered tools in the form of chat completions, and the call that the reply must have."""
    tools = []
    for entry in fields.get("tools") or ():
        tool = read_object(entry)
        if tool.get("type") != "function":
            raise Refusal(
                f"tools: got a tool of the type {tool.get('type')!r}, expected function: the "
                f"endpoint runs no tools itself",
                code="unsupported_tool",
            )
        tools.append(function_tool(tool))
    choice = fields.get("tool_choice")
    offered = tools or None
    if choice == "none":
        return None, None
    if choice in (None, "auto"):
        return offered, None
    if choice == "required":
        return offered, read_choice(None, offered)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return offered, read_choice(str(choice.get("name")), offered)
    raise Refusal(f"tool_choice: got {choice!r}, expected auto, none, required or a function")


def _output(ask: Ask, reply: Reply) -> list[dict[str, Any]]:
    """The items of a reply: its thought, its text and its calls."""
    items = []
    thought = reply.message.get("reasoning_content")
    if thought:
        items.append(_thought_item(reply.name, thought))
    content = reply.message.get("content") or ""
    calls = reply.message.get("tool_calls") or []
    if content or not calls:
        items.append(_text_item(reply.name, content, _log_probs(ask, reply)))
    for call in calls:
        items.append(_call_item(call))
    return items


def _thought_item(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content}


def _text_item(name: str, text: str, log_probs: list[Any]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def _log_probs(ask: Ask, reply: Reply) -> list[Any]:
    if not ask.log_probs:
        return []
    entries = []
    numbers = reply.drawn.log_probs.tolist()
    for piece, number, tokens in zip(reply.pieces, numbers, likeliest_tokens(reply), strict=True):
        top = [token_entry(text, value) | {"bytes": []} for text, value in tokens]
        entries.append(token_entry(piece, number) | {"bytes": [], "top_logprobs": top})
    return entries


def _response(
    ask: Ask, name: str, output: list[dict[str, Any]], reply: Reply | None
) -> dict[str, Any]:
    """The response object. reply: None while it is being generated."""
    is_cut = reply is not None and reply.reason == "length"
    status = "in_progress"
    usage = None
    if reply is not None:
        status = "incomplete" if is_cut else "completed"
        usage = {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        }
    tools = []
    for tool in ask.tools or ():
        tools.append({"type": "function", "strict": False, **tool["function"]})
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "max_output_tokens": ask.max_tokens,
        "metadata": {},
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": not ask.one_call,
        "store": False,
        "tool_choice": "auto" if ask.choice is None else "required",
        "tools": tools,
        "usage": usage,
    }


class _ResponseStream(EventStream):
    """The events of a response: its items one after another, each with its parts."""

    def __init__(self, ask: Ask, name: str) -> None:
        super().__init__()
        self._ask = ask
        self._name = name
        self._number = 0
        self._done: list[dict[str, Any]] = []
        """Items that are complete."""

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return write_event(event, name=f"response.{kind}")

    def begin(self) -> bytes:
        """See EventStream.begin."""
        response = _response(self._ask, self._name, [], None)
        created = self._event("created", response=response)
        return created + self._event("in_progress", response=response)

    @property
    def _part(self) -> dict[str, Any]:
        """Where the text is."""
        return {"item_id": f"msg_{self._name}", "output_index": len(self._done), "content_index": 0}

    def write_thought(self, more: str) -> bytes:
        """See EventStream.write_thought."""
        begin = b""
        if self.sent_thought == more:
            item = _thought_item(self._name, "") | {"content": []}
            begin = self._event("output_item.added", output_index=0, item=item)
            part = {"type": "reasoning_text", "text": ""}
            begin += self._event("content_part.added", part=part, **self._thought_part)
        return begin + self._event("reasoning_text.delta", delta=more, **self._thought_part)

    @property
    def _thought_part(self) -> dict[str, Any]:
        """Where the thought is."""
        return {"item_id": f"rs_{self._name}", "output_index": 0, "content_index": 0}

    def _end_thought(self) -> bytes:
        """The end of the thought, if one was sent and has not ended."""
        if not self.sent_thought or self._done:
            return b""
        item = _thought_item(self._name, self.sent_thought)
        text = self._event("reasoning_text.done", text=self.sent_thought, **self._thought_part)
        part = self._event("content_part.done", part=item["content"][0], **self._thought_part)
        return text + part + self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> bytes:
        data = self._event("output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return data

    def _begin_text(self) -> bytes:
        thought = self._end_thought()
        item = _text_item(self._name, "", []) | {"status": "in_progress", "content": []}
        added = self._event("output_item.added", output_index=len(self._done), item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return thought + added + self._event("content_part.added", part=part, **self._part)

    def write_text(self, more: str) -> bytes:
        """See EventStream.write_text."""
        begin = self._begin_text() if self.sent == more else b""
        return begin + self._event("output_text.delta", delta=more, logprobs=[], **self._part)

    def finish(self, reply: Reply) -> bytes:
        """See EventStream.finish."""
        data = self._end_thought()
        for item in _output(self._ask, reply):
            if item["type"] == "message":
                if self.sent:
                    item = _text_item(self._name, self.sent, item["content"][0]["logprobs"])
                data += self._end_text(item) + self._end_item(item)
            elif item["type"] == "function_call":
                data += self._call(item) + self._end_item(item)
        response = _response(self._ask, self._name, self._done, reply)
        return data + self._event(response["status"], response=response)

    def _end_text(self, item: Mapping[str, Any]) -> bytes:
        begin = b"" if self.sent else self._begin_text()
        part = item["content"][0]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        data = begin + self._event("output_text.done", **done, **self._part)
        return data + self._event("content_part.done", part=part, **self._part)

    def _call(self, item: Mapping[str, Any]) -> bytes:
        index = len(self._done)
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        data = self._event("output_item.added", output_index=index, item=begun)
        data += self._event("function_call_arguments.delta", delta=item["arguments"], **place)
        done = {"arguments": item["arguments"], "name": item["name"]}
        return data + self._event("function_call_arguments.done", **done, **place)

    def fail(self, refusal: Refusal) -> bytes:
        """See EventStream.fail."""
        return self._event("error", code=refusal.code, message=str(refusal), param=None).replace(
            b"response.error", b"error"
        )
