"""The supported fields of OpenAI's requests, and answers in OpenAI's form.

Fields that contradict what is recorded are refused. Unknown fields are ignored with one warning
each. Sampling settings (temperature, top_p, top_k, seed) of requests are ignored too: those of the
run apply, so that the recorded policy is the trained one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdflow.rollout.generator import Finished

logger = logging.getLogger(__name__)

_SUPPORTED = {
    "messages",
    "prompt",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "return_token_ids",
    "model",
    "n",
    "best_of",
    "echo",
    "suffix",
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
}


_MOST_WARNINGS = 50
_NAME_LETTERS = 100
"""Letters of an ignored field's name that are logged."""
_REFUSAL_LETTERS = 1000
"""Letters of a refusal's text, which may quote the request. The middle of a longer one is cut
out."""


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, text: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(_shorten(text, _REFUSAL_LETTERS))
        self.status = status
        self.code = code


def _shorten(text: str, max_letters: int) -> str:
    """Returns the text, or its beginning and end if it has more than `max_letters` letters.

    The two parts have max_letters // 2 letters each and are joined by " ... ".
    """
    if len(text) <= max_letters:
        return text
    half = max_letters // 2
    return f"{text[:half]} ... {text[-half:]}"


@dataclass(frozen=True)
class Ask:
    """A request for a chat or a completion."""

    messages: list[dict[str, Any]]
    """Messages of a chat. Empty: a completion."""
    prompt: str | list[int]
    tools: list[Any] | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    with_usage: bool
    """Whether a stream ends with the token counts."""
    log_probs: bool
    token_ids: bool
    name: str = ""
    """Of the request's URL: a player or a subagent. Empty: none."""


def parse_request(body: object, *, chat: bool, warned_fields: set[str]) -> Ask:
    """Returns the Ask for the JSON body of a request; Refusal if it cannot be met as it stands.

    chat: it must have messages, otherwise a prompt (a text or token ids). max_tokens and
    max_completion_tokens must be equal, if both are given, and positive. stop: one text or several,
    not empty. tool_choice "none" drops the tools. Unknown fields are ignored, with one warning
    each. warned_fields: names of fields that were logged; names are added.
    """
    if not isinstance(body, dict):
        raise Refusal(f"got a body that is {type(body).__name__}, expected a JSON object")
    unknown = sorted(set(body) - _SUPPORTED - warned_fields)
    for name in unknown[: max(0, _MOST_WARNINGS - len(warned_fields))]:
        warned_fields.add(name)
        shown = _shorten(name, _NAME_LETTERS)
        logger.warning("episodes: requests have the field %r, which is ignored", shown)
    if body.get("tool_choice") == "required" and "tool_choice" not in warned_fields:
        warned_fields.add("tool_choice")
        logger.warning("episodes: tool_choice=required is treated as auto: no reply is forced")
    _refuse_contradictions(body)
    limits = [body.get("max_tokens"), body.get("max_completion_tokens")]
    token_limits = set()
    for limit in limits:
        if limit is not None:
            token_limits.add(limit)
    if len(token_limits) > 1 or not all(type(limit) is int and limit > 0 for limit in token_limits):
        raise Refusal(
            f"max_tokens: got {sorted(map(str, token_limits))}, expected one number above 0"
        )
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise Refusal(f"stop: got {list(stop)!r}, expected texts that are not empty")
    messages = body.get("messages") or []
    prompt = body.get("prompt", "")
    if chat and not _are_messages(messages):
        raise Refusal("messages: got no list of objects with a role; expected at least one")
    if not chat and not _is_prompt(prompt):
        raise Refusal("prompt: got neither a text nor a list of token ids; expected one prompt")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    return Ask(
        list(messages) if chat else [],
        "" if chat else prompt,
        tools or None,
        next(iter(token_limits), None),
        stop,
        stream=bool(body.get("stream")),
        with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        log_probs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
    )


