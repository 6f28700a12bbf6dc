"""A class as an environment: its public methods are the tools that the policy may call.

    environment: spmdflow.envs.tools:episode(tools='my_tools.py:Calculator')

    class Calculator:
        def reset(self, question: str, answer: int, **row) -> str | None: ...   # the first message
        def add(self, a: int, b: int) -> int:
            "The sum of two numbers."
        def get_reward(self) -> float: ...

`reset` gets the row's fields; without a text from it, the row's prompt is the first message. A tool
may be async. What it raises is told to the policy as the tool's answer. The episode ends with a
reply that calls no tool; if the class has `answer(text)`, it is given that reply.
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
    """A conversation until the policy calls no tool, or max_calls replies have."""
    thing = find_function(tools, "tools")()
    opening = thing.reset(**row)
    told = str(row.get("prompt", "") if opening is None else opening)
    messages: list[dict[str, Any]] = [{"role": "user", "content": told}]
    schemas = schemas_of(type(thing))
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
                if hasattr(thing, "answer"):
                    thing.answer(reply["content"])
                break
            for call in reply["tool_calls"]:
                said = await _call(thing, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    return float(thing.get_reward())


async def _call(thing: Any, function: dict[str, Any]) -> str:
    """The tool's answer, or its error, as text."""
    name = function["name"]
    if name.startswith("_") or name in _NOT_TOOLS or not callable(getattr(thing, name, None)):
        return f"error: no tool {name!r}"
    try:
        said = getattr(thing, name)(**json.loads(function["arguments"]))
        return str(await said if inspect.isawaitable(said) else said)
    except Exception as err:
        return f"error: {type(err).__name__}: {err}"


def schemas_of(cls: type) -> list[dict[str, Any]]:
    """OpenAI's description of each public method, from its signature and docstring."""
    found = []
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
        said = inspect.getdoc(method) or ""
        function = {"name": name, "description": said, "parameters": schema}
        found.append({"type": "function", "function": function})
    return found
