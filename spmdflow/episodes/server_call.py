"""Replies of models behind OpenAI-compatible servers outside of the run, such as a judge.

The request is sent as chat completions (a text prompt: as completions), whatever dialect it came
in. A server that is not reached, is busy or fails is asked again, up to a limit of attempts and of
time. Then the client gets an error; the episode decides what that means. Keys are sent to their
server only: no message or log has them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from spmdflow.config.episode_models import ServerModel
from spmdflow.episodes.ask import Ask, Message, Refusal, Reply
from spmdflow.episodes.named_model import OwnSampling

_MOST_BYTES = 8 << 20
"""Of an answer."""
_FIRST_PAUSE_SECONDS = 0.25
_MOST_PAUSE_SECONDS = 8.0
_TEXT_LETTERS = 300
"""Of what a server answered, in an error."""
_AGAIN = {408, 409, 425, 429}
"""Statuses below 500 after which the same request may succeed."""
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
_REASONS = ("stop", "length", "tool_calls")


class _Failure(Exception):
    """One attempt had no reply."""

    def __init__(self, got: str, *, may_retry: bool, do: str, status: int = 502) -> None:
        super().__init__(got)
        self.may_retry = may_retry
        self.do = do
        self.status = status
        self.pause = 0.0
        """Seconds that the server asks to wait."""


class ServerCalls:
    """Sends requests to servers. Used only in the endpoint's thread."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        """keys: model -> key of its server, for those that need one."""
        self._keys = dict(keys or {})
        self._client: httpx.AsyncClient | None = None
        self._slots: dict[str, asyncio.Semaphore] = {}

    async def reply(
        self,
        model: ServerModel,
        ask: Ask,
        sampling: OwnSampling,
        *,
        name: str,
        max_new_tokens: int,
    ) -> Reply:
        """Return the server's reply to a request. name: of the reply, see `Reply`.

        max_new_tokens: the largest number of tokens. Refusal (502, may be retried) if there is none
        after all attempts or within the model's time; (400) if the server rejects the request, or
        if it asks for tokens or log-probabilities, which are none of this run's model.
        """
        _refuse_tokens(model, ask)
        route = "chat/completions" if ask.messages else "completions"
        body = _body_of(model, ask, sampling, max_new_tokens)
        slots = self._slots.setdefault(model.name, asyncio.Semaphore(model.concurrency))
        try:
            async with asyncio.timeout(model.seconds), slots:
                answer = await self._post(model, route, body)
        except TimeoutError as err:
            got = f"no reply of {model.url} within {model.seconds:g} s"
            do = "raise seconds or concurrency of this model, or see what its server does"
            raise _refusal(model, _Failure(got, may_retry=True, do=do)) from err
        except _Failure as err:
            raise _refusal(model, err) from err
        return _read_reply(model, ask, answer, name)

    async def close(self) -> None:
        """Closes all connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _post(self, model: ServerModel, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object of an answer with status 200; _Failure after the last attempt."""
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(model.attempts):
            try:
                return await self._try(model, route, body)
            except _Failure as err:
                if not err.may_retry or attempt + 1 == model.attempts:
                    raise
                await asyncio.sleep(max(pause, err.pause))
                pause = min(2 * pause, _MOST_PAUSE_SECONDS)
        raise AssertionError("attempts is at least 1")

    async def _try(self, model: ServerModel, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(limits=limits, timeout=None, follow_redirects=False)
        key = self._keys.get(model.name)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        url = f"{model.url.rstrip('/')}/{route}"
        data = bytearray()
        try:
            async with self._client.stream("POST", url, json=body, headers=headers) as answer:
                async for part in answer.aiter_bytes():
                    data += part
                    if len(data) > _MOST_BYTES:
                        got = f"an answer of more than {_MOST_BYTES} bytes from {url}"
                        raise _Failure(got, may_retry=False, do="lower max_new_tokens")
        except (httpx.HTTPError, OSError) as err:
            text = self._without_key(model, f"{type(err).__name__}: {err}".rstrip(": "))
            got = f"no answer of {url} ({text})"
            do = "start the server, or correct the url of this model"
            raise _Failure(got, may_retry=True, do=do) from err
        text = self._without_key(model, data[: 4 * _TEXT_LETTERS].decode(errors="replace"))
        if answer.status_code != 200:
            raise _failure_of_status(model, url, answer, text)
        try:
            fields = json.loads(data)
        except ValueError as err:
            raise _malformed(url, text) from err
        if not isinstance(fields, dict):
            raise _malformed(url, text)
        return fields

    def _without_key(self, model: ServerModel, text: str) -> str:
        """A text from outside, without the key, which some servers repeat."""
        key = self._keys.get(model.name)
        return text if key is None else text.replace(key, "***")


def _refuse_tokens(model: ServerModel, ask: Ask) -> None:
    fields = []
    if ask.log_probs or ask.top_log_probs:
        fields.append("logprobs")
    if ask.token_ids:
        fields.append("return_token_ids")
    if isinstance(ask.prompt, list):
        fields.append("a prompt of token ids")
    if fields:
        raise Refusal(
            f"model {model.name}: got {' and '.join(fields)}, expected a request for text: the "
            f"model runs on a server outside of the run; omit it, or name another model"
        )


def _body_of(
    model: ServerModel, ask: Ask, sampling: OwnSampling, max_new_tokens: int
) -> dict[str, Any]:
    """The request as chat completions or completions."""
    body: dict[str, Any] = {"model": model.model or model.name}
    if ask.messages:
        body["messages"] = [_outgoing(message) for message in ask.messages]
    else:
        body["prompt"] = ask.prompt
    body[model.limit_field] = max_new_tokens
    for field in ("temperature", "top_p", "top_k", "seed"):
        value = getattr(sampling, field)
        if value is None:
            value = getattr(model, field, None)
        if value is not None:
            body[field] = value
    if ask.template_arguments is not None:
        body["chat_template_kwargs"] = dict(ask.template_arguments)
    if ask.reasoning_effort is not None:
        body["reasoning_effort"] = ask.reasoning_effort
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.tools:
        body["tools"] = ask.tools
        if ask.one_call:
            body["parallel_tool_calls"] = False
    if ask.choice is not None:
        function = {"type": "function", "function": {"name": ask.choice.name}}
        body["tool_choice"] = function if ask.choice.name else "required"
    if ask.grammar is not None:
        form = {"name": "reply", "schema": json.loads(ask.grammar.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body | dict(model.fields)


def _outgoing(message: Message) -> Message:
    return {name: message[name] for name in _MESSAGE_FIELDS if name in message}


def _failure_of_status(model: ServerModel, url: str, answer: httpx.Response, text: str) -> _Failure:
    """What a status other than 200 means. text: the beginning of the answer."""
    status = answer.status_code
    got = f"status {status} from {url} ({' '.join(text.split())[:_TEXT_LETTERS]})"
    if status in (401, 403):
        if model.key_variable is None:
            do = "name the environment variable with the server's key in key_variable"
        else:
            do = f"correct the key in the environment variable {model.key_variable}"
        return _Failure(got, may_retry=False, do=do)
    if status >= 500 or status in _AGAIN:
        failure = _Failure(got, may_retry=True, do="see the server's log, or lower concurrency")
        wait = answer.headers.get("retry-after", "")
        if wait.isascii() and wait.isdecimal():
            failure.pause = min(float(wait), _MOST_PAUSE_SECONDS)
        return failure
    do = "change the request, or the model, fields and limit_field of this entry"
    return _Failure(got, may_retry=False, do=do, status=400)


def _malformed(url: str, text: str) -> _Failure:
    got = f"another answer than chat completions from {url} ({text[:_TEXT_LETTERS]})"
    return _Failure(got, may_retry=False, do="correct the url of this model; it ends in /v1")


def _refusal(model: ServerModel, failure: _Failure) -> Refusal:
    text = f"model {model.name}: got {failure}, expected a reply; {failure.do}"
    return Refusal(text, status=failure.status, code="model_failed", may_retry=failure.may_retry)


def _read_reply(model: ServerModel, ask: Ask, answer: Mapping[str, Any], name: str) -> Reply:
    """The reply in an answer. Refusal (502) if it has none."""
    try:
        choice = answer["choices"][0]
        fields = choice["message"] if ask.messages else {"content": choice["text"]}
        message: Message = {"role": "assistant", "content": fields.get("content")}
        thought = fields.get("reasoning_content") or fields.get("reasoning")
        if isinstance(thought, str) and thought:
            message["reasoning_content"] = thought
        if fields.get("tool_calls"):
            message["tool_calls"] = [_incoming(call) for call in fields["tool_calls"]]
        elif message["content"] is None:
            message["content"] = ""
        reason = choice.get("finish_reason")
        usage = answer.get("usage") or {}
        counts = (_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))
    except (LookupError, TypeError, AttributeError) as err:
        shown = json.dumps(answer)
        raise _refusal(model, _malformed(model.url, shown)) from err
    return Reply.of_text(name, message, reason if reason in _REASONS else "stop", counts)


def _incoming(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in OpenAI's form, with nothing else in it."""
    function = {
        "name": str(call["function"]["name"]),
        "arguments": str(call["function"].get("arguments") or "{}"),
    }
    return {"id": str(call["id"]), "type": "function", "function": function}


def _count(usage: Mapping[str, Any], name: str) -> int:
    count = usage.get(name)
    return count if isinstance(count, int) and count >= 0 else 0
