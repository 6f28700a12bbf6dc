"""Environments of OpenEnv (pip install openenv-core), which run behind a URL.

    environment: spmdflow.envs.openenv:episode(url='http://10.0.0.5:8000', action='message')

OpenEnv's servers run anywhere: on this machine, in a container, on another machine. Each episode
has a session of its own (a WebSocket), because the server's plain HTTP routes make a new
environment for every request. `reset` gets the row's "seed", if it has one. The text of an
observation is the user's message, and a reply is the action: {action: reply}, or the JSON object
in the reply if `action` is "json". The score is the sum of the rewards.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from spmdflow.envs.client import ChatClient, EndpointError


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    url: str,
    action: str = "message",
    text: str = "",
    max_turns: int = 32,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Run one episode; return the sum of its rewards as score, and the number of turns.

    It ends when the environment says so, after max_turns replies, or when the context is full; any
    other EndpointError is raised, as are errors of the environment.
    url: of the server; a row's "url" overrides it. action: the field of an action that the reply
    goes to, or "json". text: the field of an observation that is shown; without it, the only field
    with a text, otherwise the observation as JSON. row: "seed" goes to reset.
    """
    client_class = import_module("openenv.core.generic_client").GenericEnvClient
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    seed = {"seed": int(row["seed"])} if "seed" in row else {}
    rewards = []
    turns = 0
    messages: list[dict[str, Any]] = []
    async with (
        client_class(base_url=str(row.get("url", url))) as env,
        ChatClient(base_url, model=model, api_key=api_key) as client,
    ):
        result = await env.reset(**seed)
        while not result.done and turns < max_turns:
            messages.append({"role": "user", "content": text_of(result.observation, text)})
            try:
                reply = await client.chat(messages, **limit)
            except EndpointError as err:
                if err.code in ("context_length_exceeded", "max_turns"):
                    break
                raise
            messages.append(reply)
            turns += 1
            result = await env.step(action_of(str(reply["content"]), action))
            rewards.append(float(result.reward or 0.0))
    return {"score": sum(rewards), "turns": float(turns)}


def text_of(observation: dict[str, Any], field: str) -> str:
    """The text of an observation: of this field, of its only text, or all of it as JSON.

    KeyError if it does not have the field.
    """
    if field:
        return str(observation[field])
    texts = [value for value in observation.values() if isinstance(value, str)]
    if len(texts) == 1:
        return texts[0]
    return json.dumps(observation)


def action_of(reply: str, action: str) -> dict[str, Any]:
    """The action for a reply: {action: reply}, or with "json" the first JSON object in it.

    {"message": reply} if there is no such object, so that the environment can answer to it.
    """
    if action != "json":
        return {action: reply}
    decoder = json.JSONDecoder()
    for start, letter in enumerate(reply):
        if letter != "{":
            continue
        try:
            value, _ = decoder.raw_decode(reply, start)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {"message": reply}
