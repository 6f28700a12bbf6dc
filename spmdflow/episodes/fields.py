"""OpenAI's chat completions and completions: the supported fields, and answers in their form.

Fields that contradict what is recorded are refused. Unknown fields are ignored with one warning
each. Sampling settings (temperature, top_p, top_k, seed) of requests are ignored too: those of the
run apply, so that the recorded policy is the trained one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from spmdflow.episodes.ask import (
    Ask,
    EarlierReply,
    Message,
    Refusal,
    Reply,
    ToolChoice,
    function_tool,
    read_choice,
    read_effort,
    read_limit,
    read_messages,
    read_object,
    read_stop,
    read_template_arguments,
    warn_of_ignored,
)
from spmdflow.episodes.dialect import (
    ApiDialect,
    EventStream,
    check_log_probs,
    write_event,
)
from spmdflow.episodes.guided import format_grammar

_SUPPORTED = {
    "add_generation_prompt",
    "audio",
    "best_of",
    "chat_template_kwargs",
    "continue_final_message",
    "echo",
    "function_call",
    "functions",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prompt",
    "reasoning_effort",
    "response_format",
    "return_token_ids",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "tool_choice",
    "tools",
    "top_logprobs",
}
_OF_CHATS = {"chat_template_kwargs", "reasoning_effort"}
"""Fields that have no meaning for a completion."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
"""The values of fields that would otherwise ask for something that is not recorded."""
MOST_CHOICES = 64
"""Largest n of a request."""


def parse_request(body: object, *, chat: bool, warned_fields: set[str]) -> Ask:
    """Returns the Ask for the JSON body of a request; Refusal if it cannot be met as it stands.

    chat: it must have messages, otherwise a prompt (a text or token ids). max_tokens and
    max_completion_tokens must be equal, if both are given, and positive. stop: one text or several,
    not empty. tool_choice "none" drops the tools. Unknown fields are ignored, with one warning
    each. warned_fields: names of fields that were logged; names are added.
    """
    fields = read_object(body)
    warn_of_ignored(fields, _SUPPORTED if chat else _SUPPORTED - _OF_CHATS, warned_fields)
    for name, values in _ALLOWED.items():
        if fields.get(name) not in values:
            raise Refusal(f"{name}: got {fields[name]!r}, expected {values[-1]!r} or nothing")
    max_tokens = read_limit(fields, "max_tokens", "max_completion_tokens")
    stop = read_stop("stop", fields.get("stop"))
    tools, choice = _read_tools(fields)
    log_probs = fields.get("logprobs")
    if chat:
        messages = read_messages(fields.get("messages"))
        prompt: str | list[int] = ""
        num_likeliest = check_log_probs("top_logprobs", fields.get("top_logprobs"))
        log_probs = bool(log_probs) or num_likeliest > 0
    else:
        messages = []
        prompt = _read_prompt(fields.get("prompt", ""))
        is_count = type(log_probs) is int
        num_likeliest = check_log_probs("logprobs", log_probs if is_count else None)
        log_probs = is_count or bool(log_probs)
    options = fields.get("stream_options") or {}
    one_call = bool(tools) and fields.get("parallel_tool_calls") is False
    return Ask(
        messages,
        prompt,
        tools,
        max_tokens,
        stop,
        stream=bool(fields.get("stream")),
        with_usage=bool(read_object(options).get("include_usage")),
        log_probs=log_probs,
        token_ids=bool(fields.get("return_token_ids")),
        top_log_probs=num_likeliest,
        grammar=format_grammar("response_format", _schema_fields(fields.get("response_format"))),
        choice=choice,
        one_call=one_call,
        is_legacy=tools is not None and "functions" in fields and "tools" not in fields,
        num_choices=_read_num_choices(fields),
        template_arguments=read_template_arguments(fields.get("chat_template_kwargs")),
        reasoning_effort=read_effort("reasoning_effort", fields.get("reasoning_effort")),
    )


def _read_num_choices(fields: Mapping[str, Any]) -> int:
    """The field n; 1 without it. Refusal for anything but 1 to 64, and for another best_of."""
    number = 1 if fields.get("n") is None else fields["n"]
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is not int or not 1 <= number <= MOST_CHOICES:
        raise Refusal(f"n: got {number!r}, expected a whole number from 1 to {MOST_CHOICES}")
    if fields.get("best_of") not in (None, number):
        raise Refusal(
            f"best_of: got {fields['best_of']!r}, expected n={number} or nothing: all replies "
            f"that are generated are returned"
        )
    return number


def _read_tools(fields: Mapping[str, Any]) -> tuple[list[Any] | None, ToolChoice | None]:
    """The offered tools and the call that the reply must have, also in the form of `functions`."""
    offered = fields.get("tools") or []
    choice = fields.get("tool_choice")
    if fields.get("functions") and not offered:
        if not isinstance(fields["functions"], list):
            raise Refusal("functions: got no list; expected functions with a name")
        offered = [function_tool(read_object(function)) for function in fields["functions"]]
        choice = fields.get("function_call")
        if isinstance(choice, dict):
            choice = {"function": choice}
    if not isinstance(offered, list):
        raise Refusal("tools: got no list; expected tools of the type 'function'")
    for tool in offered:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal("tools: got a tool without a function; expected the type 'function'")
    tools = offered or None
    if choice == "none":
        return None, None
    if choice in (None, "auto"):
        return tools, None
    if choice == "required":
        return tools, read_choice(None, tools)
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if isinstance(name, str):
            return tools, read_choice(name, tools)
    raise Refusal(f"tool_choice: got {choice!r}, expected auto, none, required or a function")


