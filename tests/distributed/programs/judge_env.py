"""An environment and a judge of its episodes, by the row's "does"; imports no torch."""

from __future__ import annotations

import time
from typing import Any

from spmdflow.envs.client import ChatClient


async def episode(row: dict[str, Any], *, base_url: str, model: str, api_key: str) -> Any:
    """Two turns of different lengths. With "partly" some episodes fail, by what was said."""
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "guess"}]
        reply = await client.chat(messages, max_tokens=5)
        messages += [reply, {"role": "user", "content": "higher"}]
        await client.chat(messages, max_tokens=3)
    said = sum(map(ord, str(reply["content"])))
    if row["does"] == "partly" and len(str(reply["content"]).split()) % 2:
        raise ValueError("an odd number of words")
    return {"score": 0.25, "said": float(said)}


def lengths_of(episodes: list[dict[str, Any]]) -> list[int]:
    """Tokens that the policy sampled in each episode."""
    return [sum(part["num_sampled"] for part in each["segments"]) for each in episodes]


def ranks_of(episodes: list[dict[str, Any]]) -> list[float]:
    """How many episodes of the group are shorter."""
    lengths = lengths_of(episodes)
    return [float(sum(other < own for other in lengths)) for own in lengths]


async def judge(
    episodes: list[dict[str, Any]], *, base_url: str, model: str, api_key: str, scale: float = 1.0
) -> Any:
    """Ranks by length; "asks": adds what the model says of all responses."""
    does = episodes[0]["row"]["does"]
    if does == "raises":
        raise ValueError("no opinion")
    ranks = [rank * scale for rank in ranks_of(episodes)]
    if does == "short":
        return ranks[1:]
    if does == "omits":
        return [None, *ranks[1:]]
    if does == "asks":
        words = []
        for each in episodes:
            words += each["segments"][0]["response"].split()[:4]
        said = " ".join(words)
        async with ChatClient(base_url, model=model, api_key=api_key) as client:
            ask = [{"role": "user", "content": said}]
            replies = [await client.chat(ask, max_tokens=4) for _ in range(2)]
        opinion = sum(map(ord, "".join(str(each["content"]) for each in replies)))
        ranks = [rank + opinion / 1000 for rank in ranks]
    return [
        {"score": rank, "length": length}
        for rank, length in zip(ranks, lengths_of(episodes), strict=True)
    ]


def plain(episodes: list[dict[str, Any]], **_: str) -> list[float]:
    """Ranks by length, without async; waits if the first row says so."""
    if episodes[0]["row"].get("does") == "hangs":
        time.sleep(600)
    return ranks_of(episodes)


def other_parameters(episodes: list[dict[str, Any]]) -> list[float]:
    """Lacks the parameters of a judge."""
    return [0.0 for _ in episodes]
