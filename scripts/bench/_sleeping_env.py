"""The game of algos/guess with a tail: a few episodes take far longer than the others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from spmdflow import ChatClient

NUM_GUESSES = 4


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    share: float = 0.05,
    seconds: float = 2.0,
) -> float:
    """One game; in a `share` of them the environment sleeps `seconds` altogether."""
    pause = seconds / NUM_GUESSES if random.random() < share else 0.0
    messages = [{"role": "user", "content": "guess"}]
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for _ in range(NUM_GUESSES):
            await asyncio.sleep(pause)
            reply = await client.chat(messages, max_tokens=1)
            if str(reply["content"]).strip() == str(row["digit"]) and not pause:
                return 1.0
            messages += [reply, {"role": "user", "content": "higher"}]
    return 0.0
