"""An OpenAI-compatible server that says what a script says, for tests of bridges."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScriptedServer:
    """What a server was asked."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A reply that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "call_0", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def say(text: str) -> dict[str, Any]:
    """A reply of text."""
    return {"role": "assistant", "content": text}


def answer_to(request: dict[str, Any], number: int, message: dict[str, Any]) -> bytes:
    """The answer to a request, with its head and the fields that strict clients ask for.

    A stream has one chunk.
    """
    streams = request.get("stream", False)
    choice = {"index": 0, "finish_reason": "stop", "delta" if streams else "message": message}
    completion = {
        "id": f"reply-{number}",
        "object": "chat.completion.chunk" if streams else "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
    }
    body = json.dumps(completion).encode()
    kind = b"application/json"
    if streams:
        body = b"data: %s\n\ndata: [DONE]\n\n" % body
        kind = b"text/event-stream"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


@asynccontextmanager
async def serve_replies(replies: Sequence[dict[str, Any]]) -> AsyncIterator[ScriptedServer]:
    """A server on loopback that gives these replies, one for each request, in order."""
    server: ScriptedServer

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(server.requests) < len(replies):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            server.requests.append(json.loads(await reader.readexactly(size)))
            message = replies[len(server.requests) - 1]
            writer.write(answer_to(server.requests[-1], len(server.requests), message))
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server = ScriptedServer(f"http://127.0.0.1:{port}/v1")
    try:
        yield server
    finally:
        listening.close()
