"""`ServerClient`: the HTTP side of one generation server, and the checks of what it answers.

Nothing that a server answers is trusted: sizes are limited, every value is checked, redirects and
proxies are not followed, and only numbers and short texts get further. A wrong answer is a
`ServerFault`, after which the fleet gives the row to another server. Asynchronous, because a rank
has many rows under way.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from spmdflow.config.server import check_address
from spmdflow.rollout.generator import Request
from spmdflow.serving.row_noise import ROW, row_facts
from spmdflow.serving.settings import GENERATE, VERSION_HEADER

_MOST_LINE_BYTES = 4 << 20
_MOST_REPLY_BYTES = 64 << 20
_SHOWN = 200
_WORD = re.compile(r"[\w.:+-]{0,100}")
_LOG_PROB_SLACK = 2e-6
"""How far above 0 a log-probability may be because of rounding."""


class ServerFault(Exception):
    """A server that does not answer, or answers something wrong. Its text is the reason."""


class WrongAnswer(ServerFault):
    """An answer that no correct server gives."""


class WrongVersion(ServerFault):
    """A server that has other weights than the request asks for."""


@dataclass(frozen=True)
class ServerFacts:
    """Who a server is, and its state."""

    instance: str
    """Random id of the server's process."""
    model: str
    """Hash of the model; serving.identity."""
    tokenizer: str
    dtype: str
    row_noise: bool
    num_workers: int
    max_model_len: int
    max_num_seqs: int
    prefix_caching: bool
    epoch: str
    """Id of the run that gave it its weights."""
    weights_version: int
    running: int
    """Requests under way, of all clients."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> ServerFacts:
        """Read an answer to /spmdflow/facts. WrongAnswer if a value is missing or has no sense."""
        values: dict[str, Any] = {}
        for name, kind in cls.__annotations__.items():
            value = answer.get(name)
            expected = {"str": str, "bool": bool, "int": int}[kind]
            if type(value) is not expected:
                raise WrongAnswer(f"{name} is {show_value(value)}, not of type {kind}")
            if isinstance(value, str) and _WORD.fullmatch(value) is None:
                raise WrongAnswer(f"{name} is {show_value(value)}, not a short word")
            if isinstance(value, int) and not -1 <= value < 2**40:
                raise WrongAnswer(f"{name} is {show_value(value)}, out of range")
            values[name] = value
        return cls(**values)


@dataclass(frozen=True)
class ResponsePart:
    """A part of a response as it is streamed."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """nan: the model's logits are not finite."""
    finish: str | None
    """stop, length or abort; None: it goes on."""