def _schema_fields(response_format: Any) -> Any:
    """A response_format in the flat form of Responses: the schema next to the type."""
    if isinstance(response_format, dict) and isinstance(response_format.get("json_schema"), dict):
        return {"type": response_format.get("type"), **response_format["json_schema"]}
    return response_format


def _read_prompt(prompt: Any) -> str | list[int]:
    """A completion's prompt: a text or token ids, also as the only one of a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        is_valid = bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)
    else:
        is_valid = isinstance(prompt, str) and bool(prompt)
    if not is_valid:
        raise Refusal("prompt: got neither a text nor a list of token ids; expected one prompt")
    result: str | list[int] = prompt
    return result


class ChatDialect(ApiDialect):
    """`/v1/chat/completions`."""

    def parse(
        self, body: object, *, past: Mapping[str, EarlierReply], warned_fields: set[str]
    ) -> Ask:
        """See ApiDialect.parse."""
        return parse_request(body, chat=True, warned_fields=warned_fields)

    def answer(self, ask: Ask, reply: Reply) -> dict[str, Any]:
        """See ApiDialect.answer."""
        return self.answer_choices(ask, [reply])

    def answer_choices(self, ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
        """See ApiDialect.answer_choices."""
        choices = []
        for index, reply in enumerate(replies):
            choices.append(_choice(ask, reply, index) | {"message": _message(ask, reply)})
        head = _head("chat.completion", replies[0].name, ask.model) | _prompt_ids(ask, replies[0])
        return head | {"choices": choices, "usage": _usage(replies)}

    def stream(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> EventStream:
        """See ApiDialect.stream."""
        return _ChatStream(ask, name, 0)

    def stream_choices(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> list[EventStream]:
        """See ApiDialect.stream_choices."""
        return [_ChatStream(ask, name, index) for index in range(ask.num_choices)]


class CompletionDialect(ApiDialect):
    """`/v1/completions`."""

    def parse(
        self, body: object, *, past: Mapping[str, EarlierReply], warned_fields: set[str]
    ) -> Ask:
        """See ApiDialect.parse."""
        return parse_request(body, chat=False, warned_fields=warned_fields)

    def answer(self, ask: Ask, reply: Reply) -> dict[str, Any]:
        """See ApiDialect.answer."""
        return self.answer_choices(ask, [reply])

    def answer_choices(self, ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
        """See ApiDialect.answer_choices."""
        choices = []
        for index, reply in enumerate(replies):
            text = reply.message["content"] or ""
            choices.append(_choice(ask, reply, index) | {"text": text})
        head = _head("text_completion", replies[0].name, ask.model) | _prompt_ids(ask, replies[0])
        return head | {"choices": choices, "usage": _usage(replies)}

    def stream(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> EventStream:
        """See ApiDialect.stream."""
        return _CompletionStream(ask, name, 0)

    def stream_choices(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> list[EventStream]:
        """See ApiDialect.stream_choices."""
        return [_CompletionStream(ask, name, index) for index in range(ask.num_choices)]


class _ChunkStream(EventStream):
    """Chunks in OpenAI's form: text, then what else the reply has, then [DONE]."""

    kind: str

    def __init__(self, ask: Ask, name: str, index: int) -> None:
        """index: of the choice."""
        super().__init__()
        self._ask = ask
        self._index = index
        self._head = _head(self.kind, name, ask.model)

    def begin(self) -> bytes:
        """See EventStream.begin: nothing, because the first chunk has text."""
        return b""

    def _chunk(self, choice: Mapping[str, Any], head: Mapping[str, Any] | None = None) -> bytes:
        full = {"index": self._index, "finish_reason": None, "logprobs": None, **choice}
        return write_event(self._head | dict(head or {}) | {"choices": [full]})

    def fail(self, refusal: Refusal) -> bytes:
        """See EventStream.fail."""
        return write_event({"error": {"message": str(refusal), "code": refusal.code}})

    def _end(self, reply: Reply, empty: Mapping[str, Any]) -> bytes:
        """The chunk with the reason. empty: the choice's part that would have text."""
        return self._chunk({"finish_reason": _reason(self._ask, reply), **empty})

    def close(self, replies: Sequence[Reply]) -> bytes:
        """See EventStream.close: the token counts if they are asked for, then [DONE]."""
        data = b""
        if self._ask.with_usage:
            data = write_event(self._head | {"choices": [], "usage": _usage(replies)})
        return data + b"data: [DONE]\n\n"

    def _details(self, reply: Reply) -> tuple[dict[str, Any], dict[str, Any]]:
        """(parts of the choice, parts of the chunk) that were asked for besides the text."""
        choice: dict[str, Any] = {}
        if self._ask.log_probs:
            choice["logprobs"] = _log_probs(self._ask, reply)
        if self._ask.token_ids:
            choice["token_ids"] = reply.drawn.tokens.tolist()
        if self._index:
            return choice, {}
        return choice, _prompt_ids(self._ask, reply)


