"""Environments for tests, by the name of the row's "does"; imports no torch."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

from spmdflow.envs.client import ChatClient, EndpointError


async def scripted(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, sleeps: int = 0
) -> float | None:
    """Three turns, what the environment says being decided by the row; sleeps: seed, 0: none.

    A row may name a file that is awaited before the last turn.
    """
    pauses = random.Random(f"{sleeps} {row['digit']} {base_url[-12:]}")
    messages = [{"role": "user", "content": "guess"}]
    score = 0.0
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for turn in range(3):
            if sleeps:
                await asyncio.sleep(pauses.random() * 0.1)
            while turn == 2 and not os.path.exists(row.get("last_turn_after", "/")):
                await asyncio.sleep(0.01)
            reply = await client.chat(messages, max_tokens=2)
            score += str(reply["content"]).count(str(row["digit"] % 10))
            messages += [reply, {"role": "user", "content": said(row["digit"], turn)}]
    return score


def said(digit: int, turn: int) -> str:
    """What the environment says after a turn."""
    return ("higher", "lower lower", "digit 7")[(digit + turn) % 3]


async def cut_off(row: dict[str, Any], **_: str) -> float:
    """Fails as one whose client is refused does."""
    raise ConnectionError("the other side has left")


async def asks(row: dict[str, Any], *, base_url: str, model: str, api_key: str) -> float:
    """One reply of at most so many tokens as the row says, if it does."""
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        ask = [{"role": "user", "content": "guess"}]
        await client.chat(ask, max_tokens=row.get("max_tokens", 1))
    return 1.0


async def faulty(row: dict[str, Any], *, base_url: str, model: str, api_key: str) -> Any:
    """Plays one turn, and then does what the row says."""
    does = row.get("does", "")
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        ask = [{"role": "user", "content": "guess"}]
        reply = await client.chat(ask, max_tokens=1)
        await asyncio.sleep(0.05)
        if does == "none":
            return None
        if does == "raises":
            raise ValueError("no such game")
        if does == "text":
            return "good"
        if does == "exits":
            sys.exit(3)
        if does == "vanishes":
            os._exit(7)
        if does == "waits":
            await asyncio.sleep(600)
        if does == "hangs":
            time.sleep(600)
        if does == "floods":
            while True:
                try:
                    await client.post("nothing", {})
                except EndpointError:
                    pass
        if does == "large":
            await client.chat([{"role": "user", "content": "x" * 10_000_000}])
        if does == "other":
            parts = base_url.split("/")
            parts[-2] = "x" * len(parts[-2])
            async with ChatClient("/".join(parts), model=model, api_key=api_key) as other:
                await other.chat(ask, max_tokens=1)
        if does == "talks":
            while True:
                ask = [*ask, reply, {"role": "user", "content": "guess"}]
                reply = await client.chat(ask, max_tokens=1)
    return {"score": 1.0, "torch": float("torch" in sys.modules)}


async def several(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, by_segment: bool = True
) -> Any:
    """A main conversation with a second try and a branch, two subagents at once, a summary.

    The score of the main conversation depends on what was said in its second try; that of a
    subagent on the row.
    """
    arguments = {"model": model, "api_key": api_key}

    async def ask_helper(number: int) -> None:
        messages = [{"role": "user", "content": "digit"}]
        async with ChatClient(base_url, name=f"helper-{number}", **arguments) as helper:
            for told in ("higher", "lower"):
                reply = await helper.chat(messages, max_tokens=1 + number)
                messages += [reply, {"role": "user", "content": told}]

    async with ChatClient(base_url, **arguments) as client:
        messages = [{"role": "user", "content": "guess"}]
        await client.chat(messages, max_tokens=2)
        reply = await client.chat(messages, max_tokens=2)
        messages += [reply, {"role": "user", "content": said(row["digit"], 0)}]
        await asyncio.gather(ask_helper(0), ask_helper(1))
        await client.chat(messages, max_tokens=2)
        messages[-1] = {"role": "user", "content": said(row["digit"], 1)}
        await client.chat(messages, max_tokens=2)
        await client.chat([{"role": "user", "content": "digit 7 guess"}], max_tokens=3)
    score = float(sum(map(ord, str(reply["content"]))) % 5)
    scores = {"policy": score, "helper-0": 0.5, "helper-1": score * 2 - row["digit"] % 3}
    return {"score": score, **({"segment_scores": scores} if by_segment else {})}


async def choices(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, at_once: bool = True
) -> float:
    """Three choices of a first turn, of which the second is continued with two more.

    at_once: by n; otherwise by a request for each, one after another.
    """
    async with ChatClient(base_url, model=model, api_key=api_key) as client:

        async def ask(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
            body = {"messages": messages, "max_tokens": 2}
            if at_once:
                answer = await client.post("chat/completions", body | {"n": number})
                return [choice["message"] for choice in answer["choices"]]
            return [await client.chat(messages, max_tokens=2) for _ in range(number)]

        messages: list[dict[str, Any]] = [{"role": "user", "content": "guess"}]
        first = await ask(messages, 3)
        messages += [first[1], {"role": "user", "content": said(row["digit"], 0)}]
        second = await ask(messages, 2)
    return float(sum(map(ord, str(second[1]["content"]))) % 5)