class ServerClient:
    """One server, from the thread with the event loop."""

    def __init__(self, url: str, *, key: str, vocab_size: int) -> None:
        """url: http://host:port; ConfigError otherwise. key: "" for a server without one."""
        check_address("actor.rollout.server.addresses", url)
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._vocab_size = vocab_size
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(10.0, pool=None),
            trust_env=False,  # no proxies
            follow_redirects=False,
        )

    async def facts(self, *, seconds: float) -> ServerFacts:
        """Ask who the server is. ServerFault if it does not answer within the limit."""
        return ServerFacts.of(await self.call("GET", "spmdflow/facts", None, seconds=seconds))

    async def call(
        self, method: str, route: str, body: Mapping[str, Any] | None, *, seconds: float
    ) -> dict[str, Any]:
        """Make a request and return the JSON object that it is answered with.

        ServerFault if there is no answer within the limit, or another one.
        """
        return parse_object(await self.fetch(method, route, body, seconds=seconds))

    async def fetch(
        self, method: str, route: str, body: Mapping[str, Any] | None, *, seconds: float
    ) -> bytes:
        """Make a request and return the body of its answer. ServerFault as in `call`."""
        try:
            return await asyncio.wait_for(self._fetch(method, route, body, seconds), seconds)
        except (httpx.HTTPError, OSError) as err:
            raise ServerFault(f"/{route}: {type(err).__name__} {err}".strip()) from err
        except TimeoutError as err:
            raise ServerFault(f"/{route}: no answer within {seconds:g} s") from err

    async def _fetch(
        self, method: str, route: str, body: Mapping[str, Any] | None, seconds: float
    ) -> bytes:
        timeout = httpx.Timeout(seconds)
        async with self._http.stream(method, f"/{route}", json=body, timeout=timeout) as answer:
            data = await _read_body(answer, _MOST_REPLY_BYTES)
        if answer.status_code == 409:
            raise WrongVersion(f"/{route}: {show_value(data)}")
        if answer.status_code != 200:
            raise ServerFault(f"/{route}: status {answer.status_code}, {show_value(data)}")
        return data

    async def generate(
        self, request: Request, *, ends: Sequence[int], version: str, stall_seconds: float
    ) -> AsyncIterator[ResponsePart]:
        """Stream the response to a request, drawn with the row's own noise.

        ends: token ids that end a response. version: of the weights, as the door writes it.
        ServerFault if no part arrives for stall_seconds, if the stream ends too early, or for a
        part that is wrong.
        """
        body = {
            "token_ids": request.prompt.tolist(),
            "stream": True,
            "sampling_params": {
                **self._choice(request),
                "max_tokens": request.sampling.max_new_tokens,
                "logprobs": 0,
                "detokenize": False,
                "ignore_eos": True,
                "stop_token_ids": list(ends),
            },
        }
        headers = {VERSION_HEADER: version}
        left = request.sampling.max_new_tokens
        stream = self.lines(GENERATE.removeprefix("/"), body, headers, stall_seconds=stall_seconds)
        async with aclosing(stream) as lines:
            async for line in lines:
                part = parse_part(line, vocab_size=self._vocab_size, left=left)
                if part is None:
                    continue
                left -= len(part.tokens)
                yield part
                if part.finish is not None:
                    return
        raise ServerFault("the stream ended before the response")

    async def lines(
        self,
        route: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        stall_seconds: float,
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a stream. ServerFault if none begins, or it stalls or breaks."""
        timeout = httpx.Timeout(stall_seconds, pool=None)
        try:
            async with self._http.stream(
                "POST", f"/{route}", json=body, headers=headers, timeout=timeout
            ) as answer:
                await _check_status(answer)
                async for line in _lines_of(answer):
                    yield line
        except (httpx.HTTPError, OSError) as err:
            raise ServerFault(f"{type(err).__name__} {err}".strip()) from err

    def _choice(self, request: Request) -> dict[str, Any]:
        """What decides the tokens: the row's facts. vLLM does nothing to the logits."""
        return {"temperature": 0.0, "extra_args": {ROW: row_facts(request)}}

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()


async def _check_status(answer: httpx.Response) -> None:
    """ServerFault unless a stream begins."""
    if answer.status_code == 200:
        return
    data = await _read_body(answer, _MOST_LINE_BYTES)
    if answer.status_code == 409:
        raise WrongVersion(show_value(data))
    raise ServerFault(f"status {answer.status_code}, {show_value(data)}")


async def _read_body(answer: httpx.Response, most: int) -> bytes:
    """Read a whole body. WrongAnswer if it is longer than `most` bytes."""
    data = bytearray()
    async for chunk in answer.aiter_bytes():
        data += chunk
        if len(data) > most:
            raise WrongAnswer(f"more than {most} bytes")
    return bytes(data)


async def _lines_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. WrongAnswer if one is longer than 4 MiB."""
    unread = b""
    async for chunk in answer.aiter_bytes():
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(unread) > _MOST_LINE_BYTES:
            raise WrongAnswer(f"a line of more than {_MOST_LINE_BYTES} bytes")


def parse_part(line: bytes, *, vocab_size: int, left: int) -> ResponsePart | None:
    """Read one line of a stream of server-sent events; None for a line without a part.

    left: tokens that the response may still get. WrongAnswer for anything that no correct server
    sends: no JSON, tokens outside of the vocabulary, other numbers of log-probabilities than of
    tokens, a response that is too long, an unknown reason to finish.
    """
    answer = parse_event(line)
    if answer is None:
        return None
    choices = answer.get("choices")
    if choices == []:
        return None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise WrongAnswer(f"choices {show_value(choices)} in {show_value(line)}")
    choice = choices[0]
    tokens = parse_tokens(choice.get("token_ids") or [], vocab_size=vocab_size, left=left)
    finish = choice.get("finish_reason")
    if finish not in (None, "stop", "length", "abort"):
        raise WrongAnswer(f"finish_reason {show_value(finish)}")
    log_probs = _log_probs_of(choice.get("logprobs"), tokens)
    return ResponsePart(tuple(tokens), log_probs, finish)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of one line of server-sent events; None for a line without one."""
    line = line.strip()
    if not line or line.startswith(b":"):
        return None
    if not line.startswith(b"data:"):
        raise WrongAnswer(f"a line {show_value(line)}")
    data = line.removeprefix(b"data:").strip()
    return None if data == b"[DONE]" else parse_object(data)


def parse_tokens(value: object, *, vocab_size: int, left: int) -> list[int]:
    """The token ids in an answer, at most `left` of them. WrongAnswer for anything else."""
    if not isinstance(value, list) or len(value) > left:
        raise WrongAnswer(f"tokens {show_value(value)}, at most {left} are left")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise WrongAnswer(f"token {show_value(token)} of a vocabulary of {vocab_size}")
    return value


def parse_log_prob(value: object) -> float:
    """A log-probability in an answer; null is nan in JSON. WrongAnswer for anything else."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or value > _LOG_PROB_SLACK:
        raise WrongAnswer(f"log-probability {show_value(value)}")
    return float(value)


def _log_probs_of(table: object, tokens: Sequence[int]) -> tuple[float, ...]:
    """The log-probability of each token, from the table of a choice; WrongAnswer otherwise."""
    if not tokens:
        return ()
    entries = table.get("content") if isinstance(table, dict) else None
    if not isinstance(entries, list) or len(entries) != len(tokens):
        raise WrongAnswer(f"log-probabilities {show_value(table)} of {len(tokens)} tokens")
    result: list[float] = []
    for entry, token in zip(entries, tokens, strict=True):
        if not isinstance(entry, dict) or entry.get("token_id", token) != token:
            raise WrongAnswer(f"log-probability {show_value(entry)} of token {token}")
        result.append(parse_log_prob(entry.get("logprob")))
    return tuple(result)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. WrongAnswer for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise WrongAnswer(f"no JSON: {show_value(data)}") from err
    if not isinstance(value, dict):
        raise WrongAnswer(f"no JSON object: {show_value(data)}")
    return value


def show_value(value: object) -> str:
    """At most 200 printable characters of a value of another program."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return "".join(each if each.isprintable() else "?" for each in text[:_SHOWN])