def _refuse_contradictions(body: Mapping[str, Any]) -> None:
    """Refusal if a field asks for something that is not recorded.

    Allowed, apart from None: n and best_of 1, echo false, suffix "", response_format {"type":
    "text"}, and tool_choice required, auto or none.
    """
    allowed: dict[str, tuple[Any, ...]] = {
        "n": (None, 1),
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None, ""),
        "tool_choice": (None, "required", "auto", "none"),
        "response_format": (None, {"type": "text"}),
    }
    for name, values in allowed.items():
        if body.get(name) not in values:
            raise Refusal(f"{name}: got {body[name]!r}, expected {values[-1]!r} or nothing")


def _are_messages(messages: object) -> bool:
    return (
        bool(messages)
        and isinstance(messages, list)
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str)
            for message in messages
        )
    )


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)
    return isinstance(prompt, str) and bool(prompt)


@dataclass(frozen=True)
class Reply:
    """A recorded reply, from which the answer is built."""

    message: dict[str, Any]
    reason: str
    """stop, length or tool_calls."""
    prompt_ids: list[int]
    drawn: Finished
    pieces: list[str]
    """Text of each token, if log-probabilities are requested."""


def write_answer(ask: Ask, reply: Reply, *, number: str, model: str) -> tuple[bytes, str]:
    """Returns (body, content type) of an answer in OpenAI's form for chats or completions.

    JSON or, if ask.stream, server-sent events: one with the complete reply, one with the reason why
    it ended, one with the token counts if ask.with_usage, then [DONE]. Log-probabilities and token
    ids are included if requested. number: id of the answer.
    """
    chat = bool(ask.messages)
    kind = "chat.completion" if chat else "text_completion"
    head = {"id": number, "object": kind, "created": int(time.time()), "model": model}
    usage = {
        "prompt_tokens": len(reply.prompt_ids),
        "completion_tokens": len(reply.drawn.tokens),
        "total_tokens": len(reply.prompt_ids) + len(reply.drawn.tokens),
    }
    choice: dict[str, Any] = {"index": 0, "finish_reason": reply.reason}
    choice["logprobs"] = _log_probs(ask, reply) if ask.log_probs else None
    if ask.token_ids:
        choice["token_ids"] = reply.drawn.tokens.tolist()
        head["prompt_token_ids"] = reply.prompt_ids
    if not ask.stream:
        if chat:
            choice["message"] = reply.message
        else:
            choice["text"] = reply.message["content"] or ""
        body = head | {"choices": [choice], "usage": usage}
        return json.dumps(body).encode(), "application/json"
    indexed_calls = []
    for i, call in enumerate(reply.message.get("tool_calls") or ()):
        indexed_calls.append(call | {"index": i})
    delta = reply.message | ({"tool_calls": indexed_calls} if indexed_calls else {})
    content = {"delta": delta} if chat else {"text": reply.message["content"] or ""}
    empty: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    head["object"] = "chat.completion.chunk" if chat else kind
    events = [head | {"choices": [choice | content | {"finish_reason": None}]}]
    end = {"index": 0, "finish_reason": reply.reason, "logprobs": None}
    events.append(head | {"choices": [end | empty]})
    if ask.with_usage:
        events.append(head | {"choices": [], "usage": usage})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
    return "".join(lines).encode(), "text/event-stream"


def _log_probs(ask: Ask, reply: Reply) -> dict[str, Any]:
    """Returns the log-probability and text of each token of a reply.

    For a completion {"tokens", "token_logprobs"}, for a chat {"content": [one dict per token]}.
    """
    numbers = reply.drawn.log_probs.tolist()
    if not ask.messages:
        return {"tokens": reply.pieces, "token_logprobs": numbers}
    return {
        "content": [
            {"token": piece, "logprob": number, "bytes": None, "top_logprobs": []}
            for piece, number in zip(reply.pieces, numbers, strict=True)
        ]
    }


def write_error(refusal: Refusal) -> bytes:
    """The JSON body of a refusal, in OpenAI's form."""
    fields = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code}
    return json.dumps({"error": fields | {"param": None}}).encode()
