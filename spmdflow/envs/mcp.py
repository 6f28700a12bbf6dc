"""Tools of MCP servers (pip install mcp): the policy calls them, and a function scores the result.

    environment: spmdflow.envs.mcp:episode(server='python my_server.py', score='my_score.py:score')

    def score(row, messages) -> float: ...    # as a reward function returns; may be async

`server` is the command of a server that is started for each episode (standard input and output),
or the URL of one that runs (streamable HTTP). The row's prompt is the first message, or its
"messages" are. A tool's error is sent to the policy as the tool's answer. The episode ends with a
reply that calls no tool.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from spmdflow.envs.client import ChatClient, EndpointError
from spmdflow.rewards.child import find_function


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    server: str,
    score: str,
    max_calls: int = 16,
    max_tokens: int | None = None,
) -> Any:
    """Run a conversation until a reply calls no tool, or for max_calls replies; return its score.

    A full context or too many turns also end the conversation; any other EndpointError is raised.
    server: a command, or a URL that begins with http. score: "path/file.py:name" or "module:name"
    of a function of the row and all messages, whose result is returned. row: "messages" are the
    first messages instead of its prompt.
    """
    judge = find_function(score, "score")
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    messages = list(row.get("messages") or [{"role": "user", "content": str(row["prompt"])}])
    async with (
        open_session(server) as session,
        ChatClient(base_url, model=model, api_key=api_key) as client,
    ):
        tools = [schema_of(tool) for tool in (await session.list_tools()).tools]
        for _ in range(max_calls):
            try:
                reply = await client.chat(messages, tools=tools, **limit)
            except EndpointError as err:
                if err.code in ("context_length_exceeded", "max_turns"):
                    break
                raise
            messages.append(reply)
            if not reply.get("tool_calls"):
                break
            for call in reply["tool_calls"]:
                content = await call_tool(session, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    result = judge(row, messages)
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def open_session(server: str) -> AsyncIterator[Any]:
    """A session with an MCP server: a command that is started, or a URL."""
    if server.startswith(("http://", "https://")):
        opened = import_module("mcp.client.streamable_http").streamable_http_client(server)
    else:
        command, *arguments = shlex.split(server)
        parameters = import_module("mcp").StdioServerParameters(command=command, args=arguments)
        opened = import_module("mcp.client.stdio").stdio_client(parameters)
    async with opened as streams:
        async with import_module("mcp").ClientSession(*streams[:2]) as session:
            await session.initialize()
            yield session


def schema_of(tool: Any) -> dict[str, Any]:
    """The OpenAI tool schema of an MCP tool."""
    schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


async def call_tool(session: Any, function: dict[str, Any]) -> str:
    """Call a tool, and return its result as text. function: {"name": ..., "arguments": JSON text}.

    Any error, also of arguments that are no JSON, is returned as "error: ...".
    """
    try:
        arguments = json.loads(function["arguments"] or "{}")
        result = await session.call_tool(function["name"], arguments)
    except Exception as err:
        return f"error: {type(err).__name__}: {err}"
    texts = [part.text for part in result.content if getattr(part, "type", "") == "text"]
    text = "\n".join(texts)
    is_error = getattr(result, "is_error", None) or getattr(result, "isError", None)
    return f"error: {text}" if is_error else text