class _ChatStream(_ChunkStream):
    kind = "chat.completion.chunk"

    def write_thought(self, more: str) -> bytes:
        """See EventStream.write_thought. The first chunk has the role."""
        delta = {"reasoning_content": more}
        if self.sent_thought == more:
            delta = {"role": "assistant", "reasoning_content": more}
        return self._chunk({"delta": delta})

    def write_text(self, more: str) -> bytes:
        """See EventStream.write_text. The first chunk has the role."""
        delta = {"content": more}
        if self.sent == more and not self.sent_thought:
            delta = {"role": "assistant", "content": more}
        return self._chunk({"delta": delta})

    def finish(self, reply: Reply) -> bytes:
        """See EventStream.finish."""
        delta = {}
        for name, value in _message(self._ask, reply).items():
            if name not in ("role", "content", "reasoning_content", "tool_calls"):
                delta[name] = value
        if not self.sent:
            delta |= {"role": "assistant", "content": reply.message["content"]}
        calls = _message(self._ask, reply).get("tool_calls") or []
        if calls:
            delta["tool_calls"] = [call | {"index": i} for i, call in enumerate(calls)]
        choice, head = self._details(reply)
        data = b""
        if delta or choice or head:
            data = self._chunk({"delta": delta, **choice}, head)
        return data + self._end(reply, {"delta": {}})


class _CompletionStream(_ChunkStream):
    kind = "text_completion"

    def write_thought(self, more: str) -> bytes:
        """See EventStream.write_thought: a completion has no thoughts."""
        return b""

    def write_text(self, more: str) -> bytes:
        """See EventStream.write_text."""
        return self._chunk({"text": more})

    def finish(self, reply: Reply) -> bytes:
        """See EventStream.finish."""
        choice, head = self._details(reply)
        data = self._chunk({"text": "", **choice}, head) if choice or head else b""
        return data + self._end(reply, {"text": ""})


def _head(kind: str, name: str, model: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    created = int(time.time())
    return {"id": f"{prefix}-{name}", "object": kind, "created": created, "model": model}


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """The token counts of a request's choices: the prompt counts once."""
    prompt = replies[0].num_prompt_tokens
    response = sum(reply.num_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
    }


def _prompt_ids(ask: Ask, reply: Reply) -> dict[str, Any]:
    return {"prompt_token_ids": reply.prompt_ids} if ask.token_ids else {}


def _reason(ask: Ask, reply: Reply) -> str:
    if ask.is_legacy and reply.reason == "tool_calls":
        return "function_call"
    return reply.reason


def _message(ask: Ask, reply: Reply) -> Message:
    """The message of a reply; with `function_call` for a client that offered `functions`."""
    message = dict(reply.message)
    if ask.is_legacy and message.get("tool_calls"):
        message["function_call"] = message.pop("tool_calls")[0]["function"]
    return message


def _choice(ask: Ask, reply: Reply, index: int) -> dict[str, Any]:
    reason = _reason(ask, reply)
    choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
    if ask.log_probs:
        choice["logprobs"] = _log_probs(ask, reply)
    if ask.token_ids:
        choice["token_ids"] = reply.drawn.tokens.tolist()
    return choice


def _log_probs(ask: Ask, reply: Reply) -> dict[str, Any]:
    """Returns the log-probability and text of each token of a reply, and of the likeliest ones.

    For a completion {"tokens", "token_logprobs", "top_logprobs"}, for a chat {"content": [one dict
    per token]}.
    """
    numbers = reply.drawn.log_probs.tolist()
    likeliest = likeliest_tokens(reply)
    if not ask.messages:
        top = None
        if ask.top_log_probs:
            top = [dict(tokens) for tokens in likeliest]
        return {"tokens": reply.pieces, "token_logprobs": numbers, "top_logprobs": top}
    content = []
    for piece, number, tokens in zip(reply.pieces, numbers, likeliest, strict=True):
        top_entries = [token_entry(text, value) for text, value in tokens]
        content.append(token_entry(piece, number) | {"top_logprobs": top_entries})
    return {"content": content}


def token_entry(text: str, log_prob: float) -> dict[str, Any]:
    """A token in OpenAI's form of log-probabilities."""
    return {"token": text, "logprob": log_prob, "bytes": None}


def likeliest_tokens(reply: Reply) -> list[list[tuple[str, float]]]:
    """(text, log-probability) of the likeliest tokens at each position; empty lists if they were
    not asked for."""
    if not reply.top_pieces or reply.drawn.notes is None:
        return [[] for _ in reply.pieces]
    result = []
    for texts, entries in zip(reply.top_pieces, reply.drawn.notes.likeliest, strict=True):
        numbers = [value for _, value in entries]
        result.append(list(zip(texts, numbers, strict=True)))
    return result
