"""An environment whose episodes call the policy and other models by name; imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from spmdflow.envs.client import ChatClient, EndpointError

ASKED = ("reference", "policy@0", "policy@1", "policy@9")


async def duel(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, calls: bool, log: str
) -> float:
    """Two turns of the policy; between them, if `calls`, every other model is asked the same.

    Each reply of another model becomes a line of a file in the folder `log`.
    """
    messages = [{"role": "user", "content": "guess"}]
    score = 0.0
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for told in ("higher", "lower digit 7"):
            reply = await client.chat(messages, max_tokens=2)
            score += str(reply["content"]).count(str(row["digit"] % 10))
            messages += [reply, {"role": "user", "content": told}]
            for name in ASKED if calls else ():
                await _ask(client, name, messages, log, row)
        if calls:
            await _ask_judges(client, messages, log)
    return score


async def _ask_judges(client: ChatClient, messages: list[dict[str, Any]], log: str) -> None:
    """Asks the judge that answers, and the one that is down, and writes down what they say."""
    for name in ("judge", "down"):
        try:
            answer = await client.post("chat/completions", {"model": name, "messages": messages})
            said = {"text": answer["choices"][0]["message"]["content"], "model": answer["model"]}
        except EndpointError as err:
            said = {"error": str(err), "code": err.code}
        with open(Path(log) / f"judge-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps({"asked": name, **said}) + "\n")


async def _ask(
    client: ChatClient, name: str, messages: list[dict[str, Any]], log: str, row: dict[str, Any]
) -> None:
    """Asks a model with temperature 0, then with 1, and writes down what it replies."""
    for temperature in (0, 1):
        fields = {"temperature": temperature, "max_tokens": 3, "return_token_ids": True}
        body = {"model": name, "messages": messages, "logprobs": True, **fields}
        said: dict[str, Any]
        try:
            answer = await client.post("chat/completions", body)
            choice = answer["choices"][0]
            said = {
                "model": answer["model"],
                "prompt": answer["prompt_token_ids"],
                "tokens": choice["token_ids"],
                "log_probs": [each["logprob"] for each in choice["logprobs"]["content"]],
            }
        except EndpointError as err:
            said = {"error": str(err), "code": err.code}
        line = {"asked": name, "temperature": temperature, "digit": row["digit"], **said}
        with open(Path(log) / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
