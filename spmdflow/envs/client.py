"""A small client of an OpenAI-compatible endpoint, on asyncio's streams.

    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        message = await client.chat([{"role": "user", "content": "Guess."}], max_tokens=4)

Any other client works, too. This one has one connection and sends one request at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from functools import lru_cache
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

CERTIFICATE_VARIABLE = "SPMDFLOW_EPISODE_CERTIFICATE"
"""Environment variable with the path of the endpoint's self-signed certificate, if it has one."""


class EndpointError(Exception):
    """The endpoint refused a request. `code` is the reason, such as context_length_exceeded."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


def named_url(base_url: str, name: str) -> str:
    """Return the base URL under which the requests of a player or a subagent have this name.

    Conversations of different names are segments of their own, and an environment can return a
    score for each name (docs/EPISODES.md). Any client takes this URL in place of base_url.
    """
    return f"{base_url.rstrip('/').removesuffix('/v1')}/as/{quote(name, safe='')}/v1"


class ChatClient:
    """A client with one connection, for use in `async with`.

    At an https URL it trusts what the system trusts, and the certificate that CERTIFICATE_VARIABLE
    names, as worker processes of environments have it.
    """

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter | None = None
    """None if not connected. The endpoint closes connections that send nothing at first."""

    def __init__(self, base_url: str, *, model: str, api_key: str, name: str = "") -> None:
        """Does not connect yet. name: of a player or a subagent, see `named_url`."""
        url = urlsplit(named_url(base_url, name) if name else base_url)
        self._host = url.hostname
        self._is_secure = url.scheme == "https"
        self._port = url.port or (443 if self._is_secure else 80)
        self._path = url.path.rstrip("/")
        self._model = model
        self._key = api_key

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None
    ) -> None:
        self._disconnect()

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the assistant's reply to the messages; EndpointError if the request is refused.

        The reply is the message of the first choice, such as {"role": "assistant", "content": ...}.
        fields: further fields of the request (any JSON values).
        """
        body = {"model": self._model, "messages": messages, **fields}
        answer = await self.post("chat/completions", body)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON response to a POST of `body`; EndpointError for a status other than 200.

        Uses the open connection or opens one, and closes it if the response asks for that. One
        request at a time. The response must have a content-length.
        route: path below the base URL, such as chat/completions.
        """
        data = json.dumps(body).encode()
        head = [f"POST {self._path}/{route} HTTP/1.1", f"host: {self._host}:{self._port}"]
        head += [f"authorization: Bearer {self._key}", "content-type: application/json"]
        head += [f"content-length: {len(data)}", "", ""]
        writer = await self._connect()
        writer.write("\r\n".join(head).encode() + data)
        await writer.drain()
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        sizes = (line.partition(":")[2] for line in lines if line.startswith("content-length:"))
        answer: dict[str, Any] = json.loads(await self._reader.readexactly(int(next(sizes))))
        if "connection: close" in lines:
            self._disconnect()
        if lines[0].split(" ")[1] != "200":
            raise EndpointError(answer["error"]["message"], answer["error"]["code"])
        return answer

    async def _connect(self) -> asyncio.StreamWriter:
        """Return the connection; open a new one if there is none or the endpoint closed it."""
        if self._writer is None or self._reader.at_eof():
            self._disconnect()
            tls = None
            if self._is_secure:
                tls = _trusting_context(os.environ.get(CERTIFICATE_VARIABLE))
            opened = await asyncio.open_connection(self._host, self._port, ssl=tls)
            self._reader, self._writer = opened
        return self._writer

    def _disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@lru_cache
def _trusting_context(certificate_path: str | None) -> ssl.SSLContext:
    """What a client trusts: the system's authorities and this certificate. Made once: it is slow.

    OSError if the file cannot be read.
    """
    context = ssl.create_default_context()
    if certificate_path is not None:
        context.load_verify_locations(certificate_path)
    return context
