"""A class as an environment: its public methods are the tools that the policy may call.

    environment: spmdflow.envs.tools:episode(tools='my_tools.py:Calculator')

    class Calculator:
        def reset(self, question: str, answer: int, **row) -> str | None: ...   # the first message
        def add(self, a: int, b: int) -> int:
            "The sum of two numbers."
        def get_reward(self) -> float: ...

`reset` gets the row's fields. If it returns no text, the row's prompt is the first message. A tool
may be async. An exception of a tool is sent to the policy as the tool's answer. The episode ends
with a reply that calls no tool. If the class has `answer(text)`, it is called with that reply.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from spmdflow.envs.client import ChatClient, EndpointError
from spmdflow.rewards.child import find_function

_KINDS = {int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_NOT_TOOLS = ("reset", "get_reward", "answer")


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    tools: str,
    max_calls: int = 16,
) -> float:
    """Run a conversation until a reply calls no tool, or for max_calls replies.

    Returns the class's get_reward(), as a float. A full context or too many turns also end the
    conversation; any other EndpointError is raised. The reply that calls no tool goes to the
    class's answer(text), if it has one.
    tools: "path/file.py:Class" or "module:Class". row: goes to the class's reset.
    """
    toolbox = find_function(tools, "tools")()
    opening = toolbox.reset(**row)
    first_message = str(row.get("prompt", "") if opening is None else opening)
    messages: list[dict[str, Any]] = [{"role": "user", "content": first_message}]
    schemas = schemas_of(type(toolbox))
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for _ in range(max_calls):
            try:
                reply = await client.chat(messages, tools=schemas)
            except EndpointError as err:
                if err.code in ("context_length_exceeded", "max_turns"):
                    break
                raise
            messages.append(reply)
            if not reply.get("tool_calls"):
                if hasattr(toolbox, "answer"):
                    toolbox.answer(reply["content"])
                break
            for call in reply["tool_calls"]:
                result = await _call_tool(toolbox, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return float(toolbox.get_reward())


async def _call_tool(toolbox: Any, function: dict[str, Any]) -> str:
    """Call a tool of the toolbox, which may be async, and return its result as text.

    function: {"name": ..., "arguments": JSON text}. Any exception, also of wrong arguments, is
    returned as "error: ...". So is a name that is not a public method, or is reset, get_reward or
    answer.
    """
    name = function["name"]
    if name.startswith("_") or name in _NOT_TOOLS or not callable(getattr(toolbox, name, None)):
        return f"error: no tool {name!r}"
    try:
        result = getattr(toolbox, name)(**json.loads(function["arguments"]))
        return str(await result if inspect.isawaitable(result) else result)
    except Exception as err:
        return f"error: {type(err).__name__}: {err}"


def schemas_of(cls: type) -> list[dict[str, Any]]:
    """Return OpenAI tool schemas of a class's public methods, from their signatures and docstrings.

    reset, get_reward and answer are omitted. A parameter's type is that of its annotation (int,
    float, bool, list, dict), otherwise string. It is required if it has no default.
    """
    schemas = []
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or name in _NOT_TOOLS:
            continue
        parameters = list(inspect.signature(method, eval_str=True).parameters.values())[1:]
        schema = {
            "type": "object",
            "properties": {
                p.name: {"type": _KINDS.get(p.annotation, "string")} for p in parameters
            },
            "required": [p.name for p in parameters if p.default is p.empty],
        }
        description = inspect.getdoc(method) or ""
        function = {"name": name, "description": description, "parameters": schema}
        schemas.append({"type": "function", "function": function})
    return schemas
